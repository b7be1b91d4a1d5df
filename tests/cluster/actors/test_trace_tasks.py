"""Traces as Ray tasks, which end as a test says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray
from fake_ray import FakeRay
from fakes import OTHER_CODE
from ray.exceptions import RayTaskError

from trappm.cluster import ray_runtime, trace_tasks
from trappm.cluster.trace_tasks import MAX_WORKER_LOSSES, TraceTasks
from trappm.profiler.errors import CampaignError
from trappm.profiler.host.environment import this_code
from trappm.profiler.traced_step import Refusal, TraceKey, entry_to_bytes

KEYS = [TraceKey("resnet18", size) for size in (64, 96)]
MADE = entry_to_bytes(Refusal("made up")), True


def missing(node):
    """The error of a task on a node without TraPPM."""
    return RayTaskError(
        "task", "No module named 'trappm'", ImportError("No module named 'trappm'"), ip=node
    )


@pytest.fixture
def cluster(monkeypatch):
    """Make a cluster of nodes; its n-th task ends as `result` says. Returns the refused nodes."""

    def make(result, nodes):
        fake, asked = FakeRay(lambda task: result(task.number)), []
        for name in ("remote", "wait", "get"):
            monkeypatch.setattr(ray, name, getattr(fake, name))
        known = [{"NodeID": n, "NodeManagerAddress": n, "Resources": {"CPU": 2}} for n in nodes]
        monkeypatch.setattr(ray_runtime, "_nodes", lambda: known)
        monkeypatch.setattr(
            trace_tasks, "tracing_options", lambda _, refused: asked.append(set(refused)) or {}
        )
        return asked

    return make


def with_other_code(node):
    """What a task returns on a node with another version of TraPPM."""
    with pytest.MonkeyPatch.context() as patch:
        context = SimpleNamespace(get_node_id=lambda: node)
        patch.setattr(ray, "get_runtime_context", lambda: context)
        return trace_tasks._with_same_code(OTHER_CODE, lambda key: MADE, KEYS[0])


def test_a_task_runs_on_a_node_with_the_same_code_only():
    assert trace_tasks._with_same_code(this_code(), lambda key: MADE, KEYS[0]) == MADE
    refused = with_other_code("one")
    assert refused.id == "one"
    assert "the campaign has TraPPM 0.2.9 (code 01234567)" in refused.why


@pytest.mark.parametrize("fault", [missing, with_other_code])
def test_a_node_where_the_task_fails_traces_nothing_more(cluster, fault):
    asked = cluster(lambda n: fault("one") if n == 1 else MADE, ["one", "two"])
    traced = list(TraceTasks(KEYS))
    assert sorted(step.key for step in traced) == KEYS
    assert {step.made.reason for step in traced} == {"made up"}
    assert asked == [set(), {"one"}]


@pytest.mark.parametrize(
    ("fault", "why"),
    [(missing, "No module named 'trappm'"), (with_other_code, "host .* the campaign has TraPPM")],
)
def test_a_task_that_fails_on_all_nodes_ends_tracing(cluster, fault, why):
    cluster(lambda n: fault("one" if n < 3 else "two"), ["one", "two"])
    with pytest.raises(CampaignError, match=f"no node can trace: {why}"):
        list(TraceTasks(KEYS))


def test_a_step_whose_task_fails_on_many_nodes_is_refused_for_now(cluster):
    nodes = [str(n) for n in range(1, MAX_WORKER_LOSSES + 2)]
    cluster(lambda n: missing(str(n)), nodes)
    (traced,) = TraceTasks(KEYS[:1])
    assert f"tracing it ended {MAX_WORKER_LOSSES} processes" in traced.refusal
    assert not traced.is_final
