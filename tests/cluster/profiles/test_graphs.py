"""A static profile, and what goes wrong in one."""

import itertools
import signal

import pytest

from trappm.cluster import profiles
from trappm.cluster.profiles import profile_graph
from trappm.profiler.records import GraphTemplate
from trappm.profiler.simulation.step_profile import StepProfile
from trappm.profiler.tracing.tracer import Tracer


def test_a_pair_has_a_profile_or_a_reason():
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
def test_a_fault_of_the_step_leaves_the_graph_and_one_of_the_graph_is_told(
    monkeypatch, fault, message
):
    monkeypatch.setattr(profiles, "CPU_LIMIT_S", 2.0)
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
