"""The crew of Ray actors, without Ray: what the emulated cluster cannot bring about at will."""

from __future__ import annotations

from unittest import mock

from cluster.crew import Finished
from cluster.events import Worker
from cluster.ray_crew import RayCrew


def test_what_is_given_to_a_worker_that_has_just_gone_comes_back_as_lost():
    """Between two looks at the workers the machine may still think that it is there."""
    with mock.patch("cluster.ray_crew.ray") as ray:
        ray.nodes.return_value = []
        ray.wait.return_value = [], []
        crew = RayCrew(["a100"], may_grow=True)
        gone, task = Worker("a100-host-0", "a100", "host", "stack"), mock.Mock()
        crew.start(gone, task, mock.Mock())
        assert crew.wait(timeout_s=0) == [
            Finished(gone, task, None, "the profiler was gone already")
        ]
        assert not crew.wait(timeout_s=0)
