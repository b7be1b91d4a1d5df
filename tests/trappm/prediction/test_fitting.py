"""The largest batch that fits a card, and what can be answered for by which evidence."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from onnx_export import export_onnx

import trappm
from trappm import cli
from trappm.integrations.forecast import Forecast
from trappm.learner.heads.device_heads import train_heads
from trappm.learner.heads.predictions import TrainedHeads
from trappm.learner.networks.gae import train_encoder
from trappm.learner.networks.presets import LAPTOP
from trappm.learner.snapshots.snapshot import save_snapshot
from trappm.learner.workload import Workload
from trappm.prediction.device_names import OWN, answerable
from trappm.prediction.fitting import fitting
from trappm.prediction.models.subjects import subject_of
from trappm.prediction.snapshot_choice import snapshots_that_answer
from trappm.profiler.devices.capacity import USABLE_SHARE
from trappm.profiler.errors import InputError
from trappm.profiler.records import Phase
from trappm.profiler.static_profile import graph_template


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAPPM_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_largest_batch_fits_and_one_more_does_not(optimizer):
    subject = subject_of("test_resnet", input_size=160)
    (row,) = fitting(subject, ["gtx1650"], optimizer=optimizer)
    same = trappm.estimate("test_resnet", batch_size=1, input_size=160, optimizer=optimizer)
    assert row.largest_batch == same.largest_batch("gtx1650") > 1
    usable_mib = USABLE_SHARE * row.capacity_mib
    assert row.memory_mib == same.memory_mib("gtx1650", row.largest_batch) <= usable_mib
    assert same.memory_mib("gtx1650", row.largest_batch + 1) > usable_mib
    assert same.fits("gtx1650", row.largest_batch)
    assert not same.fits("gtx1650", row.largest_batch + 1)
    assert f"up to {row.largest_batch:,} samples" in str(row)
    assert f"with {optimizer}: " in str(row)


def test_states_of_the_optimizer_leave_less_room_and_inference_more():
    subject = subject_of("test_vit", input_size=160)
    rows = [
        *fitting(subject, ["t4"], optimizer="sgd"),
        *fitting(subject, ["t4"], optimizer="adam"),
        *fitting(subject, ["t4"], phase="infer"),
    ]
    sgd, adam, infer = (row.largest_batch for row in rows)
    assert infer > sgd >= adam


def test_a_model_larger_than_the_card_is_told_with_its_size(capsys):
    assert cli.run(["fits", "vit_7b_patch16_dinov3", "--device", "gtx1650"]) == 0
    (sentence,) = capsys.readouterr().out.splitlines()
    assert sentence.startswith("vit_7b_patch16_dinov3 does not fit gtx1650 in fp32 with sgd: ")
    assert sentence.endswith(" of 4 GiB, of which 6% must stay free.")


def test_what_is_safe_is_no_more_than_what_fits_and_both_answers_name_the_other(capsys):
    """Labels of A100 show more memory than the simulation, and an upper bound is more still."""
    (row,) = fitting(subject_of("test_resnet", input_size=160), ["a100"])
    prediction = trappm.predict("test_resnet", input_size=160, device="a100")
    assert 0 < prediction.largest_batch_size <= row.largest_batch
    assert "trappm predict" in str(row)
    command = ["predict", "test_resnet", "--input-size", "160", "--device", "a100"]
    assert cli.run(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"largest safe batch: {prediction.largest_batch_size:,}, whose upper bound" in shown
    assert "trappm fits" in shown
    assert " more by labels" in shown


def test_a_step_that_fits_is_within_what_the_largest_batch_is_of():
    """One notion of what fits, in estimates, searches and callbacks."""
    estimate = trappm.estimate("test_resnet", batch_size=1, input_size=160)
    largest = estimate.largest_batch("a100")
    verdicts = {
        size: Forecast(
            model="test_resnet", device="a100", batch_size=size,
            memory_mib=estimate.memory_mib("a100", size),
            capacity_mib=estimate.capacity_mib("a100"), largest_batch=largest,
            epoch_batches=None, step_time_ms=None,
        ).fits
        for size in (largest, largest + 1)
    }  # fmt: skip
    assert verdicts == {largest: True, largest + 1: False}


def test_the_command_answers_in_json_for_each_card(capsys):
    command = ["fits", "test_resnet", "--device", "a100", "--device", "t4", "--json"]
    assert cli.run(command) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["device"] for row in rows] == ["a100", "t4"]
    assert rows[0]["largest_batch"] > rows[1]["largest_batch"] > 0
    assert rows[0]["source"] == "traced"


def test_what_cannot_be_asked_is_one_line(capsys):
    for arguments, words in (
        (["--device", "cpu-2t"], "no card is known as 'cpu-2t'"),
        (["--device", "a100", "--phase", "eval"], "phase"),
        (["--device", "a100", "--optimizer", "lion"], "optimizer"),
    ):
        assert cli.run(["fits", "test_resnet", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line


def test_a_file_of_one_batch_size_is_refused(tmp_path):
    export_onnx("test_resnet", 64, tmp_path / "fixed.onnx", batch_size=3)
    with pytest.raises(InputError, match="one batch size only, 3"):
        fitting(subject_of(tmp_path / "fixed.onnx"), ["a100"])


def test_networks_tell_the_probability_of_running_out_of_memory(tmp_path):
    preset = replace(
        LAPTOP,
        encoder=replace(LAPTOP.encoder, widths=(8, 8), steps=2),
        head=replace(
            LAPTOP.head, physical_prior=False, widths=(8,), hidden=(8,), steps=2, members=2
        ),
    )
    graphs = [graph_template(n, 64).at(2) for n in ("test_resnet", "test_vit", "test_convnext")]
    encoder = train_encoder(graphs, preset.encoder, np.random.default_rng(0))
    embedded = zip(graphs, encoder.embed(graphs), strict=True)
    heads = train_heads(
        [Workload(graph=graph, embedding=row) for graph, row in embedded],
        np.full((3, 3), 15_000.0),
        groups=["a", "b", "c"],
        preset=preset.head,
        generator=np.random.default_rng(0),
    )
    snapshot = save_snapshot(
        tmp_path, encoder=encoder, heads={"v100": {Phase.TRAIN: TrainedHeads(heads, ())}},
        source_device="v100", preset=preset, labels=[], fields={"cards": {"v100": "v100 16gb"}},
    ).folder  # fmt: skip
    prediction = trappm.predict("test_resnet", input_size=64, snapshot=snapshot)
    limit = USABLE_SHARE * prediction.capacity_mib
    assert 0 <= prediction.out_of_memory <= 1
    assert (prediction.out_of_memory > 0.5) == (prediction.memory_mib > limit)
    assert "out_of_memory" not in prediction.missing


def test_a_kept_profile_needs_no_torch():
    program = (
        "import sys; from trappm import cli; "
        "status = cli.run(['fits', 'test_resnet', '--device', 'a100']); "
        "print(status, 'torch' in sys.modules)"
    )
    cli.run(["fits", "test_resnet", "--device", "a100"])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 False"


def test_devices_are_listed_a_second_time_without_torch(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    assert cli.run(["devices", "--json"]) == 0
    first = capsys.readouterr().out
    program = (
        "import sys\nfrom trappm import cli\nstatus = cli.run(['devices', '--json'])\n"
        "print(status, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr.strip()) == (first, "0 False")


def test_devices_come_with_their_evidence(capsys):
    rows = {row.device: row for row in answerable(snapshots_that_answer("default"))}
    assert rows["h100"].evidence["train"] == {"step_time_ms": OWN, "memory_mib": OWN}
    assert "data sheet" in rows["rtx-5090-32gb"].evidence["train"]["step_time_ms"]
    assert rows["cpu-2t"].memory_gib is None
    assert not rows["cpu-2t"].has_labels
    for row in rows.values():  # each is answered for by the name that is listed
        assert row.evidence
    prediction = trappm.predict("test_resnet", device="rtx-5090-32gb")
    assert prediction.out_of_memory is not None
    assert any("the simulated step alone" in remark for remark in prediction.remarks)
    assert cli.run(["devices"]) == 0
    shown = capsys.readouterr().out
    assert "step time and memory from its labels" in shown
    assert all(device in shown for device in rows)
    assert cli.run(["devices", "--json"]) == 0
    assert {row["device"] for row in json.loads(capsys.readouterr().out)} == set(rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["resnet5x"], "did you mean 'resnet50'"),
        (["resnet50", "--batch-size", "0"], "batch size is 0"),
        (["resnet50", "--input-size", "0"], "input size is 0"),
        (["resnet50", "--optimizer", "lion"], "optimizer"),
    ],
)
def test_what_is_wrong_with_an_estimate_is_told_without_torch(arguments, words):
    program = (
        "import sys; from trappm import cli; "
        f"status = cli.run(['estimate', *{arguments!r}]); print(status, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["2", "False"]
    assert words in done.stderr
