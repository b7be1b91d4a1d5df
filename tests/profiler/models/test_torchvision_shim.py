"""Each case needs a fresh interpreter: operators are registered once per process."""

import subprocess
import sys

import pytest
import torch


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )


def test_torchvision_can_be_imported_after_the_shim_twice():
    result = run(
        "from trappm.profiler.models import torchvision_shim as shim\n"
        "shim.register_missing_operators(); shim.register_missing_operators()\n"
        "import torch, torchvision\n"
        "shim.register_missing_operators()\n"
        "print(torch.ops.torchvision.nms.default._schema)"
    )
    assert result.returncode == 0, result.stderr
    assert "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" in result.stdout


def test_operators_that_are_there_keep_their_implementation():
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
    result = run("import torchvision")
    assert "torchvision::nms does not exist" in result.stderr
