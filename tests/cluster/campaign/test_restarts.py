"""A campaign that is killed anywhere, or that meets any fault, ends with each label once."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from contextlib import closing

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
from sqlalchemy import event, make_url

from trappm.cluster.campaign.campaign import CampaignStopped
from trappm.profiler.errors import CampaignError
from trappm.store import Store
from trappm.store.records import MAX_LOSSES

TWO_GPUS = [("a1", "a100"), ("a2", "a100"), ("v1", "v100")]
GPUS = {"devices": {"source": "a100", "target": "v100"}}


SHORT = {
    "evaluation": {"source": 2, "target": 2, "architecture_share": 0.3},
    "initial": {"source": 4, "target": 2}, "rounds": {"count": 1, "source": 1, "target": 1},
}  # fmt: skip
"""Every kind of round, and as few labels as possible."""
SHORT_BUDGET = {"source": 2 + 4 + 1, "target": 2 + 2 + 1}


class Copies:
    """Copies of the store as a process that is killed at a commit leaves it, each state once."""

    def __init__(self, store, new_store):
        self.engine, self.urls = store.database.engine, []
        self._new_store, self._version = new_store, None
        self._reader = sqlite3.connect(self.engine.url.database, check_same_thread=False)

    def __enter__(self):
        event.listen(self.engine, "commit", self._copy)
        return self

    def __exit__(self, *_):
        event.remove(self.engine, "commit", self._copy)
        self._reader.close()

    def _copy(self, connection):
        (version,) = self._reader.execute("PRAGMA data_version").fetchone()
        if version == self._version:
            return  # the commits before it have only read
        self._version = version
        self.urls.append(self._new_store())
        with closing(sqlite3.connect(make_url(self.urls[-1]).database)) as copy:
            self._reader.backup(copy)


def begun(store, devices, campaign_id=None):
    workers = FakeWorkers(workers=TWO_GPUS) if devices else FakeWorkers()
    learner, changes = FakeLearner(), SHORT | devices
    return campaign(store, workers, learner, campaign_id, canary=False, **changes), learner


@pytest.mark.parametrize(("devices", "every"), [({}, 3), (GPUS, 1)], ids=["cpus", "gpus"])
def test_a_campaign_killed_after_any_commit_ends_the_same(new_store, devices, every):
    """It runs once, and is continued from the store of each moment at which it may be killed."""
    with Store.open(new_store()) as store:
        run, _ = begun(store, devices)
        with Copies(store, new_store) as copies:
            run.run()
    assert len(copies.urls) > 40
    for url in copies.urls[::every]:
        with Store.open(url) as store:
            recorded = {(x.device, x.configuration.id) for x in store.labels.of_campaign(run.id)}
            if store.campaigns.state(run.id) != "finished":
                again, learner = begun(store, devices, run.id)
                again.run()
                assert learner.promoted == "snap1"
                assert not recorded & set(again.profilers.starts)  # each label once
            record = store.campaigns.get(run.id)
            assert (record.state, record.snapshot) == ("finished", "snap1")
            names = (devices or SPEC)["devices"]
            budget = {names[part]: count for part, count in SHORT_BUDGET.items()}
            assert labels_by_device(store, run.id) == budget
            assert all(part.is_closed for part in store.rounds.all(run.id))
            assert store.check() == []


FAULTS = ("lost", "unstable", "error", "timeout", "oom", "unsupported")


@settings(
    deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
        campaign_id, recorded = None, set()
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
                assert not recorded & set(workers.starts)  # each label once
                labels = store.labels.of_campaign(run.id)
                recorded = {(x.device, x.configuration.id) for x in labels}
        assignments = store.assignments.of_campaign(run.id)
        states = Counter(str(a.state) for a in assignments)
        allowed = {"done", "failed"} | ({"open"} if budget else set())
        assert set(states) <= allowed
        assert all(a.failures <= 3 and a.losses <= MAX_LOSSES for a in assignments)
        labels = labels_by_device(store, run.id).total()
        assert labels <= (budget or sum(BUDGET.values()))
        assert all(part.is_closed for part in store.rounds.all(run.id))
        assert store.check() == []


def test_hosts_on_which_a_step_failed_are_remembered_by_a_restart(store):
    names, hosts = [("a1", "a100"), ("a2", "a100")], {"a1": math.inf, "a2": math.inf}
    one_device = {
        "devices": {"source": "a100"}, "evaluation": {"source": 3, "architecture_share": 0.3},
        "initial": {"source": 5}, "rounds": {"count": 0, "source": 0},
    }  # fmt: skip
    workers = FakeWorkers(faults={1: "error"}, stop_after=2, workers=names[:1], sick=hosts)
    run = campaign(store, workers, canary=False, **one_device)
    with pytest.raises(CampaignStopped):
        run.run()
    again = FakeWorkers(workers=names, sick=hosts)
    campaign(store, again, campaign_id=run.id).run()
    on = {what: name for (_, what), (name, _) in zip(again.starts, again.done, strict=True)}
    assert on[workers.starts[0][1]] == "a2"


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
