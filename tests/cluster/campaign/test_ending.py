"""Stop rules in the campaign loop: which ends it, what is told, what a restart remembers."""

from __future__ import annotations

import datetime
from dataclasses import replace

import pytest
from fakes import BUDGET, FakeLearner, FakeWorkers, campaign, labels_by_device, ran

import trappm.cluster.campaign.campaign
import trappm.cluster.campaign.training
from trappm.cluster.campaign.training import Judgement
from trappm.cluster.launch import order_retry
from trappm.profiler.errors import InputError
from trappm.reports.campaign_facts import campaign_facts

ALL = sum(BUDGET.values())
PAST = "2020-01-01T00:00:00+00:00"


class Judging(FakeLearner):
    """Errors on the evaluation set, in percent, are those of a list, training by training."""

    def __init__(self, errors):
        super().__init__()
        self.errors = list(errors)

    def fit(self, labels):
        report = super().fit(labels)
        error = self.errors[min(len(self.fits), len(self.errors)) - 1]
        judgements = [
            Judgement(
                device=device, metric="step_time_ms", architecture=f"a{i}",
                measured=100.0, predicted=100.0 + error,
            )
            for device in BUDGET
            for i in range(4)
        ]  # fmt: skip
        return replace(report, evaluation=judgements)


def after_initial(labels):
    """Labels on the source once its initial round has ended, and this number of acquired rounds."""
    return 3 + 4 + 2 * labels


@pytest.mark.parametrize(
    ("rules", "errors", "rule", "rounds"),
    [
        ({"target_mape": {"step_time_ms": 5.0}}, [9.0, 4.0], "target", 1),
        ({"labels": 14}, [9.0], "labels", 1),
        ({"gpu_hours": 14 / 3600}, [9.0], "CPU-hours", 1),
    ],
)
def test_the_first_rule_that_holds_ends_a_campaign(store, rules, errors, rule, rounds):
    workers = FakeWorkers()
    run = campaign(store, workers, Judging(errors), stop=rules)
    assert run.run() == "snap1"
    assert labels_by_device(store, run.id)["cpu-2t"] == after_initial(rounds)
    assert store.campaigns.get(run.id).state == "finished"
    end = campaign_facts(store, run.id).end
    assert (end.rule, end.holds) == (rule, True)
    (event,) = [e for e in store.campaigns.events(run.id) if e.kind == "enough"]
    assert event.message["message"] == f"enough ({rule}): {end.reason}"
    assert event.message["message"] in workers.lines
    assert end.unmeasured == 0


GPUS = {"source": "a100", "target": "v100"}
WORKERS = [("a1", "a100"), ("a2", "a100"), ("a3", "a100"), ("v1", "v100")]


def gpu_campaign(store, workers=None, campaign_id=None, **stop):
    """Four GPUs that do not wait for the learner."""
    workers = workers or FakeWorkers(workers=WORKERS)
    return campaign(store, workers, Judging([9.0]), campaign_id, devices=GPUS, stop=stop)


@pytest.mark.parametrize("labels", [5, ALL - 1])
def test_a_budget_of_labels_is_met_exactly_and_the_rest_is_reported(store, labels):
    run = gpu_campaign(store, labels=labels)
    assert run.run() == "snap1"
    assert labels_by_device(store, run.id).total() == labels
    assert store.campaigns.get(run.id).state == "finished"
    assert all(r.is_closed for r in store.rounds.all(run.id))
    facts = campaign_facts(store, run.id)
    left = len(store.assignments.of_campaign(run.id)) - labels
    assert (facts.end.rule, facts.end.unmeasured) == ("labels", left)
    assert store.check() == []


class Clock(datetime.datetime):
    is_late = False

    @classmethod
    def now(cls, tz=None):
        return cls(2020 + 20 * cls.is_late, 1, 1, tzinfo=tz)


def test_after_the_deadline_running_measurements_are_kept_and_no_more_begin(store, monkeypatch):
    count = 9
    monkeypatch.setattr(trappm.cluster.campaign.campaign, "LOOK_S", 0.0)
    monkeypatch.setattr(trappm.cluster.campaign.campaign, "datetime", Clock)
    monkeypatch.setattr(Clock, "is_late", False)
    workers = FakeWorkers(workers=WORKERS, at=(count, lambda: setattr(Clock, "is_late", True)))
    run = gpu_campaign(store, workers, ends_at="2030-01-01T00:00:00+00:00")
    assert run.run() == "snap1"
    # The look comes once a turn, in which each of the four may have begun one more.
    assert count <= len(workers.starts) <= count + 4
    assert labels_by_device(store, run.id).total() == len(workers.starts)
    assert all(r.is_closed for r in store.rounds.all(run.id))
    end = campaign_facts(store, run.id).end
    assert (end.rule, end.holds) == ("clock", True)
    assert end.unmeasured == len(store.assignments.of_campaign(run.id)) - len(workers.starts)


def test_a_campaign_past_its_deadline_finishes_without_a_snapshot(store):
    workers = FakeWorkers()
    run = campaign(store, workers, stop={"ends_at": PAST})
    assert run.run() is None
    assert workers.starts == []
    assert store.campaigns.get(run.id).state == "finished"


def test_a_campaign_that_a_stop_rule_ended_is_not_retried(store):
    run = ran(store, FakeWorkers(poison="error"), stop={"labels": 9})
    with pytest.raises(InputError, match=r"ended by its stop rule \(labels: 9 of 9 labels"):
        order_retry(store, run.id, ["error"])
