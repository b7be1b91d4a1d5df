"""Each case needs a new interpreter: operators are registered once per process."""

import subprocess
import sys


def run(code):
    arguments = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(arguments, capture_output=True, text=True, check=False)


def test_torchvision_can_be_imported_after_trappm():
    result = run(
        "import sys, trappm\n"
        "assert 'torch' not in sys.modules\n"
        "import torch, torchvision\n"
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
        "import trappm, torchvision\n"
        "one = torch.ones(1)\n"
        "print(torch.ops.torchvision.nms(one, one, 0.5).item())"
    )
    assert result.stdout.strip() == "42.0", result.stderr
