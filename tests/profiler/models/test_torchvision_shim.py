"""Each case needs a fresh interpreter: operators are registered once per process."""

import subprocess
import sys

import pytest
import torch

from trappm.profiler.models.torchvision_shim import STARTUP

AS_INSTALLED = (
    "import sys\n"
    f"sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != {STARTUP!r}]\n"
    f"sys.modules.pop({STARTUP!r}, None)\n"
)
"""As an environment is before `make install` mends it."""


def run(code, folder=None):
    arguments = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=folder)


def test_torchvision_can_be_imported_after_the_shim():
    result = run(
        "from trappm.profiler.models import torchvision_shim as shim\n"
        "shim.register_missing_operators(); shim.register_missing_operators()\n"
        "import torch, torchvision\n"
        "shim.register_missing_operators()\n"
        "print(torch.ops.torchvision.nms.default._schema)"
    )
    assert result.returncode == 0, result.stderr
    assert "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" in result.stdout


def test_existing_operators_keep_their_implementation():
    result = run(
        "import torch\n"
        "library = torch.library.Library('torchvision', 'DEF')\n"
        "for name in ('nms', 'qnms'):\n"
        "    library.define(f'{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
        "    library.impl(name, lambda dets, scores, iou: dets + 41, 'CPU')\n"
        "from trappm.profiler.models.torchvision_shim import register_missing_operators\n"
        "register_missing_operators()\n"
        "one = torch.ones(1)\n"
        "print(torch.ops.torchvision.nms(one, one, 0.5).item())"
    )
    assert result.stdout.strip() == "42.0", result.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA: nothing is missing")
def test_the_shim_is_still_needed():
    """When this fails, torchvision can be imported without the shim: delete the shim."""
    result = run(f"{AS_INSTALLED}import torchvision")
    assert "torchvision::nms does not exist" in result.stderr


def test_a_repaired_environment_imports_torchvision(tmp_path):
    mending = (
        f"{AS_INSTALLED}from pathlib import Path\n"
        "from trappm.profiler.models.torchvision_shim import mend\n"
        f"print(mend(Path({str(tmp_path)!r})))"
    )
    broken = run(mending).stdout.strip() == "True"
    assert broken == (tmp_path / f"{STARTUP}.pth").exists()
    result = run(
        f"{AS_INSTALLED}import site; site.addsitedir({str(tmp_path)!r})\nimport timm; import trappm"
    )
    assert result.returncode == 0, result.stderr
    assert (
        "torch" not in run(f"import sys, {STARTUP}; print(*sys.modules)", tmp_path).stdout.split()
    )
