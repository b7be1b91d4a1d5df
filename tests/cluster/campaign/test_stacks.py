"""The same device key on two software stacks, or two cards: one head learns from one of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from fakes import (
    BUDGET,
    ONE_DEVICE,
    FakeLearner,
    FakeWorkers,
    labels_by_device,
    ran,
)

from trappm.cluster.campaign.training import training_labels

LABELS = BUDGET["cpu-2t"]


class Mixed(FakeWorkers):
    """Every n-th label comes from a node with another PyTorch, and takes ten times as long."""

    def __init__(self, every):
        super().__init__(workers=[("w", "cpu-2t")])
        self._every = every

    def _measure(self, worker, task, cost, fault):
        made = super()._measure(worker, task, cost, fault)
        other = len(self.starts) % self._every == 0
        environment = {"torch": "2.13.0" if other else "2.11.0", "cpu_model": "x"}
        factor = 10 if other else 1
        median_ms, p95_ms = made.step.median_ms * factor, made.step.p95_ms * factor
        step = replace(made.step, median_ms=median_ms, p95_ms=p95_ms)
        return replace(made, environment=environment, step=step)


class Seeing(FakeLearner):
    def fit(self, labels):
        self.values = Counter(
            x.values[0] / self.pool[x.configuration_id].batch_size for x in labels
        )
        return super().fit(labels)


def test_heads_learn_from_one_stack_and_other_labels_are_reported(store):
    every = 3
    learner = Seeing()
    workers = Mixed(every)
    run = ran(store, workers, learner, **ONE_DEVICE)
    assert labels_by_device(store, run.id) == {"cpu-2t": LABELS}  # all of them are kept
    others = LABELS // every
    assert learner.values == {10.0: LABELS - others}
    known = training_labels(store, run.id)
    assert len(known.labels) == LABELS - others
    (left_out,) = known.left_out
    assert (left_out.device, left_out.labels) == ("cpu-2t", others)
    assert left_out.why == "torch '2.13.0' instead of '2.11.0'"
    assert any(str(left_out) in line for line in workers.lines)


class Nodes(FakeWorkers):
    """All of one key, with these cards in turn."""

    def __init__(self, *cards):
        super().__init__(workers=[("w", "a100")])
        self._cards = cards

    def _measure(self, worker, task, cost, fault):
        made = super()._measure(worker, task, cost, fault)
        name, memory_mib = self._cards[len(self.starts) % len(self._cards)]
        return replace(made, environment={"device_name": name, "device_memory_mib": memory_mib})


A100_40GB = ("NVIDIA A100-SXM4-40GB", 40_960.0)
A100_80GB = ("NVIDIA A100-SXM4-80GB", 81_920.0)


@pytest.mark.parametrize(
    ("cards", "learned", "last_card"),
    [
        ([A100_80GB], "a100 sxm4 80gb", "a100 sxm4 80gb"),
        ([A100_80GB, A100_80GB, A100_40GB], "a100 sxm4 80gb", "a100"),
        ([(None, None)], "a100", "a100"),
    ],
)  # fmt: skip
def test_the_learner_gets_the_card_of_a_device_key(store, cards, learned, last_card):
    learner = FakeLearner()
    run = ran(store, Nodes(*cards), learner, **(ONE_DEVICE | {"devices": {"source": "a100"}}))
    known = training_labels(store, run.id)
    assert {label.card for label in known.labels} == {learned}
    assert learner.requests[0].card == "a100", "nothing has been measured yet"
    assert learner.requests[-1].card == last_card
