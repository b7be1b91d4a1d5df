"""Ceilings from kernels and from data sheets, and the kernels of a step under them."""

from dataclasses import replace

import numpy as np
import pytest
from store_whole import kernel

from research.priors.other_devices import errors_of_devices
from trappm.extensions.roofline.drawing import as_text, draw_png, lines
from trappm.extensions.roofline.report import print_rooflines, sentence
from trappm.extensions.roofline.roofs import BANDWIDTH, COMPUTE, KnownDevice, Roof, known_device
from trappm.extensions.roofline.steps import roofed_steps
from trappm.learner.heads.other_devices import Basis, OtherDevices
from trappm.learner.physics.devices.known_devices import known_devices
from trappm.prediction.answering import answers
from trappm.prediction.models.subjects import subject_of
from trappm.prediction.question import Question
from trappm.profiler.errors import InputError
from trappm.profiler.kernels.kernel_call import DataType, KernelCall, Operator
from trappm.profiler.records import Phase
from trappm.store import Store

CARD = {"device": "a100", "device_name": "NVIDIA A100-SXM4-40GB", "measuring_version": 2,
        "cache_bytes": {"L2": 40 << 20}}  # fmt: skip


def timed(call, time_ms, device="a100"):
    return kernel(call=call, time_ms=time_ms, device=device, attempt_key=f"{device} {call}"[:64],
                  environment={**CARD, "device": device})  # fmt: skip


def product(width, data_type=DataType.FP32):
    return KernelCall.of(
        Operator.MATMUL, data_type, batch=1, rows=width, depth=width, columns=width
    )


def copied(width):
    return KernelCall.of(Operator.COPY, batch=1024, width=width)


@pytest.fixture
def store():
    with Store.open("sqlite://") as store:
        yield store


@pytest.fixture(scope="module", autouse=True)
def home(module_home):
    """One data folder, so that what was traced is traced once."""


def test_measured_ceilings_take_precedence_over_the_data_sheet(store):
    store.kernels.record([timed(product(1000), 0.2), timed(copied(100_000), 1.0)])
    device = known_device(store, "a100")
    peaks = device.of(COMPUTE)
    assert (peaks["fp32"].value, peaks["fp32"].source) == (pytest.approx(10), "measured")
    assert (peaks["tf32"].value, peaks["tf32"].source) == (156, "data sheet")
    assert [r.source for r in device.of(BANDWIDTH).values()] == ["measured"]
    assert device.memory.value == pytest.approx(819.2)


def test_name_resolves_to_its_only_matching_device(store):
    store.kernels.record([timed(product(1000), 0.2, "a100-pcie-40gb")])
    assert known_device(store, "A100").key == "a100-pcie-40gb"
    store.kernels.record([timed(product(1000), 0.2, "a100-pcie-80gb")])
    with pytest.raises(InputError, match="a100-pcie-40gb, a100-pcie-80gb"):
        known_device(store, "a100")
    with pytest.raises(InputError, match="--device v9000"):
        known_device(store, "v9000")


def step(devices, **options):
    question = Question(**{"batch_size": 64, "snapshot": "default", **options})
    return roofed_steps(question, subject_of("test_resnet"), devices)


def test_device_with_slow_kernels_has_a_slow_step(store):
    """The kernels of a device are evidence: as fast as the data sheet of its card, or a tenth."""

    def kernels(slower):
        calls = [product(width) for width in (512, 1024, 2048, 4096)]
        products = [timed(c, slower * 2 * c["rows"] ** 3 / 1.95e10, "a100") for c in calls]
        copies = [timed(copied(w), slower * w * 8192 / 1.55e9) for w in (1024, 8192, 65_536)]
        return products + copies

    store.kernels.record(kernels(10.0))
    with Store.open("sqlite://") as other:
        other.kernels.record(kernels(1.0))
        fast = known_device(other, "a100")
    slow, known = step([known_device(store, "a100"), fast])
    assert "its measured kernels" in slow.source
    assert "its measured kernels" in known.source
    assert slow.step_time_ms > 1.1 * known.step_time_ms


def roofs(tflops, gb_s):
    both = [(COMPUTE, "fp32", tflops), (BANDWIDTH, "memory", gb_s)]
    return tuple(Roof(kind=k, of=of, value=v, source="measured") for k, of, v in both)


@pytest.mark.parametrize("phase", Phase)
def test_ceilings_determine_bounds_of_kernels(store, phase):
    """The same times under other ceilings: where arithmetic is slow, it bounds what multiplies."""
    paper = known_device(store, "rtx-3090")
    quick, slow = (replace(paper, roofs=roofs(t, b)) for t, b in ((1e6, 1.0), (1e-3, 1e6)))
    first, second = step([quick, slow], phase=phase.value)
    assert first.step_time_ms == second.step_time_ms
    assert first.kernels.shares["compute"] == 0
    assert second.kernels.shares["bandwidth"] == 0
    assert first.kernels.shares["launch"] == second.kernels.shares["launch"] > 0
    for answer in (first, second):
        assert sum(answer.kernels.shares.values()) == pytest.approx(1)
        assert answer.kernels.points[0].time_ms == max(p.time_ms for p in answer.kernels.points)
    assert sentence(second).startswith(("Compute most bounds", "Launching most bounds"))


def test_points_have_the_operations_and_bytes_of_their_kernels(store):
    (roofed,) = step([known_device(store, "rtx-3090")], phase="infer", precision="fp32")
    (classifier,) = [p for p in roofed.kernels.points if p.name == "linear"]
    rows, columns, depth = map(int, classifier.size.split("x"))
    assert rows == 64
    assert classifier.flop == 2 * rows * columns * depth
    assert classifier.bytes == pytest.approx(
        4 * (rows * columns + rows * depth + columns * depth + columns), rel=0.02
    )
    assert classifier.tflops == pytest.approx(classifier.flop / classifier.time_ms / 1e9)


def test_open_settings_default_to_the_most_common_of_labels(store):
    """The same settings on all devices: of the first that has heads."""
    paper, trained = (known_device(store, name) for name in ("l4", "rtx-3090"))
    first, second = step([paper, trained])
    assert first.settings == second.settings
    assert "labels, in snapshot" in second.source
    assert {p.data_type for p in first.kernels.points} >= {"fp16"}  # its labels are of autocast
    plain, _ = step([paper, trained], precision="fp32")
    assert {p.data_type for p in plain.kernels.points} == {"fp32", "tf32"}


def test_step_time_without_labels_equals_predict(store):
    """Use the snapshot for cards without labels, unless the device has measured kernels."""
    (shipped,) = Question(snapshot="default").snapshots
    errors = errors_of_devices(np.array([-0.2, 0.1, 0.3]), ["a", "b", "c"])
    others = OtherDevices(
        known_devices().centre + 0.1,
        {},
        {(basis, phase): errors for basis in Basis for phase in Phase},
        errors,
    )
    question = Question(batch_size=8, snapshots=[replace(shipped, others=others)])
    subject = subject_of("test_resnet")
    for name, source in (("l4", "data sheet"), ("v100-32gb", "labels of v100-16gb")):
        (roofed,) = roofed_steps(question, subject, [known_device(store, name)])
        (predicted,) = answers([(question, subject, question.device_keys(name, None)[0])])
        assert roofed.step_time_ms == pytest.approx(predicted.step_time_ms)
        assert source in roofed.source
    store.kernels.record([timed(product(1000), 0.2, "l4"), timed(copied(100_000), 1.0, "l4")])
    (roofed,) = roofed_steps(question, subject, [known_device(store, "l4")])
    assert "its measured kernels" in roofed.source


def test_lines_meet_at_the_ridge_point():
    device = KnownDevice(key="x", card="x", roofs=roofs(10.0, 1000.0))
    level, slanted = lines(device, 0.1, 1000.0)
    assert level.ends == ((10.0, 10.0), (1000.0, 10.0))
    assert slanted.ends == ((0.1, 0.1), (10.0, 10.0))
    assert "10 TFLOP/s" in level.name
    assert as_text([device], []).count("─") > 100


def test_device_without_successful_kernels_has_no_ceilings(store, capsys, tmp_path):
    store.kernels.record([kernel("unstable", device="cpu-2t", message="a busy host")])
    device = known_device(store, "cpu-2t")
    print_rooflines([device], [])
    assert "no ceiling is known" in capsys.readouterr().out
    print_rooflines([known_device(store, "v100")], [])
    assert capsys.readouterr().out.startswith("v100: from its data sheet")  # known by no other name
    with pytest.raises(InputError, match="no ceiling of cpu-2t"):
        draw_png([device], [], tmp_path / "roofline.png")
    with pytest.raises(InputError, match="compute or memory ceiling of cpu-2t is unknown"):
        step([device])


def test_roofline_command_with_two_devices(printed, as_json, tmp_path, monkeypatch):
    """The answer comes first, and the drawing fits 80 columns (tables in files have no edge)."""
    monkeypatch.setenv("COLUMNS", "80")
    png = tmp_path / "roofline.png"
    words = "roofline v100 rtx-3090 --model test_resnet --batch-size 64"
    out = printed(words, "--png", png)
    sentences = out.partition("┌")[0]
    for line, device in zip(sentences.splitlines()[:2], ("v100", "rtx-3090"), strict=True):
        assert f"bounds a training step of test_resnet at batch 64 on {device}: " in line
        assert "Doubling the batch " in line
    drawn = [line for line in out.splitlines() if set(line) & set("│┤└")]
    assert len(drawn) >= 20
    assert all(len(line) <= 80 for line in drawn)
    assert all(any(mark in line for line in drawn) for mark in "ox")
    assert png.read_bytes().startswith(b"\x89PNG")
    rows = as_json(words)
    assert [row["device"] for row in rows] == ["v100", "rtx-3090"]
    for row in rows:
        step = row["step"]
        assert sum(step["shares"].values()) == pytest.approx(1)
        kernels = sum(kernel["time_ms"] for kernel in step["kernels"])
        assert 0 < kernels <= step["step_time_ms"]
        assert step["doubled"]["batch_size"] == 128


def test_invalid_roofline_questions_give_one_line(refusal, command, printed, tmp_path):
    for more in ("resnet9000", "test_resnet --phase sleep", "test_resnet --batch-size 0"):
        refusal(f"roofline v100 --model {more}")
    assert "trappm measure --kernels --device v9000" in refusal("roofline v9000")
    status, _, error = command("roofline v100 --png", tmp_path / "no" / "file.png")
    assert (status, len(error.splitlines())) == (2, 1)
    assert "ceilings: from its data sheet" in printed("devices v100")
