"""The campaign's handle to its learner, whose calls end as a test says."""

from __future__ import annotations

import pytest
from fake_ray import PENDING, FakeRay
from ray.exceptions import OutOfMemoryError, RayActorError, RuntimeEnvSetupError

from trappm.cluster.actors import learner as module
from trappm.cluster.actors.learner import LearnerHandle
from trappm.profiler.errors import CampaignError


@pytest.fixture
def handle(monkeypatch):
    """Make a handle to a learner whose calls end as `result` says; return it and its news."""

    def make(result):
        news = []
        monkeypatch.setattr(module, "ray", FakeRay(result))
        monkeypatch.setattr(module, "learner_options", lambda *_: {"memory": 1 << 30})
        return LearnerHandle(tell=news.append, labels=10), news

    return make


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OutOfMemoryError("a worker was killed\nmore of it"), "a worker was killed"),
        (RuntimeEnvSetupError("no space"), "no space"),
        (RayActorError(), "The actor experienced an error before finishing this task."),
    ],
)
def test_a_learner_that_ray_ends_is_started_again(handle, error, why):
    made, news = handle(lambda call: error if call.actor == 1 else call.method)
    made.begin("choose")
    assert not made.wait(0)
    assert made.wait(0)
    assert made.result == "choose"
    assert news == [f"the learner crashed in choose ({why}); it is restarted"]


def test_a_learner_that_ray_always_ends_fails(handle):
    made, _ = handle(lambda call: OutOfMemoryError("too little"))
    made.begin("choose")
    assert not made.wait(0)
    assert not made.wait(0)
    with pytest.raises(CampaignError, match="crashed 3 times, the last time in choose"):
        made.wait(0)


def test_progress_of_a_learner_that_ray_has_ended_is_left_to_its_call(handle):
    made, _ = handle(
        lambda call: OutOfMemoryError("too little") if call.method == "progress" else PENDING
    )
    assert made.progress() == (0, 0)
