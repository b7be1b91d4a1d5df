"""The crew of Ray actors, without Ray: what the emulated cluster cannot bring about at will."""

from __future__ import annotations

from unittest import mock

from trappm.cluster.crew import Finished
from trappm.cluster.events import Worker
from trappm.cluster.ray_crew import RayCrew, _Profiler


def test_what_is_given_to_a_worker_that_has_just_gone_comes_back_as_lost():
    """Between two looks at the workers the machine may still think that it is there."""
    with mock.patch("trappm.cluster.ray_crew.ray") as ray:
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
        mock.patch("trappm.cluster.ray_crew.ray") as ray,
        mock.patch("trappm.cluster.ray_crew.time") as clock,
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
