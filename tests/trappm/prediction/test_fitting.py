"""One rule for what fits on every surface, and which devices are covered by which evidence."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx_export import export_onnx

import trappm
from trappm import cli
from trappm.extensions.integrations.forecast import FirstStep, forecast
from trappm.learner.heads.device_heads import train_heads
from trappm.learner.heads.predictions import TrainedHeads
from trappm.learner.networks.gae import train_encoder
from trappm.learner.networks.presets import LAPTOP
from trappm.learner.snapshots.snapshot import save_snapshot
from trappm.learner.workload import Workload
from trappm.prediction.device_names import OWN, answerable
from trappm.prediction.fitting import LARGEST_BATCH, MemoryInterval, Verdict, largest_batch
from trappm.prediction.room import rooms
from trappm.prediction.snapshot_choice import snapshots_that_answer
from trappm.profiler.devices.capacity import USABLE_SHARE
from trappm.profiler.errors import SnapshotError
from trappm.profiler.models import zoo
from trappm.profiler.records import Phase, Precision
from trappm.profiler.static_profile import graph_template


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAPPM_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@given(
    fixed=st.floats(1, 5000), per_sample=st.floats(0.01, 500), above=st.floats(1, 2),
    capacity=st.floats(500, 200_000),
)  # fmt: skip
def test_the_largest_batch_is_the_last_whose_upper_bound_fits(fixed, per_sample, above, capacity):
    def memory(size):
        median = fixed + per_sample * size
        return MemoryInterval(median, median / above, median * above)

    largest = largest_batch(memory, capacity)
    usable = USABLE_SHARE * capacity
    assert largest == 0 or memory(largest).high_mib <= usable
    assert largest == LARGEST_BATCH or memory(largest + 1).high_mib > usable


@pytest.mark.parametrize(
    ("median", "high", "verdict"),
    [
        (900, 940, Verdict.FITS),
        (900, 941, Verdict.MAY_NOT_FIT),
        (940, 2000, Verdict.MAY_NOT_FIT),
        (941, 2000, Verdict.DOES_NOT_FIT),
    ],
)
def test_the_upper_bound_decides_what_fits_and_the_median_what_does_not(median, high, verdict):
    assert MemoryInterval(median, 1, high).verdict(1000) is verdict


def test_memory_reads_as_a_median_with_its_interval():
    assert MemoryInterval(8499, 8192, 8806).of(40_536) == "8.3 GiB (8.0 to 8.6) of 39.6"
    assert MemoryInterval(779, 740, 812).of(40_536) == "779 MiB (740 to 812) of 39.6 GiB"


def from_json(capsys, *command):
    capsys.readouterr()
    assert cli.run([*map(str, command), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("device", ["a100", "v100", "h100", "rtx3090", "t4"])
@pytest.mark.parametrize("precision", ["fp32", "amp-fp16"])
@pytest.mark.parametrize("size", [4, 4096])
def test_every_surface_gives_one_answer(capsys, device, precision, size):
    settings = {"precision": precision, "optimizer": "momentum", "memory_format": "contiguous"}
    asked = {"input_size": 160, "batch_size": size, **settings}
    options = [x for k, v in asked.items() for x in (f"--{k.replace('_', '-')}", v)]
    predicted = trappm.predict("test_resnet", device=device, **asked)
    expected = (predicted.memory_mib, predicted.verdict, predicted.largest_batch)
    estimate = trappm.estimate("test_resnet", **asked)
    found = {
        "estimate": (
            estimate.memory_mib(device), estimate.verdict(device), estimate.largest_batch(device)
        ),
    }  # fmt: skip
    for command in ("predict", "fits", "compare", "estimate"):
        row = from_json(capsys, *command.split(), "test_resnet", "--device", device, *options)
        inner = (row[key] for key in ("predictions", "prediction", "devices") if row.get(key))
        row = next(inner, row)
        row = row[0] if isinstance(row, list) else row.get(device, row)
        found[command] = row["memory_mib"], row["verdict"], row["largest_batch"]
        assert row["fits"] == (predicted.verdict is Verdict.FITS)
    alone = trappm.predict_parallel("test_resnet", device=device, gpus=1, **asked)
    found["scale"] = alone.memory_mib, alone.verdict, predicted.largest_batch
    largest = from_json(
        capsys, "fits", "test_resnet", "--device", device, "--input-size", 160,
        *(x for k, v in settings.items() for x in (f"--{k.replace('_', '-')}", v)),
    )  # fmt: skip
    assert largest["batch_size"] == largest["largest_batch"] == predicted.largest_batch
    assert largest["verdict"] == "fits"
    for surface, answer in found.items():
        assert answer[1:] == expected[1:], surface
        assert answer[0] == pytest.approx(expected[0]), surface


def test_a_callback_says_of_a_named_model_what_predict_does():
    import torch

    module = zoo.create_model("test_resnet", 160)
    first = FirstStep(
        model=module, name="test_resnet", args=(torch.empty(16, 3, 160, 160),),
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
        precision=Precision.FP32, epoch_batches=None, device=torch.device("cpu"),
    )  # fmt: skip
    said = forecast(first, "a100")
    predicted = trappm.predict(
        "test_resnet", input_size=160, batch_size=16, device="a100", precision="fp32",
        optimizer="momentum",
    )  # fmt: skip
    assert said.memory == pytest.approx(predicted.memory)
    assert (said.verdict, said.largest_batch) == (predicted.verdict, predicted.largest_batch)


@pytest.mark.parametrize("device", ["a100", "v100"])
def test_a_module_needs_what_predict_says_of_it(device):
    import torch

    module, images = zoo.create_model("test_resnet", 160), torch.empty(16, 3, 160, 160)
    estimate = trappm.estimate(module, images)
    predicted = trappm.predict(module, images, device=device, precision="fp32", optimizer="sgd")
    assert estimate.memory(device) == pytest.approx(predicted.memory)
    assert estimate.largest_batch(device) == predicted.largest_batch
    named = trappm.estimate("test_resnet", batch_size=16, input_size=160)
    assert estimate.memory(device) == pytest.approx(named.memory(device), rel=0.01)


def test_a_snapshot_that_is_named_answers_or_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    with pytest.raises(SnapshotError, match="no snapshot 'nosuch'"):
        trappm.estimate("test_resnet", input_size=64, snapshot="nosuch").memory("a100")


def test_a_module_fits_by_the_same_rule():
    import torch

    estimate = trappm.estimate(torch.nn.Linear(512, 512), torch.empty(8, 512))
    largest = estimate.largest_batch("gtx1650")
    usable_mib = USABLE_SHARE * estimate.capacity_mib("gtx1650")
    assert estimate.memory("gtx1650", largest).high_mib <= usable_mib
    low, high = estimate.memory("gtx1650")[1:]
    assert low < estimate.memory_mib("gtx1650") < high


def test_states_of_the_optimizer_leave_less_room_and_inference_more():
    asked = {"input_size": 160}
    sgd, adam, infer = (
        rooms("test_vit", ["t4"], **asked, **more)[0].prediction.largest_batch
        for more in ({"optimizer": "sgd"}, {"optimizer": "adam"}, {"phase": "infer"})
    )
    assert infer > sgd >= adam


def test_a_model_larger_than_the_card_does_not_fit_and_the_answer_has_its_size(capsys):
    assert cli.run(["fits", "vit_7b_patch16_dinov3", "--device", "gtx1650"]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("Does not fit GTX 1650 4 GB: ")
    assert " of 4.0 for vit_7b_patch16_dinov3 at batch 1 in " in first
    assert first.endswith(" Largest batch that fits: 0.")


def test_fits_names_the_number_of_tokens(capsys):
    pytest.importorskip("transformers")
    command = ["fits", "hf:gpt2-tiny", "--device", "t4", "--sequence-length", "64"]
    assert cli.run(command) == 0
    assert " samples of 64 tokens per step in fp32 " in capsys.readouterr().out
    assert cli.run([*command, "--batch-size", "2"]) == 0
    assert capsys.readouterr().out.startswith("Fits T4 16 GB: ")


def test_the_command_answers_in_json_for_each_card(capsys):
    rows = from_json(capsys, "fits", "test_resnet", "--device", "a100", "--device", "t4")
    assert [row["device"] for row in rows] == ["a100-40gb", "t4"]
    assert rows[0]["largest_batch"] > rows[1]["largest_batch"] > 0


def test_what_cannot_be_asked_is_one_line(capsys):
    for arguments, words in (
        (["--device", "cpu-2t"], "the memory of cpu-2t depends on its host"),
        (["--device", "cuda:0"], "does not say which model it is"),
        (["--device", "mi300x"], "TraPPM covers NVIDIA cards"),
        (["--device", "a100", "--phase", "eval"], "phase"),
        (["--device", "a100", "--optimizer", "lion"], "optimizer"),
    ):
        assert cli.run(["fits", "test_resnet", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line


def test_a_file_of_one_batch_size_is_answered_at_that_one(tmp_path, capsys):
    export_onnx("test_resnet", 64, tmp_path / "fixed.onnx", batch_size=3)
    assert cli.run(["fits", str(tmp_path / "fixed.onnx"), "--device", "a100"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("Fits A100 40 GB: ")
    assert " at batch 3 in fp32" in line
    assert "Largest" not in line


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
    prediction = trappm.predict("test_resnet", input_size=64, snapshot=snapshot, device="v100")
    limit = USABLE_SHARE * prediction.capacity_mib
    assert 0 <= prediction.out_of_memory <= 1
    assert (prediction.out_of_memory > 0.5) == (prediction.memory_mib > limit)
    assert "out_of_memory" not in prediction.missing


def test_a_question_asked_before_needs_no_torch():
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
    assert any("from the simulated step" in remark for remark in prediction.remarks)
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
