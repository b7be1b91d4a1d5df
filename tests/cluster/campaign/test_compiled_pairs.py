"""The ratio of compiled to eager steps from a campaign's pairs."""

import math

import pytest
from campaign_crew import SPEC, FakeLearner, FakeWorkers, campaign, ran

from trappm.cluster.campaign.history import compiled_ratios
from trappm.profiler.errors import InputError
from trappm.profiler.records import Execution


class Compiling(FakeWorkers):
    """Workers on which compiled steps take half the time."""

    def _measure(self, worker, task, cost, fault):
        is_compiled = task.configuration.execution is Execution.COMPILE
        return super()._measure(worker, task, cost * (0.5 if is_compiled else 1.0), fault)


class Publishing(FakeLearner):
    def publish(self, registry, fields):
        self.published = fields
        return super().publish(registry, fields)


def test_an_initial_round_with_too_few_eager_steps_is_refused(store):
    groups = [{**SPEC["pool"]["groups"][0], "executions": ["eager", "compile"]}]
    with pytest.raises(InputError, match="initial: source is 4, half of it compiled steps"):
        campaign(store, FakeWorkers(), pool={"groups": groups}).run()


def test_pairs_give_the_ratio_of_devices_with_enough_of_them(store):
    learner = Publishing()
    groups = [{**SPEC["pool"]["groups"][0], "executions": ["eager", "compile"]}]
    initial = {"source": 8, "target": 2}
    run = ran(store, Compiling(), learner, pool={"groups": groups}, initial=initial)
    assert learner.published["compiled"].keys() == {"cpu-2t"}  # the other device has too few
    ratio = learner.published["compiled"]["cpu-2t"]["train"]
    assert ratio["log_ratio"] == pytest.approx(math.log(0.5))
    assert (ratio["pairs"], ratio["log_error"]) == (6, pytest.approx(0.0, abs=1e-9))
    _, (line,) = compiled_ratios(store, run.id)
    assert line == (
        "cpu-2t: a compiled train step takes 0.50 times the eager one (6 pairs; off by 0% on 1 of "
        "held-out architectures)"
    )
    assert line in {event.message.get("message") for event in store.campaigns.events(run.id)}
