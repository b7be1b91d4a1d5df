"""The pool of profiler actors without a campaign: who joins, who leaves, and what is returned.

Fast tests have a fake Ray in their process (`fake_ray`). Slow ones have a real cluster in a program
of its own (`pool_scenarios`), since Ray reads its environment at its import.
"""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import pytest
from fake_ray import PENDING, FakeRay
from fakes import FakeProfiler
from ray.exceptions import ActorUnschedulableError, OutOfMemoryError, RuntimeEnvSetupError
from ray.exceptions import RayTaskError as TaskError

from trappm.cluster.campaign import profiler_pool as module
from trappm.cluster.campaign.profiler_pool import (
    RECRUIT_S,
    REFUSED_S,
    ProfilerActor,
    ProfilerPool,
    pause_after,
)
from trappm.cluster.campaign.workers import CanaryCheck
from trappm.profiler.errors import DeviceError
from trappm.profiler.host.environment import this_code
from trappm.profiler.records import QUICK, Configuration

A100 = "a100"
STEP = Configuration(architecture="resnet18", batch_size=1, input_size=64)
MEASURED = FakeProfiler(A100, "host").measure(STEP, QUICK, "key")


def node(gpus):
    labels = {"ray.io/accelerator-type": "A100"}
    return {"NodeID": "n" * 8, "Alive": True, "Labels": labels, "Resources": {"GPU": gpus}}


def described(actor):
    """What the profiler that was started as this number says of itself."""
    return {
        "host": "n" * 8, "gpus": [str(actor - 1)], "code": this_code(), "fingerprint": "stack",
        "process": (1, 0.0),
    }  # fmt: skip


@pytest.fixture
def pool(monkeypatch):
    """Make a pool of A100s on a node of eight; calls of its actors end as `result` says."""

    def make(result, *, may_grow=True, wanted=2):
        def result_of(call):
            given = result(call)
            if given is None:
                given = described(call.actor) if call.method == "describe" else PENDING
            return given

        ray = FakeRay(result_of, [node(gpus=8)])
        monkeypatch.setattr(module, "ray", ray)
        made = ProfilerPool([A100], may_grow=may_grow, tell=(news := []).append)
        made.want({A100: wanted}, {A100: 8})
        made.refresh_workers()
        return made, ray, news

    return make


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeEnvSetupError("no space on its disk"), "no space on its disk"),
        (OutOfMemoryError("a worker was killed"), "a worker was killed"),
        (ActorUnschedulableError("no such node"), "no such node"),
        (TaskError("describe", "ImportError: no such library", ImportError()), "no such library"),
    ],
)
def test_a_profiler_that_cannot_join_costs_the_others_nothing(pool, error, why):
    made, ray, news = pool(lambda call: error if call.actor == 1 else None)
    made.wait(0)
    assert [worker.name for worker in made.refresh_workers()] == ["a100-nnnnnnnn-1"]
    assert ray.killed == [1]
    (line,) = news
    assert "a profiler ended before it could measure (" in line
    assert why in line


def test_a_worker_that_was_set_aside_keeps_its_gpu_without_work(pool, monkeypatch):
    made, ray, _ = pool(lambda call: None)
    made.wait(0)
    bad, _ = made.refresh_workers()
    monkeypatch.setattr(module, "RELEASE_S", 0.0)
    monkeypatch.setattr(module, "RECRUIT_S", 0.0)
    made.want({A100: 0}, {A100: 9}, [bad.name])
    assert made.refresh_workers() == [bad]
    assert ray.killed == [2]
    made.want({A100: 0}, {A100: 8})  # its time is up
    assert made.refresh_workers() == []


def test_what_was_measured_is_returned_although_a_node_has_failed(pool):
    """On a single machine a device that cannot measure ends the campaign."""
    broken = described(2) | {"refusal": "its driver is out of order"}
    second = [PENDING, broken]

    def result(call):
        if call.method == "measure":
            return MEASURED
        return second[0] if (call.actor, call.method) == (2, "describe") else None

    made, _, _ = pool(result, may_grow=False)
    made.wait(0)
    (worker,) = made.refresh_workers()
    made.start(worker, task := CanaryCheck(STEP), QUICK)
    del second[0]
    with pytest.raises(DeviceError, match="out of order"):
        made.wait(0)
    assert [(x.task, x.measurement) for x in made.collect()] == [(task, MEASURED)]
    assert made.collect() == []


def test_a_node_without_a_library_refuses_to_measure(monkeypatch):
    """Its profiler describes itself all the same."""
    context = SimpleNamespace(get_node_id=lambda: "node")
    ray = SimpleNamespace(get_runtime_context=lambda: context, get_gpu_ids=lambda: [3])
    monkeypatch.setattr(module, "ray", ray)
    monkeypatch.setitem(sys.modules, "trappm.profiler.devices", None)
    facts = ProfilerActor.__new__(ProfilerActor).describe()
    assert facts["gpus"] == ["3"]
    assert "trappm.profiler.devices" in facts["refusal"]


def test_the_pause_between_failed_starts_grows_to_a_limit():
    assert [pause_after(n) for n in (1, 2, 3)] == [2 * RECRUIT_S, 4 * RECRUIT_S, 8 * RECRUIT_S]
    assert pause_after(7) == pause_after(5_000) == REFUSED_S  # as it is after some days


@pytest.fixture
def play(play):
    return partial(play, "pool_scenarios.py")


@pytest.mark.slow
def test_dismissing_a_worker_of_a_lost_node_leaves_no_demand_behind(play):
    assert play("dismissed_after_its_node") == {"demands": []}


@pytest.mark.slow
def test_a_gpu_without_work_is_released_after_a_while(play):
    assert play("given_back") == {
        "while_work_waits": 2,
        "free_then": 0,
        "free_at_last": 2,
    }


@pytest.mark.slow
def test_a_gpu_that_is_for_another_campaign_is_given_back(play):
    assert play("surplus") == {"free": 1}


@pytest.mark.slow
def test_as_many_more_gpus_are_asked_for_as_have_work(play):
    assert play("asked_by_need") == {"asked": [4, 2, 0]}


@pytest.mark.slow
def test_a_profiler_that_cannot_start_is_reported_and_joins_once_it_can(play):
    result = play("repaired")
    first, second, *_ = result["messages"]
    assert "No module named 'timm'" in first
    assert "the next one is started in 2 s" in first
    assert "the next one is started in 4 s" in second
    assert result["awaited"] == ["simulated:a100"]
    assert result["joined"] == 1


@pytest.mark.slow
def test_a_profiler_that_cannot_start_ends_a_campaign_on_a_single_machine(play):
    result = play("broken_here")
    assert result["error"].startswith("the profiler of simulated:a100 cannot be started: ")
    assert "No module named 'timm'" in result["error"]
