"""`trappm.lookup`: from the store where the same graph was measured, predicted where it was not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from label_samples import DEVICE, measurement
from onnx_export import export_onnx

import trappm
from trappm.learner.heads.device_heads import train_heads
from trappm.learner.heads.predictions import TrainedHeads
from trappm.learner.networks.gae import train_encoder
from trappm.learner.networks.presets import LAPTOP
from trappm.learner.snapshots.snapshot import save_snapshot
from trappm.learner.workload import Workload
from trappm.prediction.looking_up.answer import Answer
from trappm.profiler.errors import DeviceError, InputError, SnapshotError, TrappmError
from trappm.profiler.models import zoo
from trappm.profiler.records import Phase, Protocol
from trappm.profiler.static_profile import static_profile, step_profile
from trappm.store import Home, LabelFilter, Store

torch.set_num_threads(1)
MODEL, SIZE = "test_resnet", 64


@pytest.fixture(scope="module")
def profile():
    return static_profile(MODEL, SIZE)


@pytest.fixture(scope="module")
def graph(profile):
    return profile.graph


@pytest.fixture(scope="module")
def step(profile):
    """The step profile as the store keeps it."""
    return profile.step.to_bytes()


@pytest.fixture
def store(tmp_path, monkeypatch, graph, step):
    """A store that knows the static profile of one architecture, under two names."""
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    with Store.open(Home.open().database_url) as opened:
        for name in (MODEL, "twin"):
            opened.workloads.save_graph(name, SIZE, graph.to_bytes(), None, step=step)
        yield opened


@pytest.fixture(scope="module")
def snapshot(graph, tmp_path_factory):
    """The folder of a real, tiny snapshot."""
    graphs = [graph.at(batch_size) for batch_size in (1, 2, 3, 4, 6, 8)]
    preset = replace(
        LAPTOP,
        encoder=replace(LAPTOP.encoder, widths=(8, 8, 8, 8), steps=2),
        head=replace(LAPTOP.head, widths=(8, 8), hidden=(8, 8), steps=2),
    )
    encoder = train_encoder(graphs, preset.encoder, np.random.default_rng(0))
    values = np.array([(10.0 * g.batch_size, 100.0 + g.batch_size, np.nan) for g in graphs])
    heads = train_heads(
        [Workload(graph=graph) for graph in graphs], values, groups=[MODEL] * 6, preset=preset.head,
        generator=np.random.default_rng(0),
    )  # fmt: skip
    return save_snapshot(
        tmp_path_factory.mktemp("registry"), encoder=encoder,
        heads={DEVICE: {Phase.TRAIN: TrainedHeads(heads, ())}}, source_device=DEVICE,
        preset=preset, labels=[], fields={},
    ).folder  # fmt: skip


def ask(model=MODEL, **fields):
    fields = {"device": DEVICE, "batch_size": 2, "input_size": SIZE} | fields
    return trappm.lookup(model, **fields)


def test_what_was_measured_is_answered_from_the_store(store):
    kept = store.measurements.record(measurement(MODEL, 2, step_ms=7.0))
    store.measurements.record(measurement(MODEL, 4, step_ms=9.0))
    store.measurements.record(measurement(MODEL, 2, step_ms=8.0, device="a100"))
    store.measurements.record(
        measurement(MODEL, 2, step_ms=5.0, settings={"precision": "amp-fp16"})
    )
    store.measurements.record(measurement(MODEL, 2, step_ms=5.0, input_size=96))
    answer = ask()
    assert (answer.source, [label.id for label in answer.labels]) == ("measured", [kept.label_id])
    assert tuple(answer) == (7.0, pytest.approx(321.123456789012), None)
    assert answer.prediction is None
    assert ask(batch_size=4).step_time_ms == 9.0
    assert ask(device="a100").step_time_ms == 8.0
    assert ask(precision="amp-fp16").step_time_ms == 5.0


_IN_ANOTHER_PROCESS = """
import sys, trappm
from trappm.prediction.looking_up.answer import Answer
answer = trappm.lookup({model!r}, device={device!r}, batch_size={batch}, input_size={size},
                       snapshot={snapshot!r})
print(repr(answer.to_kept()))
print(sorted({{"torch", "sqlalchemy", "pandas", "timm"}} & set(sys.modules)))
"""


@pytest.mark.parametrize("batch", [2, 3])
def test_a_second_answer_is_the_first_one_and_needs_no_database_library(store, snapshot, batch):
    store.measurements.record(measurement(MODEL, 2, step_ms=7.0))
    first = ask(batch_size=batch, snapshot=str(snapshot))
    assert first.source == ("measured" if batch == 2 else "predicted")
    assert Answer.from_kept(json.loads(json.dumps(first.to_kept()))) == first
    code = _IN_ANOTHER_PROCESS.format(
        model=MODEL, device=DEVICE, batch=batch, size=SIZE, snapshot=str(snapshot)
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [repr(first.to_kept()), "[]"]


def test_a_kept_answer_ends_with_the_next_label(store, snapshot):
    assert ask(snapshot=snapshot).source == "predicted"
    store.measurements.record(measurement(MODEL, 2, step_ms=7.0))
    assert ask(snapshot=snapshot).step_time_ms == 7.0
    store.close()  # what was in the log comes into the database
    assert ask(snapshot=snapshot).step_time_ms == 7.0
    with Store.open(Home.find().database_url) as again:
        paper = Protocol(name="paper")
        again.measurements.record(measurement(MODEL, 2, step_ms=8.0, protocol=paper))
    assert ask(snapshot=snapshot).step_time_ms == 8.0


def test_a_database_elsewhere_is_asked_each_time(store, tmp_path, monkeypatch):
    home = Home.find()
    assert home.database_files == (home.database_path, home.path / "labels.db-wal")
    monkeypatch.setenv("TRAPPM_DATABASE", f"sqlite:///{tmp_path}/elsewhere.db")
    assert home.database_files is None
    with Store.open(home.database_url) as elsewhere:
        elsewhere.measurements.record(measurement(MODEL, 2, step_ms=5.0))
        assert ask().step_time_ms == 5.0
    assert not (home.path / "answers").exists()


def test_labels_of_the_same_graph_under_another_name_all_count(store):
    other = store.measurements.record(measurement("twin", 2, step_ms=6.0)).label_id
    assert [label.id for label in ask().labels] == [other]
    own = store.measurements.record(measurement(MODEL, 2, step_ms=7.0)).label_id
    paper = store.measurements.record(
        measurement("twin", 2, protocol=Protocol(name="paper"))
    ).label_id
    answer = ask()
    assert answer.step_time_ms == 7.0  # one's own name comes first
    assert [label.id for label in answer.labels] == [own, paper, other]


def test_one_graph_with_another_training_step_is_another_model(store, graph, snapshot):
    """Dropout and frozen parameters are not in a graph, which is of evaluation mode."""
    frozen = zoo.create_model(MODEL, SIZE)
    frozen.conv1.requires_grad_(False)
    other = step_profile(frozen, SIZE).to_bytes()
    store.workloads.save_graph("frozen", SIZE, graph.to_bytes(), None, step=other)
    store.workloads.save_graph(
        "unknown", SIZE, graph.to_bytes(), None, step_refusal="cannot be traced"
    )
    for name in ("frozen", "unknown"):
        store.measurements.record(measurement(name, 2, step_ms=6.0))
    assert ask(snapshot=snapshot).source == "predicted"
    store.measurements.record(measurement("twin", 2, step_ms=8.0))
    answer = ask()
    assert (answer.step_time_ms, len(answer.labels)) == (8.0, 1)
    assert "measured as twin" in answer.remark


def test_measured_labels_come_before_imported_and_simulated_ones_never(store, snapshot):
    store.measurements.record(measurement(MODEL, 2, provenance="simulated", step_ms=1.0))
    assert ask(snapshot=snapshot).source == "predicted"
    store.measurements.record(measurement(MODEL, 2, provenance="imported", step_ms=2.0,
                             protocol=Protocol(name="published")))  # fmt: skip
    answer = ask()
    assert (answer.source, answer.step_time_ms) == ("imported", 2.0)
    store.measurements.record(measurement(MODEL, 2, step_ms=3.0, protocol=Protocol(name="paper")))
    answer = ask()
    assert (answer.source, answer.step_time_ms, len(answer.labels)) == ("measured", 3.0, 2)


def test_memory_that_ran_out_is_a_bound(store):
    store.measurements.record(
        measurement(MODEL, 2, "oom", memory_detail_mib={"capacity": 40_000.0})
    )
    answer = ask()
    assert (answer.memory_mib, answer.memory_above_mib) == (None, 40_000.0)


def test_an_architecture_that_nobody_profiled_is_found_by_its_profile(store):
    store.workloads.save_graph(MODEL, SIZE, None, "as if it had not been made")
    store.measurements.record(measurement("twin", 2, step_ms=6.0))
    assert ask().step_time_ms == 6.0


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """ONNX files of the model: for every batch size, and for batch size 2 only."""
    folder = tmp_path_factory.mktemp("onnx")
    export_onnx(MODEL, SIZE, folder / "open.onnx")
    export_onnx(MODEL, SIZE, folder / "fixed.onnx", batch_size=2)
    return folder


def test_a_file_is_found_by_its_graph_under_any_name(store, files, snapshot):
    kept = store.measurements.record(measurement("twin", 2, step_ms=6.0)).label_id
    for name in ("open.onnx", "fixed.onnx"):
        answer = trappm.lookup(files / name, device=DEVICE, batch_size=2)
        assert (answer.source, [label.id for label in answer.labels]) == ("measured", [kept]), name
        assert "measured as twin" in answer.remark
        assert "dropout" in answer.remark
    answer = trappm.lookup(files / "open.onnx", device=DEVICE, batch_size=3, snapshot=snapshot)
    assert answer.source == "predicted"
    assert trappm.lookup(files / "fixed.onnx", device=DEVICE).batch_size == 2
    with pytest.raises(InputError, match="fixed at 2, not 3"):
        trappm.lookup(files / "fixed.onnx", device=DEVICE, batch_size=3)
    with pytest.raises(InputError, match="only timm names can be measured"):
        trappm.lookup(files / "open.onnx", device=DEVICE, batch_size=3, measure=True)


def test_labels_of_an_architecture_without_a_graph_are_found_once_it_is_made(
    tmp_path, monkeypatch, files
):
    """As those of a published sheet: nobody has built a pool of what it names."""
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "other"))
    with Store.open(Home.open().database_url) as store:
        for name in (MODEL, "no_such_net"):
            store.measurements.record(measurement(name, 2, provenance="imported"))
    file = files / "open.onnx"
    answer = trappm.lookup(file, device=DEVICE, batch_size=2)
    assert answer.source == "predicted"  # by the snapshot that ships with the package
    assert re.search(r"2 architectures .* trappm pool build", answer.remark)
    made = static_profile(MODEL, 64)
    with Store.open(Home.open().database_url) as store:
        store.workloads.save_graph(
            MODEL, 64, made.graph.to_bytes(), None, step=made.step.to_bytes()
        )
    assert trappm.lookup(file, device=DEVICE, batch_size=2).source == "imported"
    remark = trappm.lookup(file, device=DEVICE, batch_size=3).remark
    assert "nearest labels there: test_resnet batch 2 at 64 px" in remark


def test_a_miss_tells_the_nearest_labels_and_a_misspelt_name(store, snapshot):
    for batch_size, settings in [(1, None), (4, None), (64, None), (2, {"optimizer": "adam"})]:
        store.measurements.record(measurement(MODEL, batch_size, settings=settings))
    answer = ask(batch_size=3, snapshot=snapshot)
    assert answer.source == "predicted"
    nearest = "test_resnet batch 4 at 64 px; test_resnet batch 1 at 64 px; test_resnet batch 64"
    assert nearest in answer.remark
    with pytest.raises(SnapshotError, match=r"no device 'cpu-3t'; did you mean 'cpu-2t'"):
        ask(device="cpu-3t", snapshot=snapshot)
    with pytest.raises(InputError, match=r"no protocol is named 'quik'; did you mean 'quick'"):
        ask(batch_size=4, protocol="quik")  # although there is a label


def test_what_was_not_measured_is_predicted_and_said_so(store, snapshot):
    answer = ask(batch_size=3, snapshot=snapshot)
    predicted = trappm.predict(
        MODEL, batch_size=3, input_size=SIZE, device=DEVICE, snapshot=snapshot
    )
    assert (answer.source, answer.labels) == ("predicted", ())
    assert tuple(answer) == tuple(predicted)
    assert answer.prediction.snapshot == predicted.snapshot
    adam = ask(batch_size=3, snapshot=snapshot, optimizer="adam")
    assert (adam.source, adam.prediction.optimizer) == ("predicted", "adam")


def test_without_label_and_snapshot_both_are_told(store, snapshot):
    pattern = r"no label of test_resnet at batch 2 on cpu-2t .*, and no prediction: "
    with pytest.raises(SnapshotError, match=pattern):
        ask(phase="infer")
    with pytest.raises(SnapshotError, match=r"no label of .* on a100 .*and no prediction: .*a100"):
        ask(device="a100", snapshot=snapshot)
    with pytest.raises(SnapshotError, match=r"no label of .*and no prediction: .*infer"):
        ask(phase="infer", snapshot=snapshot)
    with pytest.raises(InputError, match="did you mean"):
        ask("test_resnett")


def test_without_a_store_a_folder_predicts_and_none_is_made(tmp_path, monkeypatch, snapshot):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "nowhere"))
    assert ask(snapshot=snapshot).source == "predicted"
    with pytest.raises(SnapshotError, match=f"no head for infer steps on {DEVICE}"):
        ask(phase="infer")
    made = {path.name for path in tmp_path.rglob("*") if path.suffix != ".json"}
    assert made <= {"nowhere", "profiles", "answers"}  # of what was asked about


PATIENT = Protocol(
    name="patient", warmup_steps=1, min_steps=2, max_steps=3, max_seconds=0.3,
    unstable_relative_iqr=1e9, unstable_lost_share=1.0, timeout_s=120,
)  # fmt: skip


def test_a_miss_is_measured_when_asked_and_never_measured_twice(store):
    first = ask(measure=True, protocol=PATIENT)
    assert first.source == "measured"
    assert first.step_time_ms > 0
    second = ask(measure=True, protocol=PATIENT)
    assert second == first
    assert len(store.labels.query(LabelFilter(outcome="any"))) == 1


def test_a_measurement_without_a_result_is_kept_and_told(store):
    with pytest.raises(TrappmError, match=r"ended as (timeout|error).* kept as number 1"):
        ask(measure=True, protocol=replace(PATIENT, timeout_s=0.01))
    assert len(store.labels.query(LabelFilter(outcome="any"))) == 1
    with pytest.raises(DeviceError, match="this machine has"):
        ask(device="a100", measure=True)
    with pytest.raises(InputError, match="no protocol is named 'swift'"):
        ask(measure=True, protocol="swift")
