"""Steps are traced once, refusals are remembered, and damage is traced again."""

import pytest

from trappm.cluster.profiles import StepCache, StepKey, trace_steps
from trappm.profiler.records import MemoryFormat, Precision
from trappm.profiler.simulation.step_profile import StepProfile


def key(architecture="test_resnet", **changes):
    fields = {
        "input_size": 64,
        "precision": Precision.AMP_FP16,
        "memory_format": MemoryFormat.CONTIGUOUS,
        "fused_attention": True,
    }
    return StepKey(architecture, **{**fields, **changes})


def test_what_was_traced_or_refused_is_not_made_again(tmp_path):
    cache, keys = StepCache(tmp_path / "steps"), [key(), key("no_such_model")]
    assert cache.missing(keys) == keys
    made = {traced.key: traced.refusal for traced in trace_steps(keys)}
    for traced in trace_steps(keys):
        cache.put(traced)
    assert made[keys[0]] == ""
    assert "no_such_model" in made[keys[1]]
    assert cache.missing([*keys, key(fused_attention=False)]) == [key(fused_attention=False)]
    profile = cache.get(keys[0])
    assert isinstance(profile, StepProfile)
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
def test_a_name_tells_everything_that_a_profile_depends_on(changes):
    assert key(**changes).file_name != key().file_name
