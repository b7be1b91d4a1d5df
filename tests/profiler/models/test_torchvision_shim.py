"""torchvision's operators where its own extension is loaded."""

import subprocess
import sys

import pytest


@pytest.mark.slow  # a new interpreter: operators are registered once per process
def test_existing_operators_keep_their_implementation():
    code = (
        "import torch\n"
        "library = torch.library.Library('torchvision', 'DEF')\n"
        "for name in ('nms', 'qnms'):\n"
        "    library.define(f'{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
        "    library.impl(name, lambda dets, scores, iou: dets + 41, 'CPU')\n"
        "import trappm, torchvision\n"
        "one = torch.ones(1)\n"
        "print(torch.ops.torchvision.nms(one, one, 0.5).item())"
    )
    arguments = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "42.0", result.stderr
