"""Traces of single steps, and their faults."""

import itertools
import signal

import pytest

from trappm.cluster import trace_tasks
from trappm.cluster.trace_tasks import steps_of, trace_of
from trappm.profiler.errors import BatchOrderError, InputError
from trappm.profiler.records import Configuration, Phase, Precision
from trappm.profiler.traced_step import Refusal, TraceFolder, TraceKey, TraceSettings
from trappm.profiler.tracing.tracer import Tracer

KEY = TraceKey("test_resnet", 64)


def test_a_step_is_traced_in_its_own_settings_and_phase():
    key = KEY._replace(settings=TraceSettings(precision=Precision.AMP_FP16), phase=Phase.INFER)
    traced = trace_of(key)
    assert (traced.key, traced.is_final, traced.remark) == (key, True, None)
    assert traced.made.phase is Phase.INFER
    assert traced.made.kernels.precision is Precision.AMP_FP16
    assert traced.made.graph.content_hash == trace_of(KEY).made.graph.content_hash


@pytest.mark.parametrize(("model", "size"), [("test_vit", 67), ("no_such_model", 64)])
def test_a_model_that_cannot_be_traced_is_refused_for_good(model, size):
    traced = trace_of(TraceKey(model, size))
    assert isinstance(traced.made, Refusal)
    assert traced.is_final
    assert traced.remark.startswith(f"no graph of {model} at {size} px: ")


def work_for_ever(*_):
    return any(i < 0 for i in itertools.count())


def raising(error):
    def fail(*_):
        raise error

    return fail


@pytest.mark.parametrize(
    ("fault", "message", "is_final"),
    [
        (work_for_ever, "s of CPU time", True),
        (raising(BatchOrderError("it loops over its samples")), "loops over its samples", True),
        (raising(KeyError("aten.new_operator")), "'aten.new_operator'", False),
        (raising(OSError(28, "No space left on device")), "No space left on device", False),
        (raising(InputError("takes images of 224 px only")), "224 px only", True),
    ],
)
def test_a_refusal_is_final_if_the_model_is_the_reason(
    monkeypatch, tmp_path, fault, message, is_final
):
    trace_of(KEY)  # imports count as well
    monkeypatch.setattr(trace_tasks, "CPU_LIMIT_S", 1.0)
    monkeypatch.setattr(Tracer, "trace", fault)
    traced, cache = trace_of(KEY), TraceFolder(tmp_path)
    assert message in traced.refusal
    assert traced.is_final is is_final
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    traced.keep(cache)
    assert (cache.missing([KEY]) == []) is is_final


def test_configurations_share_steps():
    settings = {"architecture": "test_resnet", "input_size": 64}
    pool = [
        Configuration(**settings, batch_size=batch, precision=precision, optimizer=optimizer)
        for batch in (1, 4)
        for precision in (Precision.FP32, Precision.AMP_FP16)
        for optimizer in ("sgd", "adamw")
    ]
    half = KEY._replace(settings=TraceSettings(precision=Precision.AMP_FP16))
    assert steps_of(pool) == [half, KEY]
