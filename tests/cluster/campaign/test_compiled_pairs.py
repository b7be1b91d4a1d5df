"""Pairs of eager and compiled steps in a campaign."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from fakes import SPEC, FakeLearner, FakeWorkers, campaign, ran

from trappm.profiler.errors import InputError
from trappm.profiler.records import Execution


class Compiling(FakeWorkers):
    """Workers on which compiled steps take half the time."""

    def _measure(self, worker, task, cost, fault):
        is_compiled = task.configuration.execution is Execution.COMPILE
        return super()._measure(worker, task, cost * (0.5 if is_compiled else 1.0), fault)


class Publishing(FakeLearner):
    def publish(self, folder, fields, pairs=(), registry=None):
        self.pairs = pairs
        return super().publish(folder, fields, pairs, registry)


def test_an_initial_round_with_too_few_eager_steps_is_refused(store):
    groups = [{**SPEC["pool"]["groups"][0], "executions": ["eager", "compile"]}]
    with pytest.raises(InputError, match="initial: source is 4, half of it compiled steps"):
        campaign(store, FakeWorkers(), pool={"groups": groups}).run()


def test_a_learner_gets_the_pairs_of_its_devices(store):
    learner = Publishing()
    groups = [{**SPEC["pool"]["groups"][0], "executions": ["eager", "compile"]}]
    initial = {"source": 8, "target": 2}
    ran(store, Compiling(), learner, pool={"groups": groups}, initial=initial)
    counts = Counter((pair.device, pair.is_held_out) for pair in learner.pairs)
    assert counts["cpu-2t", False] == 6
    assert counts["cpu-2t", True] == 1
    for pair in learner.pairs:
        eager, compiled = learner.pool[pair.eager], learner.pool[pair.compiled]
        assert replace(eager, execution=Execution.COMPILE) == compiled
        assert pair.log_ratio == pytest.approx(math.log(0.5))
