"""Static profiles, their faults, and the cache of traced steps."""

import itertools
import signal

import pytest

from trappm.cluster import profiles
from trappm.cluster.profiles import StepCache, StepKey, profile_graph, trace_steps
from trappm.profiler.records import GraphTemplate, MemoryFormat, Precision
from trappm.profiler.records.trace import StepProfile
from trappm.profiler.tracing.tracer import Tracer


def test_an_architecture_has_a_profile_or_a_refusal():
    made, refused = profile_graph("test_resnet", 64), profile_graph("test_vit", 67)
    assert GraphTemplate.from_bytes(made.template).content_hash
    assert StepProfile.from_bytes(made.step).trainable_parameters > 0
    assert made.refusal is made.step_refusal is None
    assert refused.template is refused.step is None
    assert refused.refusal


def work_for_ever(*_):
    return any(i < 0 for i in itertools.count())


def fail(*_):
    raise KeyError("aten.new_operator")


@pytest.mark.parametrize(
    ("fault", "message"),
    [(work_for_ever, "s of CPU time"), (fail, "KeyError: 'aten.new_operator'")],
)
def test_a_failing_step_leaves_the_graph_and_a_failing_graph_is_refused(
    monkeypatch, fault, message
):
    monkeypatch.setattr(profiles, "CPU_LIMIT_S", 1.0)
    profile_graph("test_resnet", 64)  # imports count as well
    monkeypatch.setattr(Tracer, "step", fault)
    result = profile_graph("test_resnet", 64)
    assert result.template is not None
    assert result.step is None
    assert message in result.step_refusal
    monkeypatch.setattr(Tracer, "graph", fault)
    result = profile_graph("test_resnet", 64)
    assert result.template is result.step is result.step_refusal is None
    assert message in result.refusal
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def key(architecture="test_resnet", **changes):
    fields = {
        "input_size": 64,
        "precision": Precision.AMP_FP16,
        "memory_format": MemoryFormat.CONTIGUOUS,
        "fused_attention": True,
    }
    return StepKey(architecture, **{**fields, **changes})


def test_traced_and_refused_steps_are_not_made_again(tmp_path):
    cache, keys = StepCache(tmp_path / "steps"), [key(), key("no_such_model")]
    assert cache.missing(keys) == keys
    made = {traced.key: traced.refusal for traced in trace_steps(keys)}
    for traced in trace_steps(keys):
        cache.put(traced)
    assert made[keys[0]] == ""
    assert "no_such_model" in made[keys[1]]
    assert cache.missing([*keys, key(fused_attention=False)]) == [key(fused_attention=False)]
    profile = StepProfile.from_bytes(cache.get(keys[0]))
    assert profile.precision is Precision.AMP_FP16
    assert cache.get(keys[1]) is None

    (path,) = cache.folder.glob("*.npz")
    path.write_bytes(path.read_bytes()[:-20])
    assert cache.get(keys[0]) is None
    assert cache.missing(keys) == keys[:1]


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": "test_vit"},
        {"input_size": 96},
        {"precision": Precision.FP32},
        {"memory_format": MemoryFormat.CHANNELS_LAST},
        {"fused_attention": False},
    ],
)
def test_the_file_name_depends_on_every_setting(changes):
    assert key(**changes).file_name != key().file_name
