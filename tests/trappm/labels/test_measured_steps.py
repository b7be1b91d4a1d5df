"""Labels of a predicted step, found by its graph in the label store."""

import pytest
import torch
from onnx_export import export_onnx
from store_samples import DEVICE, configuration, measurement

import trappm
from trappm.profiler.models import zoo
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import TraceKey
from trappm.store import Home, Store

torch.set_num_threads(1)
MODEL, SIZE = "test_resnet", 64


@pytest.fixture(scope="module")
def step():
    return trace(MODEL, SIZE)


@pytest.fixture
def store(tmp_path, monkeypatch, step):
    """A store that knows the training step of one architecture, under two names."""
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    with Store.open(Home.open().database_url) as opened:
        for name in (MODEL, "twin"):
            opened.traces.put(TraceKey(name, SIZE), step)
        yield opened


def ask(model=MODEL, **fields):
    fields = {"batch_size": 2, "input_size": SIZE, "precision": "fp32", "optimizer": "sgd"} | fields
    return trappm.predict(model, device=DEVICE, labels=True, **fields)


def record(store, name, batch_size, outcome="ok", *, settings=(), **fields):
    what = configuration(batch_size, name, **dict(settings))
    store.measurements.record_many([measurement(what, outcome, **fields)])


def test_predictions_include_the_label_of_the_same_step(store):
    record(store, MODEL, 2, step_ms=7.0)
    (label,) = store.labels.find()
    record(store, MODEL, 4, step_ms=9.0)
    record(store, MODEL, 2, step_ms=8.0, device="a100")
    record(store, MODEL, 2, step_ms=5.0, settings={"precision": "amp-fp16"})
    record(store, MODEL, 2, step_ms=4.0, settings={"execution": "compile"})
    answer = ask()
    measured = answer.measured
    found = (measured.label_id, measured.step_time_ms, measured.source)
    assert found == (label.id, 7.0, "measured")
    assert answer.step_time_ms != 7.0
    assert ask(batch_size=4).measured.step_time_ms == 9.0
    assert ask(precision="amp-fp16").measured.step_time_ms == 5.0
    assert ask(execution="compile").measured.step_time_ms == 4.0
    without = ask(batch_size=3)
    assert without.measured is None
    assert "No label of this step on cpu-2t." in without.remarks


def test_labels_of_an_equal_graph_are_second_choice(store):
    record(store, "twin", 2, step_ms=6.0)
    other = ask()
    assert (other.measured.architecture, other.measured.label_count) == ("twin", 1)
    assert any("label is of twin" in remark for remark in other.remarks)
    record(store, MODEL, 2, step_ms=7.0)
    assert (ask().measured.step_time_ms, ask().measured.label_count) == (7.0, 2)


def test_an_equal_graph_with_another_training_step_does_not_match(store, step):
    """Dropout and frozen parameters are not in a graph, which is of evaluation mode."""
    frozen = zoo.create_model(MODEL, SIZE)
    frozen.conv1.requires_grad_(False)
    of_frozen = trace(frozen, SIZE)
    assert of_frozen.graph.content_hash == step.graph.content_hash
    store.traces.put(TraceKey("frozen", SIZE), of_frozen)
    record(store, "frozen", 2, step_ms=6.0)
    assert ask().measured is None


def test_measured_labels_precede_imported_ones_and_simulated_are_ignored(store):
    record(store, MODEL, 2, provenance="simulated", step_ms=1.0)
    assert ask().measured is None
    record(store, MODEL, 2, provenance="imported", step_ms=2.0, protocol="published")
    assert (ask().measured.source, ask().measured.step_time_ms) == ("imported", 2.0)
    record(store, MODEL, 2, step_ms=3.0, protocol="paper")
    assert (ask().measured.source, ask().measured.step_time_ms) == ("measured", 3.0)


def test_out_of_memory_labels_are_bounds(store):
    record(store, MODEL, 2, "oom", memory_detail_mib={"capacity": 40_000.0})
    measured = ask().measured
    assert (measured.memory_mib, measured.memory_above_mib) == (None, 40_000.0)
    assert "out of memory above" in str(measured)


@pytest.mark.extension("onnx")
def test_files_and_modules_match_by_their_graph(store, tmp_path):
    record(store, "twin", 2, step_ms=6.0)
    (label,) = store.labels.find()
    export_onnx(MODEL, SIZE, tmp_path / "open.onnx")
    export_onnx(MODEL, SIZE, tmp_path / "fixed.onnx", batch_size=2)
    images = torch.empty(2, 3, SIZE, SIZE)
    for answer in (
        ask(tmp_path / "open.onnx", input_size=None),
        ask(tmp_path / "fixed.onnx", input_size=None),
        ask(zoo.create_model(MODEL, SIZE), input_size=None, example_input=images),
    ):
        assert answer.measured.label_id == label.id
        assert any("dropout" in remark for remark in answer.remarks)


def test_without_a_store_the_prediction_has_a_remark(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "nowhere"))
    answer = ask()
    assert answer.measured is None
    assert any("there is no label store yet" in remark for remark in answer.remarks)
    written = {path.name for path in (tmp_path / "nowhere").iterdir()}
    assert written == {"answers", "names", "traces"}
