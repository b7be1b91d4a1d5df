"""The reader against damaged files: an answer or one clear refusal, in bounded memory and time."""

import subprocess
import sys
from pathlib import Path

import pytest
from onnx_export import export_onnx
from torch import nn

FUZZER = Path(__file__).with_name("onnx_fuzzer.py")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A chain of layers, and a transformer with arithmetic on shapes."""
    folder = tmp_path_factory.mktemp("models")
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)
    export_onnx(nn.Sequential(*layers), 8, folder / "layers.onnx")
    export_onnx("test_vit", 32, folder / "vit.onnx")
    return [str(path) for path in sorted(folder.iterdir())]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("seed", "examples"),
    [(1, 200), (2, 200), *(pytest.param(s, 2500, marks=pytest.mark.slow) for s in (3, 4, 5, 6))],
)
def test_damaged_files_are_read_or_refused_in_bounded_memory_and_time(
    models, tmp_path, seed, examples
):
    case = tmp_path / "case.onnx"
    command = [sys.executable, FUZZER, case, str(examples), str(seed), *models]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{case} ended with {result.returncode}: {result.stderr[-3000:]}"
