"""The pool of profiler actors without a campaign: who joins, who leaves, and what is returned.

Ray is a fake one in this process (`fake_ray`), and time passes when a test says so.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest
from fake_ray import PENDING, FakeRay
from fakes import OTHER_CODE, FakeProfiler
from ray.exceptions import OutOfMemoryError
from ray.exceptions import RayTaskError as TaskError

from trappm.cluster.campaign import profiler_pool as module
from trappm.cluster.campaign.profiler_pool import (
    HUNG_S,
    RECRUIT_S,
    REFUSED_S,
    RELEASE_S,
    STARTS,
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
    return {"NodeID": "ab" * 28, "Alive": True, "Labels": labels, "Resources": {"GPU": gpus}}


@pytest.fixture
def clock(monkeypatch):
    """The pool's clock, which stands still; its `pass_s` lets time pass."""
    now = [time.monotonic()]

    def pass_s(seconds):
        now[0] += seconds

    fake = SimpleNamespace(monotonic=lambda: now[0], sleep=pass_s, pass_s=pass_s)
    monkeypatch.setattr(module, "time", fake)
    return fake


def described(actor):
    """What the profiler that was started as this number says of itself."""
    return {
        "host": "ab" * 28, "gpus": [str(actor - 1)], "code": this_code(), "fingerprint": "stack",
        "process": (1, 0.0),
    }  # fmt: skip


@pytest.fixture
def pool(monkeypatch, clock):
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
        (OutOfMemoryError("a worker was killed"), "a worker was killed"),
        (TaskError("describe", "ImportError: no such library", ImportError()), "no such library"),
    ],
)
def test_a_profiler_that_cannot_join_costs_the_others_nothing(pool, error, why):
    made, ray, news = pool(lambda call: error if call.actor == 1 else None)
    made.wait(0)
    assert [worker.name for worker in made.refresh_workers()] == ["a100-abababab-1"]
    assert ray.killed == [1]
    (line,) = news
    assert "a profiler ended before it could measure (" in line
    assert why in line


def turn(made, clock, **wanted):
    """The number of workers after a turn of a campaign, in which new nodes are looked for."""
    made.want({A100: wanted.get("wanted", 2)}, {A100: wanted.get("at_most", 8)},
              wanted.get("set_aside", ()))  # fmt: skip
    clock.pass_s(RECRUIT_S)
    made.refresh_workers()
    made.wait(0)
    return len(made.refresh_workers())


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"refusal": "its driver is out of order"}, ["its driver is out of order"]),
        ({"code": OTHER_CODE}, ["has TraPPM 0.2.9 (code 01234567), the campaign has TraPPM ",
                                "as runtime_env"]),
    ],
)  # fmt: skip
def test_a_node_that_cannot_measure_is_reported_once_and_others_go_on(pool, clock, facts, words):
    """Both of its GPUs refuse; those of another node join."""

    def result(call):
        if call.method == "describe" and call.actor <= 2:
            return described(call.actor) | {"host": "b" * 8} | facts
        return None

    made, ray, news = pool(result)
    made.wait(0)
    assert ray.killed == [1, 2]
    assert turn(made, clock) == 2
    (line,) = news
    assert line.startswith("a100: a node cannot measure; it is tried again in 11 minutes: ")
    assert all(word in line for word in words)


def test_a_profiler_that_cannot_start_joins_once_it_can(pool, clock):
    error = TaskError("describe", "No module named 'timm'", ImportError("No module named 'timm'"))
    made, ray, news = pool(
        lambda call: error if call.method == "describe" and call.actor in {1, 2, 4} else None,
        wanted=1,
    )
    made.wait(0)
    assert turn(made, clock, wanted=1) == 0  # the pause is longer
    assert made.list_awaited() == [A100, A100]
    clock.pass_s(RECRUIT_S)
    assert turn(made, clock, wanted=1) == 0
    assert [line.partition("; ")[2] for line in news] == [
        "the next one is started in 2 s", "the next one is started in 4 s",
    ]  # fmt: skip
    assert all("No module named 'timm'" in line for line in news)
    clock.pass_s(4 * RECRUIT_S)
    assert turn(made, clock, wanted=1) == 1
    assert ray.killed == [1, 2]
    assert turn(made, clock, wanted=2) == 1
    assert news[-1].endswith("the next one is started in 2 s")  # failures in a row count


def test_a_profiler_that_cannot_start_ends_a_campaign_on_a_single_machine(pool, clock):
    error = TaskError("describe", "No module named 'timm'", ImportError("No module named 'timm'"))
    made, ray, _ = pool(lambda call: error, may_grow=False, wanted=1)
    made.wait(0)
    for _ in range(STARTS - 2):
        clock.pass_s(REFUSED_S)
        assert turn(made, clock, wanted=1) == 0
    clock.pass_s(REFUSED_S)
    with pytest.raises(DeviceError, match="of a100 cannot be started: No module named 'timm'"):
        turn(made, clock, wanted=1)
    assert len(ray.killed) == STARTS


def test_as_many_profilers_wait_for_gpus_as_have_work(pool, clock):
    """An autoscaler starts nodes for those that wait."""
    made, ray, _ = pool(lambda call: PENDING, wanted=5)
    for wanted in (5, 3, 1, 4):
        assert turn(made, clock, wanted=wanted) == 0
        assert len({call.actor for call in ray.calls}) - len(ray.killed) == wanted


def test_gpus_without_work_are_released_after_a_while(pool, clock):
    made, ray, _ = pool(lambda call: None)
    made.wait(0)
    for _ in range(2):
        clock.pass_s(RELEASE_S)
        assert turn(made, clock, wanted=1) == 2  # work waits, so that both are needed soon
    assert turn(made, clock, wanted=0) == 2
    clock.pass_s(RELEASE_S)
    assert turn(made, clock, wanted=0) == 0
    assert ray.killed == [1, 2]


def test_a_gpu_that_is_for_another_campaign_is_given_back(pool, clock):
    made, ray, _ = pool(lambda call: None)
    made.wait(0)
    busy, _ = made.refresh_workers()
    made.start(busy, CanaryCheck(STEP), QUICK)
    assert turn(made, clock, at_most=1) == 1
    assert ray.killed == [2]
    assert made.refresh_workers() == [busy]


def test_a_worker_that_was_set_aside_keeps_its_gpu_without_work(pool, clock):
    made, ray, _ = pool(lambda call: None)
    made.wait(0)
    bad, _ = made.refresh_workers()
    clock.pass_s(RELEASE_S)
    assert turn(made, clock, wanted=0, at_most=9, set_aside=[bad.name]) == 1
    assert made.refresh_workers() == [bad]
    assert ray.killed == [2]
    assert turn(made, clock, wanted=0) == 0  # its time is up


def test_a_profiler_that_does_not_answer_is_dismissed_with_its_step(pool, clock):
    made, ray, news = pool(lambda call: None)
    made.wait(0)
    hung, _ = made.refresh_workers()
    made.start(hung, task := CanaryCheck(STEP), QUICK)
    clock.pass_s(QUICK.timeout_s + HUNG_S)
    assert made.wait(0) == []
    clock.pass_s(1.0)
    (end,) = made.wait(0)
    assert (end.task, end.measurement, end.is_lost) == (task, None, False)
    assert "has not answered within its time limit" in end.why
    assert (ray.killed, made.list_running()) == ([1], [])
    assert hung not in made.refresh_workers()
    assert news == [f"a100  {hung.name} was dismissed: it does not answer"]


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
    assert pause_after(5_000) == REFUSED_S  # as it is after some days
