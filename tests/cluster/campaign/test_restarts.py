"""A campaign that is killed anywhere, or that meets any fault, ends with each label once."""

from __future__ import annotations

from collections import Counter

import pytest
from fakes import (
    BUDGET,
    SPEC,
    Commits,
    FakeLearner,
    FakeWorkers,
    Killed,
    campaign,
    labels_by_device,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trappm.cluster.campaign.campaign import CampaignStopped
from trappm.profiler.errors import CampaignError
from trappm.store import Store
from trappm.store.records import MAX_LOSSES

TWO_GPUS = [("a1", "a100"), ("a2", "a100"), ("v1", "v100")]
GPUS = {"devices": {"source": "a100", "target": "v100"}}


def begun(store, devices, campaign_id=None):
    workers = FakeWorkers(workers=TWO_GPUS) if devices else FakeWorkers()
    learner = FakeLearner()
    return campaign(store, workers, learner, campaign_id, canary=False, **devices), learner


def commits_of(new_store, devices):
    with Store.open(new_store()) as store:
        run, _ = begun(store, devices)
        with Commits(store) as commits:
            run.run()
        return commits.count


@pytest.mark.parametrize("devices", [{}, GPUS], ids=["cpus", "gpus"])
@pytest.mark.parametrize("part", range(4))
def test_a_campaign_killed_between_any_two_statements_ends_the_same(new_store, devices, part):
    """Parts of the same test, so that they run at once."""
    total = commits_of(new_store, devices)
    assert total > 40
    for last in range(1 + part, total + 1, 4):
        with Store.open(new_store()) as store:
            run, _ = begun(store, devices)
            with Commits(store, last), pytest.raises(Killed):
                run.run()
            recorded = {(x.device, x.configuration.id) for x in store.labels.of_campaign(run.id)}
            if store.campaigns.state(run.id) != "finished":
                again, learner = begun(store, devices, run.id)
                again.run()
                assert learner.promoted == "snap1"
                assert not recorded & set(again.profilers.starts)  # each label once
            record = store.campaigns.get(run.id)
            assert (record.state, record.snapshot) == ("finished", "snap1")
            names = dict(zip(BUDGET, GPUS["devices"].values() if devices else BUDGET, strict=True))
            assert labels_by_device(store, run.id) == {names[d]: n for d, n in BUDGET.items()}
            assert all(part.is_closed for part in store.rounds.all(run.id))
            assert store.check() == []


FAULTS = ("lost", "unstable", "error", "timeout", "oom", "unsupported")


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    faults=st.dictionaries(st.integers(1, 25), st.sampled_from(FAULTS), max_size=15),
    stops=st.lists(st.integers(1, 12), max_size=3),
    devices=st.sampled_from([{}, GPUS]),
    budget=st.one_of(st.none(), st.integers(11, 17)),
)
def test_a_campaign_with_any_faults_comes_to_its_end(new_store, faults, stops, devices, budget):
    changes = devices | ({"stop": {"labels": budget}} if budget else {})
    names = TWO_GPUS if devices else []
    with Store.open(new_store()) as store:
        campaign_id, starts = None, Counter()
        for stop_after in (*stops, None):
            workers = FakeWorkers(faults=faults, stop_after=stop_after, workers=names)
            run = campaign(store, workers, campaign_id=campaign_id, canary=False, **changes)
            campaign_id = run.id
            try:
                run.run()
                break
            except CampaignStopped:
                assert store.campaigns.state(run.id) == "paused"
            except CampaignError:
                (event,) = store.campaigns.events(run.id, kind="failed")
                assert "too few labels" in event.message["message"]
                return
            finally:
                starts.update(workers.starts)
        assignments = store.assignments.of_campaign(run.id)
        states = Counter(str(a.state) for a in assignments)
        allowed = {"done", "failed"} | ({"open"} if budget else set())
        assert set(states) <= allowed
        assert all(a.failures <= 3 and a.losses <= MAX_LOSSES for a in assignments)
        labels = labels_by_device(store, run.id).total()
        assert labels <= (budget or sum(BUDGET.values()))
        assert all(part.is_closed for part in store.rounds.all(run.id))
        assert store.check() == []


def test_ten_losses_are_no_failure_and_a_preempted_configuration_keeps_its_place(store):
    """Long steps are hit most, so a label must not be given up for it."""
    faults = dict.fromkeys(range(1, MAX_LOSSES), "lost")
    workers = FakeWorkers(faults=faults, devices=("cpu-2t", "cpu-1t"))
    run = campaign(store, workers)
    run.run()
    assert labels_by_device(store, run.id) == BUDGET
    first = [a for a in store.assignments.of_campaign(run.id) if a.losses]
    assert [(a.losses, a.failures, a.state) for a in first] == [(MAX_LOSSES - 1, 0, "done")]


def test_hosts_on_which_a_step_failed_are_remembered_by_a_restart(store):
    class OnTwoHosts(FakeWorkers):
        def refresh_workers(self):
            return [w for w in super().refresh_workers() if w.name not in self.away]

        def start(self, worker, task, protocol):
            self.on = getattr(self, "on", {}) | {task.configuration.id: worker.name}
            super().start(worker, task, protocol)

    both = {"workers": [("a1", "a100"), ("a2", "a100")], "sick": {"a1": 10**9, "a2": 10**9}}
    one_device = {
        "devices": {"source": "a100"}, "evaluation": {"source": 3, "architecture_share": 0.3},
        "initial": {"source": 5}, "rounds": {"count": 0, "source": 0},
    }  # fmt: skip
    workers = OnTwoHosts(faults={1: "error"}, stop_after=2, **both)
    workers.away = {"a2"}
    run = campaign(store, workers, canary=False, **one_device)
    with pytest.raises(CampaignStopped):
        run.run()
    failed = workers.starts[0][1]
    again = OnTwoHosts(**both)
    again.away = set()
    on = {}
    start = again.start
    again.start = lambda w, task, p: (
        on.setdefault(task.configuration.id, w.name),
        start(w, task, p),
    )
    campaign(store, again, campaign_id=run.id).run()
    assert on[failed] == "a2"


def test_a_learner_that_fails_lets_what_it_had_chosen_be_measured(store):
    class Broken(FakeLearner):
        def fit(self, labels):
            raise CampaignError("the learner crashed 3 times")

    run = campaign(store, FakeWorkers(workers=TWO_GPUS), Broken(), canary=False, **GPUS)
    with pytest.raises(CampaignError, match="crashed 3 times"):
        run.run()
    chosen = sum(SPEC[part][d] for part in ("evaluation", "initial") for d in ("source", "target"))
    assert labels_by_device(store, run.id).total() == chosen
    assert store.campaigns.state(run.id) == "failed"
    assert any("is still measured" in e.message["message"] for e in store.campaigns.events(run.id))
    well = campaign(store, FakeWorkers(workers=TWO_GPUS), campaign_id=run.id)
    assert well.run() == "snap1"
    assert labels_by_device(store, run.id).total() == sum(BUDGET.values())


def test_results_that_are_back_are_recorded_when_the_campaign_fails(store):
    """Three measurements are back when the last worker of another device is lost."""

    class ThreeBack(FakeWorkers):
        def wait(self, timeout_s):
            if len(self.starts) < 3:
                return []
            raise CampaignError("no worker is left")

        def collect(self):
            return super().wait(0)

    workers = ThreeBack(workers=[(f"a{i}", "a100") for i in range(3)])
    run = campaign(
        store, workers, canary=False, devices={"source": "a100"},
        evaluation={"source": 3, "architecture_share": 0.3}, initial={"source": 4},
        rounds={"count": 0, "source": 0},
    )  # fmt: skip
    with pytest.raises(CampaignError, match="no worker is left"):
        run.run()
    assert labels_by_device(store, run.id).total() == 3
    assert store.campaigns.state(run.id) == "failed"


def test_an_abandoned_step_is_reported_although_the_process_was_killed_before(store):
    class KilledThen(FakeWorkers):
        """The process is killed between recording the last failure and its event."""

        def wait(self, timeout_s):
            if not kills and self.starts[2:] and self.starts.count(self.starts[0]) == 3:
                kills.append(Commits(store, 2).__enter__())
            return super().wait(timeout_s)

    kills = []
    run = campaign(store, KilledThen(poison="error"), canary=False)
    with pytest.raises(Killed):
        run.run()
    kills[0].__exit__()
    ((abandoned, outcome),) = store.assignments.list_failed(run.id)
    assert outcome == "error"
    assert store.campaigns.events(run.id, kind="abandoned") == []
    campaign(store, FakeWorkers(), campaign_id=run.id).run()
    (event,) = store.campaigns.events(run.id, kind="abandoned")
    assert event.message["id"] == abandoned.id
    assert "no label after 3 attempts (error)" in event.message["message"]
