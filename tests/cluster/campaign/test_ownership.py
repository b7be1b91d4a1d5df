"""One process at a time runs a campaign: real processes that live, die and come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from fakes import BUDGET, FakeLearner, FakeWorkers, campaign, labels_by_device, spec

import trappm.cluster.campaign.campaign
import trappm.store.owners
from trappm.cluster.campaign import process
from trappm.cluster.campaign.campaign import CampaignStopped
from trappm.cluster.campaign.process import has_live_owner, mark_running, this_process
from trappm.store import CampaignState, NotOwnerError
from trappm.store.owners import OwnedError

RUN = """
import sys
import trappm.store.owners
from trappm.cluster.campaign.process import mark_running, ownership
from trappm.store import Store
trappm.store.owners.BEAT_S = 0.5
url, campaign_id = sys.argv[1:]
with Store.open(url) as store:
    mark_running(store, campaign_id)
    with ownership(store, campaign_id) as mine:
        print("runs", flush=True)
        sys.stdin.read()
"""


@pytest.fixture
def campaign_id(store):
    return store.campaigns.create("tiny", spec().model_dump(mode="json"), 7).id


@pytest.fixture
def runner(store, campaign_id):
    """Another process that runs the campaign until its input ends."""
    url = store.database.engine.url.render_as_string()
    with subprocess.Popen(
        [sys.executable, "-c", RUN, url, campaign_id],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "runs\n"
        yield process
        process.kill()


def test_a_running_campaign_is_refused_to_a_second_process(store, campaign_id, runner):
    """Once it has shown another heartbeat: the last one may be from before it was killed."""
    assert has_live_owner(store.campaigns.get(campaign_id))
    assert store.campaigns.get(campaign_id).owner.process.pid == runner.pid
    with pytest.raises(OwnedError, match=rf"process {runner.pid}\) since"):
        mark_running(store, campaign_id)
    assert has_live_owner(store.campaigns.get(campaign_id))


def test_a_campaign_whose_process_was_killed_resumes_once_it_is_silent(
    store, campaign_id, runner, monkeypatch
):
    monkeypatch.setattr(trappm.store.owners, "SILENT_S", 1.0)
    os.kill(runner.pid, signal.SIGKILL)
    news = []
    mark_running(store, campaign_id, news.append)
    assert "waiting for its earlier process, silent for" in news[0]
    with process.ownership(store, campaign_id) as mine:
        assert store.campaigns.get(campaign_id).owner.process == this_process()
        mine.assignments.release_leases(campaign_id)
    assert store.campaigns.get(campaign_id).owner is None


def test_a_process_that_is_about_to_end_is_waited_for(store, campaign_id, runner):
    store.owners.stop_campaign(campaign_id, CampaignState.PAUSED)
    threading.Timer(0.5, runner.stdin.close).start()
    mark_running(store, campaign_id)
    assert runner.wait() == 0


def test_a_campaign_that_was_stopped_before_it_was_claimed_does_not_run(store, campaign_id):
    mark_running(store, campaign_id)
    store.owners.stop_campaign(campaign_id, CampaignState.CANCELLED)
    with process.ownership(store, campaign_id) as mine:
        assert mine is None
    assert store.campaigns.get(campaign_id).owner is None


def test_a_campaign_that_was_taken_over_writes_nothing_more(store, monkeypatch):
    after = 9
    monkeypatch.setattr(trappm.cluster.campaign.campaign, "LOOK_S", 1e9)  # only writes are refused
    other = FakeWorkers()
    workers = FakeWorkers(at=(after, lambda: campaign(store, other, campaign_id=run.id)))
    run = campaign(store, workers)
    with pytest.raises(NotOwnerError, match="was taken over by host"):
        run.run()
    assert len(workers.starts) == after
    assert store.campaigns.get(run.id).state == "running"  # as the other has it
    assert labels_by_device(store, run.id).total() == after - 1
    other.campaign.run()
    assert labels_by_device(store, run.id) == BUDGET
    outcomes = store.campaigns.outcome_counts(run.id)
    assert {d: n["ok"] for d, n in outcomes.items()} == BUDGET  # nothing was recorded twice


def test_an_order_during_publishing_is_obeyed(store):
    class Slow(FakeLearner):
        def publish(self, folder, fields, pairs=(), registry=None):
            store.owners.stop_campaign(fields["campaign"], CampaignState.PAUSED)
            return super().publish(folder, fields, pairs, registry)

    learner = Slow()
    run = campaign(store, FakeWorkers(), learner)
    with pytest.raises(CampaignStopped):
        run.run()
    assert store.campaigns.get(run.id).state == CampaignState.PAUSED
    assert learner.promoted is None
    assert store.campaigns.get(run.id).snapshot is None
    assert campaign(store, FakeWorkers(), campaign_id=run.id).run() == "snap1"
