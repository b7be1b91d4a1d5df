"""Stop rules in the campaign loop: which ends it, what is told, what a restart remembers."""

from __future__ import annotations

import datetime

import pytest
from campaign_crew import BUDGET, FakeCrew, FakeLearner, campaign, labels_by_device

from cluster.ending import end_of
from cluster.telling import CampaignStopped
from store import Home
from trappm.report import campaign_facts, print_status

ALL = sum(BUDGET.values())
PAST = "2020-01-01T00:00:00+00:00"


class Judging(FakeLearner):
    """Errors on the evaluation set, in percent, are those of a list, training by training."""

    def __init__(self, errors):
        super().__init__()
        self.errors = list(errors)

    def fit(self, labels, on_progress):
        report = super().fit(labels, on_progress)
        error = self.errors[min(len(self.fits), len(self.errors)) - 1]
        pairs = [
            {"device": device, "metric": "step_time_ms", "architecture": f"a{i}",
             "measured": 100.0, "predicted": 100.0 + error}
            for device in BUDGET
            for i in range(4)
        ]  # fmt: skip
        return {**report, "evaluation": pairs}


def after_initial(labels):
    """Labels on the source once its initial round has ended, and so many acquired rounds."""
    return 3 + 4 + 2 * labels


@pytest.mark.parametrize(
    ("rules", "errors", "rule", "rounds"),
    [
        ({"target_mape": {"step_time_ms": 5.0}}, [4.0], "target", 0),
        ({"target_mape": {"step_time_ms": 5.0}}, [9.0, 4.0], "target", 1),
        ({"plateau_rounds": 1}, [9.0, 9.0], "plateau", 1),
        ({"labels": 11}, [9.0], "labels", 0),
        ({"labels": 12}, [9.0], "labels", 1),
        ({"gpu_hours": 14 / 3600}, [9.0], "GPU-hours", 1),
        ({"money": 11.0, "price_per_gpu_hour": 3600.0}, [9.0], "money", 0),
        ({"ends_at": PAST}, [9.0], "clock", 0),
    ],
)
def test_the_rule_that_holds_ends_a_campaign_and_is_told(store, rules, errors, rule, rounds):
    crew = FakeCrew()
    run = campaign(store, crew, Judging(errors), stop=rules)
    assert run.run() == "snap1"
    assert labels_by_device(store, run.id)["cpu-2t"] == after_initial(rounds)
    assert store.campaign(run.id).state == "finished"
    end = end_of(store, store.campaign(run.id))
    assert (end["rule"], end["holds"]) == (rule, True)
    (event,) = [e for e in store.events(run.id) if e.kind == "enough"]
    assert event.message["message"] == f"enough ({rule}): {end['told']}"
    assert event.message["message"] in crew.told


def test_rules_that_never_hold_change_nothing(store):
    rules = {"target_mape": {"step_time_ms": 1.0}, "labels": 900, "plateau_rounds": 9}
    run = campaign(store, FakeCrew(), Judging([9.0, 8.0, 7.0]), stop=rules)
    run.run()
    assert labels_by_device(store, run.id) == BUDGET
    end = end_of(store, store.campaign(run.id))
    assert (end["rule"], end["labels"], end["holds"]) == ("rounds", ALL, False)


@pytest.mark.parametrize("stop_after", [5, 12, 13])
def test_a_stop_rule_says_the_same_after_a_restart(store, stop_after):
    run = campaign(store, FakeCrew(stop_after=stop_after), Judging([9.0]), stop={"labels": 14})
    with pytest.raises(CampaignStopped):
        run.run()
    again = campaign(store, FakeCrew(), Judging([9.0]), campaign_id=run.id)
    again.run()
    assert labels_by_device(store, run.id).total() == 14
    assert [e.kind for e in store.events(run.id)].count("enough") == 1


def test_status_foretells_what_will_end_a_campaign_and_when(store, tmp_path, capsys):
    rules = {"labels": 900, "gpu_hours": 16 / 3600}
    run = campaign(store, FakeCrew(stop_after=13), Judging([9.0]), stop=rules)
    with pytest.raises(CampaignStopped):
        run.run()
    facts = campaign_facts(store, Home(tmp_path), run.id)
    assert (facts["end"]["rule"], facts["end"]["labels"]) == ("GPU-hours", 16)
    launched = store.campaign(run.id).created_at
    at = datetime.datetime.fromisoformat(facts["end"]["at"])
    assert at > datetime.datetime.fromisoformat(launched)
    print_status(facts)
    assert "it will end by GPU-hours" in capsys.readouterr().out
