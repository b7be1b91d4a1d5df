"""Answers about compiled steps: their own step time, and no eager figure as if it were theirs."""

from __future__ import annotations

import math

import pytest
from snapshot_samples import shipped_heads, snapshot_of
from store_samples import configuration, measurement

import trappm
from trappm.learner.interface import Workload
from trappm.learner.physics.compiled_step import PARTS, log_ratio
from trappm.learner.snapshots.manifest import CompiledRatio
from trappm.prediction.prediction import Prediction
from trappm.profiler.records import Execution, Graph, Phase, StepSettings
from trappm.store import Home, Store


def ask(**options: object) -> Prediction:
    given = {"device": "a100", "batch_size": 64, "phase": "infer", "precision": "fp32", **options}
    return trappm.predict("test_resnet", **given)  # type: ignore[arg-type]


def test_compiled_inference_has_a_step_time_of_its_own():
    eager, compiled = ask(), ask(execution="compile")
    assert ", eager. " in f"{eager} "
    assert ", compiled. " in f"{compiled} "
    assert eager.step_time_ms is not None
    assert compiled.step_time_ms is not None
    assert compiled.step_time_ms != eager.step_time_ms
    low, high = compiled.intervals["step_time_ms"]
    assert low < compiled.step_time_ms < high
    assert high / low > eager.intervals["step_time_ms"][1] / eager.intervals["step_time_ms"][0]
    assert compiled.samples_per_s == pytest.approx(64_000 / compiled.step_time_ms)
    assert compiled.memory_mib == eager.memory_mib
    assert compiled.intervals["memory_mib"][1] == eager.intervals["memory_mib"][1]
    assert compiled.verdict == "fits"
    assert compiled.largest_batch == eager.largest_batch
    larger = ask(execution="compile", batch_size=2 * compiled.largest_batch)
    assert larger.out_of_memory > 0.5


def test_compiled_training_has_a_time_and_memory_with_wider_intervals():
    eager, answer = ask(phase="train"), ask(phase="train", execution="compile")
    assert answer.power_w is None
    for name in ("step_time_ms", "memory_mib"):
        value, (low, high) = getattr(answer, name), answer.intervals[name]
        assert low < value < high
        assert value <= getattr(eager, name)
        assert high / low > eager.intervals[name][1] / eager.intervals[name][0]
    inference = ask(execution="compile").intervals["step_time_ms"]
    low, high = answer.intervals["step_time_ms"]
    assert high / low > inference[1] / inference[0]  # no compiled training step was fitted
    assert any("no compiled training step" in remark for remark in answer.remarks)


@pytest.fixture
def of_pairs(tmp_path):
    """A snapshot with the ratio of compiled training steps on two threads, from four pairs."""
    ratio = CompiledRatio(log_ratio=math.log(0.5), log_error=0.4, pairs=4)
    compiled = {"cpu-2t": {"train": ratio.model_dump()}}
    return snapshot_of(tmp_path, {"cpu-2t": shipped_heads("cpu-1t")}, compiled=compiled)


def test_measured_pairs_of_a_device_give_the_ratio(of_pairs):
    options = {"device": "cpu-2t", "phase": "train", "snapshot": of_pairs}
    eager, compiled = ask(**options), ask(execution="compile", **options)
    assert compiled.step_time_ms == pytest.approx(0.5 * eager.step_time_ms)
    low, high = compiled.intervals["step_time_ms"]
    assert high / low > eager.intervals["step_time_ms"][1] / eager.intervals["step_time_ms"][0]
    assert compiled.memory_mib is None
    assert "from 4 pairs on cpu-2t" in compiled.remarks[-1]


def test_a_median_is_not_the_ratio_of_inference_on_a_gpu(tmp_path):
    median = CompiledRatio(log_ratio=-5.0, log_error=0.1, pairs=4)
    compiled = {"rtx3090": {"infer": median.model_dump()}}
    snapshot = snapshot_of(tmp_path, {"rtx3090": shipped_heads("rtx3090")}, compiled=compiled)
    options = {"device": "rtx3090", "precision": "amp-fp16", "snapshot": snapshot}
    compiled, eager = (ask(execution=how, **options) for how in ("compile", "eager"))
    assert compiled.step_time_ms > 0.1 * eager.step_time_ms


def test_constants_of_pairs_give_the_ratio_of_kernels(tmp_path):
    constant = -0.5
    families = {"resnet": 2 * constant}
    constants = (constant,) * len(PARTS)
    ratio = CompiledRatio(
        log_ratio=0.0, log_error=0.1, pairs=4, constants=constants, families=families
    )
    compiled = {"cpu-2t": {"train": ratio.model_dump()}}
    snapshot = snapshot_of(tmp_path, {"cpu-2t": shipped_heads("cpu-1t")}, compiled=compiled)
    options = {"device": "cpu-2t", "phase": "train", "snapshot": snapshot}
    eager, answer = (ask(execution=how, **options) for how in Execution)
    traces = [eager.subject.trace(StepSettings(execution=how), Phase.TRAIN) for how in Execution]
    pair = (
        Workload(graph=Graph.empty(64), phase=Phase.TRAIN, trace=made, kernels=made.kernels)
        for made in traces
    )
    log = log_ratio(*pair, "resnet", ratio.constants, ratio.families)
    expected = eager.step_time_ms * math.exp(log)
    assert answer.step_time_ms == pytest.approx(expected)
    assert "from 4 pairs on cpu-2t" in answer.remarks[-1]


def test_a_comparison_shows_eager_and_compiled_steps_and_when_compiling_pays(
    of_pairs, tmp_path, monkeypatch, as_json
):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    step = configuration(4, "test_resnet", execution="compile")
    label = measurement(step, environment={"compile_s": 30.0})
    with Store.open(Home.open().database_url) as store:
        store.measurements.record_many([label])
    words = "compare test_resnet --device cpu-2t --batch-size 4 --input-size 64 --compile"
    both = as_json(words, "--snapshot", of_pairs)
    times = {p["execution"]: p["step_time_ms"] for p in both["predictions"]}
    (payoff,) = both["compiling"]
    assert payoff["steps"] == math.ceil(30_000 / (times["eager"] - times["compile"]))
