"""Ceilings from data sheets, and the kernels of a step under them."""

from dataclasses import replace

import pytest

from trappm.extensions.roofline.report import describe
from trappm.extensions.roofline.roofs import (
    BANDWIDTH,
    COMPUTE,
    Roof,
    roofline_device,
)
from trappm.extensions.roofline.steps import roofline_steps
from trappm.prediction.models import subject_of
from trappm.prediction.question import Question
from trappm.prediction.selection import Selection
from trappm.profiler.records import Phase


@pytest.fixture(scope="module", autouse=True)
def home(module_home):
    """One data folder, so that what was traced is traced once."""


def test_ceilings_are_those_of_the_data_sheet_of_the_card():
    device = roofline_device("a100-40gb")
    assert {of: roof.value for of, roof in device.of(COMPUTE).items()} == {
        "fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312
    }  # fmt: skip
    assert device.memory.value == 1555
    assert roofline_device("a100", "a100 sxm4 80gb").memory.value > device.memory.value
    assert "bf16" not in roofline_device("v100-16gb").of(COMPUTE)


def step(devices, **options):
    question = Question(**{"batch_size": 64, "snapshot": "default", **options})
    return roofline_steps(Selection(question), subject_of("test_resnet"), devices)


def roofs(tflops, gb_s):
    both = [(COMPUTE, "fp32", tflops), (BANDWIDTH, "memory", gb_s)]
    return tuple(Roof(kind=k, of=of, value=v) for k, of, v in both)


@pytest.mark.parametrize("phase", Phase)
def test_ceilings_determine_bounds_of_kernels(phase):
    """The same times under other ceilings: where arithmetic is slow, it bounds what multiplies."""
    paper = roofline_device("rtx3090")
    quick, slow = (replace(paper, roofs=roofs(t, b)) for t, b in ((1e6, 1.0), (1e-3, 1e6)))
    first, second = step([quick, slow], phase=phase.value)
    assert first.step_time_ms == second.step_time_ms
    assert first.kernels.shares["compute"] == 0
    assert second.kernels.shares["bandwidth"] == 0
    assert first.kernels.shares["launch"] == second.kernels.shares["launch"] > 0
    for answer in (first, second):
        assert sum(answer.kernels.shares.values()) == pytest.approx(1)
        assert answer.kernels.points[0].time_ms == max(p.time_ms for p in answer.kernels.points)
    assert describe(second).startswith(("Compute most bounds", "Launching most bounds"))


def test_points_have_the_operations_and_bytes_of_their_kernels():
    (roofed,) = step([roofline_device("rtx3090")], phase="infer", precision="fp32")
    (classifier,) = [p for p in roofed.kernels.points if p.name == "linear"]
    rows, columns, depth = map(int, classifier.size.split("x"))
    assert rows == 64
    assert classifier.flop == 2 * rows * columns * depth
    assert classifier.bytes == pytest.approx(
        4 * (rows * columns + rows * depth + columns * depth + columns), rel=0.02
    )
    assert classifier.tflops == pytest.approx(classifier.flop / classifier.time_ms / 1e9)


def test_open_settings_default_to_the_most_common_of_labels():
    """The same settings on all devices: of the first that has heads."""
    paper, trained = (roofline_device(name) for name in ("l4", "rtx3090"))
    first, second = step([paper, trained])
    assert first.settings == second.settings
    assert "labels, in snapshot" in second.source
    assert {p.data_type for p in first.kernels.points} >= {"fp16"}  # its labels are of autocast
    plain, _ = step([paper, trained], precision="fp32")
    assert {p.data_type for p in plain.kernels.points} == {"fp32", "tf32"}


def test_roofline_command_with_two_devices(printed, as_json, tmp_path):
    png = tmp_path / "roofline.png"
    words = "roofline test_resnet --device v100 --device rtx-3090 --batch-size 64"
    out = printed(words, "--png", png)
    sentences = out.partition("┌")[0]
    for line, device in zip(sentences.splitlines()[:2], ("v100-16gb", "rtx3090"), strict=True):
        assert f"bounds a training step of test_resnet at batch 64 on {device}: " in line
    assert png.read_bytes().startswith(b"\x89PNG")
    rows = as_json(words)
    assert [row["device"] for row in rows] == ["v100-16gb", "rtx3090"]
    for row in rows:
        step = row["step"]
        assert sum(step["shares"].values()) == pytest.approx(1)
        kernels = sum(kernel["time_ms"] for kernel in step["kernels"])
        assert 0 < kernels <= step["step_time_ms"]
        assert step["doubled"]["batch_size"] == 128


def test_invalid_roofline_questions_give_one_line(refusal, command, tmp_path):
    assert "unknown device 'v9000'" in refusal("roofline test_resnet --device v9000")
    assert "data sheet" in refusal("roofline test_resnet --device cpu-2t")
    words = "roofline test_resnet --device v100 --png"
    status, _, error = command(words, tmp_path / "no" / "file.png")
    assert (status, len(error.splitlines())) == (2, 1)
