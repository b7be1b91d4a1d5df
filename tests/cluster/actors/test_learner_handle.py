"""The campaign's handle to its learner, whose calls end as a test says, and its process."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
from fake_ray import FakeRay
from fakes import OTHER_CODE, FakeLearner
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from trappm.cluster.campaign import learner_handle as module
from trappm.cluster.campaign.learner_handle import LearnerHandle, prepare_learner
from trappm.profiler.errors import CampaignError
from trappm.profiler.host import procfs
from trappm.profiler.host.environment import this_code


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


def test_a_learner_refuses_a_node_with_another_version_of_trappm():
    words = r"has TraPPM .*, the campaign has TraPPM 0\.2\.9 \(code 01234567\).* as runtime_env"
    with pytest.raises(CampaignError, match=words):
        prepare_learner(FakeLearner)(OTHER_CODE)


def test_an_error_of_a_call_that_a_new_learner_repeats_is_reported(handle):
    """Without its encoder it could choose something, but not by the pool."""
    lost = OutOfMemoryError("a worker was killed")
    no_space = RayTaskError("set_pool", "OSError: No space", OSError("No space left on device"))

    def result(call):
        if call.actor == 1:
            return lost if call.method == "choose" else "done"
        return no_space if call.method == "set_pool" else "chosen without a pool"

    made, _ = handle(result)
    made.begin("set_pool", "pool")
    assert made.wait(0)
    made.begin("choose")
    assert not made.wait(0)
    with pytest.raises(CampaignError, match="the learner failed: No space left on device"):
        made.wait(0)


def test_the_result_is_that_of_the_call_and_not_of_those_repeated_before_it(handle):
    def result(call):
        dies = call.actor == 1 and call.method == "choose"
        return OutOfMemoryError("killed") if dies else (call.method, *call.arguments)

    made, _ = handle(result)
    for method in ("set_pool", "fit"):
        made.begin(method, 1)
        assert made.wait(0)
    made.begin("choose", 2)
    assert not made.wait(0)
    assert made.wait(0)
    assert made.result == ("choose", 2)


class Asking:
    """A learner that says whether it may have 32 GiB."""

    def __init__(self, results):
        np.ones(1 << 20)
        try:
            np.empty(4 << 30)
        except MemoryError:
            results.send("it has its own limit")


def test_a_learner_that_takes_too_much_fails_instead_of_its_container(monkeypatch):
    monkeypatch.setattr(procfs, "allowed_memory_mib", lambda: 3000.0)
    ours, results = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=prepare_learner(Asking), args=[this_code()], kwargs={"results": results}
    )
    process.start()
    results.close()
    assert ours.recv() == "it has its own limit"
    process.join()
