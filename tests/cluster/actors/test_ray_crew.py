"""The crew of Ray actors, without Ray: what the emulated cluster cannot bring about at will."""

from __future__ import annotations

from unittest import mock

import pytest
from ray.exceptions import ActorDiedError

from trappm.cluster.actors.profiler_pool import RayCrew, _Profiler
from trappm.cluster.scheduler.messages import Worker
from trappm.cluster.workers.interfaces import Finished
from trappm.profiler.errors import DeviceError


def test_what_is_given_to_a_worker_that_has_just_gone_comes_back_as_lost():
    """Between two looks at the workers the machine may still think that it is there."""
    with mock.patch("trappm.cluster.actors.profiler_pool.ray") as ray:
        ray.nodes.return_value = []
        ray.wait.return_value = [], []
        crew = RayCrew(["a100"], may_grow=True)
        gone, task = Worker("a100-host-0", "a100", "host", "stack"), mock.Mock()
        crew.start(gone, task, mock.Mock())
        assert crew.wait(timeout_s=0) == [
            Finished(gone, task, None, "the profiler was gone already")
        ]
        assert not crew.wait(timeout_s=0)


def test_a_gpu_is_given_back_once_nothing_has_been_left_for_it_for_a_while():
    with (
        mock.patch("trappm.cluster.actors.profiler_pool.ray") as ray,
        mock.patch("trappm.cluster.actors.profiler_pool.time") as clock,
    ):
        ray.nodes.return_value = []
        clock.monotonic.return_value = 0.0
        crew = RayCrew(["a100"], may_grow=True)
        idle = Worker("a100-host-0", "a100", "host", "stack")
        crew._profilers[idle.name] = _Profiler(mock.Mock(), "a100", "host", worker=idle)
        there = {}
        for now, to_come in ((5.0, 3), (10.0, 0), (14.0, 0), (16.0, 0)):
            clock.monotonic.return_value = now
            crew.want({"a100": to_come})
            there[now] = list(crew.workers())
        assert there == {5.0: [idle], 10.0: [idle], 14.0: [idle], 16.0: []}


class StartsThatFail:
    """Ray, of which every profiler's constructor fails; and the clock."""

    def __init__(self, ray, clock):
        self.ray, self.clock, self.now = ray, clock, 0.0
        ray.nodes.return_value = [
            {"Alive": True, "NodeID": "n", "Labels": {"ray.io/accelerator-type": "A100"},
             "Resources": {"GPU": 4}}
        ]  # fmt: skip
        clock.monotonic.side_effect = lambda: self.now
        self.actor = ray.remote.return_value.options.return_value.remote
        self.actor.side_effect = lambda device: mock.Mock()
        ray.wait.side_effect = lambda references, **_: (references, [])
        error = ActorDiedError()
        error.error_msg = (
            "The actor died because of an error raised in its creation task\n"
            "ModuleNotFoundError: No module named 'timm'"
        )
        ray.get.side_effect = error

    def pass_by(self, crew, seconds):
        """How many profilers are started in this time, and what is told."""
        before = self.actor.call_count
        for _ in range(seconds):
            self.now += 1.0
            crew.workers()
            crew.wait(timeout_s=0)
        return self.actor.call_count - before


@pytest.fixture
def failing():
    with (
        mock.patch("trappm.cluster.actors.profiler_pool.ray") as ray,
        mock.patch("trappm.cluster.actors.profiler_pool.time") as clock,
    ):
        yield StartsThatFail(ray, clock)


def test_a_profiler_that_cannot_be_started_is_tried_more_and_more_seldom_and_told(failing):
    told = []
    crew = RayCrew(["a100"], may_grow=True, tell=told.append)
    crew.want({"a100": 100})
    assert failing.pass_by(crew, 60) <= 6 * 4  # on four GPUs
    assert failing.pass_by(crew, 600) <= 11 * 4
    assert 5 < len(told) < 20
    assert "No module named 'timm'" in told[0]
    assert "the next one is started in 2 s" in told[0]
    assert "in 60 s" in told[-1]
    assert "a100" in crew.awaited()  # once it is mended, it goes on
    crew._failed_starts["a100"] = 5_000  # as it is after some days
    failing.pass_by(crew, 61)
    assert "in 60 s" in told[-1]

    worker = {"host": "n", "gpus": ["0"], "fingerprint": "stack", "process": (1, 1.0)}
    failing.ray.get.side_effect = lambda reference: worker
    failing.pass_by(crew, 61)
    assert crew.workers()


def test_on_this_machine_alone_a_profiler_that_cannot_be_started_ends_the_campaign(failing):
    crew = RayCrew(["a100"], may_grow=False)
    crew.want({"a100": 100})
    with pytest.raises(DeviceError, match=r"profiler of a100 cannot be started: .*'timm'"):
        failing.pass_by(crew, 60)
    assert failing.actor.call_count <= 3 * 4
