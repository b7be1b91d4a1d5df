"""Static profiles made in processes: all come, each once; a crash costs one architecture only."""

import itertools
import json
import os
import signal

import pytest

from trappm.cluster.profiles import static_profiles, worker_processes
from trappm.cluster.profiles.static_profiles import (
    ProfiledGraph,
    profile_graph,
    profile_in_processes,
)
from trappm.profiler.records import GraphTemplate
from trappm.profiler.simulation.step_profile import StepProfile
from trappm.profiler.tracing.tracer import Tracer

PAIRS = [("test_resnet", 64), ("test_vit", 64), ("test_vit", 67), ("test_efficientnet", 64)]


def crash_on_vit(architecture: str, input_size: int, step_refusal=None) -> ProfiledGraph:
    """Stands in for models that end their process, as native code can; runs in the worker.

    At 64 pixels it is the graph that does, else only the step.
    """
    if architecture == "test_vit" and (input_size == 64 or step_refusal is None):
        os.kill(os.getpid(), signal.SIGKILL)
    return ProfiledGraph(architecture, input_size, b"graph", None, None, step_refusal)


def return_environment(architecture: str, input_size: int, step_refusal=None) -> ProfiledGraph:
    return ProfiledGraph(architecture, input_size, None, json.dumps(dict(os.environ)))


def test_profiled_models_see_no_secrets_in_their_environment(monkeypatch):
    monkeypatch.setattr(static_profiles, "profile_graph", return_environment)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "hidden")
    monkeypatch.setenv("PGPASSWORD", "hidden")
    (result,) = profile_in_processes(PAIRS[:1], 1)
    seen = json.loads(result.refusal)
    assert "hidden" not in seen.values()
    assert seen["PATH"] == os.environ["PATH"]


def test_every_pair_comes_once_with_a_profile_or_a_reason():
    results = list(profile_in_processes(PAIRS, 2))
    assert sorted((r.architecture, r.input_size) for r in results) == sorted(PAIRS)
    for result in results:
        assert (result.template is None) != (result.refusal is None)
        if result.template is not None:
            assert (result.step is None) != (result.step_refusal is None)
    made = next(r for r in results if r.architecture == "test_resnet")
    here = profile_graph("test_resnet", 64)
    assert made.step == here.step
    assert (
        GraphTemplate.from_bytes(made.template).content_hash
        == GraphTemplate.from_bytes(here.template).content_hash
    )
    assert StepProfile.from_bytes(made.step).trainable_parameters > 0


def test_a_model_that_ends_its_process_is_refused_and_the_others_come(monkeypatch):
    monkeypatch.setattr(static_profiles, "profile_graph", crash_on_vit)
    results = {(r.architecture, r.input_size): r for r in profile_in_processes(PAIRS[:3], 1)}
    assert set(results) == set(PAIRS[:3])
    whole, none, graph_only = (results[pair] for pair in PAIRS[:3])
    assert whole == ProfiledGraph("test_resnet", 64, b"graph", None)
    assert none == ProfiledGraph("test_vit", 64, None, static_profiles.ENDED_ITS_PROCESS)
    assert graph_only == ProfiledGraph(
        "test_vit", 67, b"graph", None, None, static_profiles.ENDED_ITS_PROCESS
    )


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
    monkeypatch.setattr(worker_processes, "CPU_LIMIT_S", 2.0)
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
