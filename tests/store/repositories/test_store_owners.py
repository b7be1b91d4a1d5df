"""Who runs a campaign, and what nobody else may do meanwhile: over the store, on both back ends."""

from __future__ import annotations

import pickle
import threading
from datetime import timedelta

import pytest
from store_samples import campaign_with, configuration, lease_next, measurement, owned, process

import trappm.store.repositories.owners
from trappm.profiler.errors import InputError, SnapshotError
from trappm.store import CampaignState, NotOwnerError, SnapshotRecord, Store
from trappm.store.db.engine import database_time
from trappm.store.repositories.owners import SILENT_S, OwnedError


@pytest.fixture
def campaign_id(store):
    return campaign_with(store, [configuration(1), configuration(2)])


def be_silent(store, monkeypatch, seconds):
    """The clock of the database goes on by so much, and nothing is heard."""

    def later(connection):
        return database_time(connection) + timedelta(seconds=seconds)

    monkeypatch.setattr(trappm.store.repositories.owners, "database_time", later)
    monkeypatch.setattr(trappm.store.repositories.campaigns, "database_time", later)


def snapshot(campaign_id, name="s1"):
    return SnapshotRecord(
        id=name, campaign_id=campaign_id, location=name, manifest={}, created_at="2026-01-01T00:00Z"
    )


def test_who_runs_a_campaign_is_told_to_whoever_wants_to_run_it_too(store, campaign_id):
    assert store.campaign(campaign_id).owner is None
    owned(store, campaign_id, "gpu-3")
    owner = store.campaign(campaign_id).owner
    assert (owner.id, owner.process) == ("gpu-3", process("gpu-3"))
    told = (
        rf"campaign {campaign_id} runs on host gpu-3 \(process 1\) since .* UTC, last heard of \d+ "
        rf"s ago; watch it with: trappm campaign watch {campaign_id}; stop it with: trappm "
    )
    with pytest.raises(OwnedError, match=told) as refused:
        store.begin_campaign(campaign_id)
    assert "\n" not in str(refused.value)
    arrived = pickle.loads(pickle.dumps(refused.value))  # noqa: S301  (as Ray brings it)
    assert (str(arrived), arrived.owner) == (str(refused.value), refused.value.owner)
    with pytest.raises(OwnedError, match=told):
        store.claim_campaign(campaign_id, "other", process("other"))
    assert store.claim_campaign(campaign_id, "gpu-3", process("gpu-3"))  # its answer was lost
    assert store.campaign(campaign_id).owner.since == owner.since


def test_an_owner_that_is_known_to_be_gone_is_followed_at_once(store, campaign_id):
    owned(store, campaign_id, "first")
    with pytest.raises(OwnedError):
        store.begin_campaign(campaign_id, gone="another")
    owned(store, campaign_id, "second", gone="first")
    assert store.campaign(campaign_id).owner.id == "second"


@pytest.mark.parametrize(("seconds", "is_dead"), [(SILENT_S - 10, False), (SILENT_S + 1, True)])
def test_the_time_of_the_database_says_who_is_dead(
    store, campaign_id, monkeypatch, seconds, is_dead
):
    first = owned(store, campaign_id, "first")
    be_silent(store, monkeypatch, seconds)
    if is_dead:
        owned(store, campaign_id, "second")
        with pytest.raises(NotOwnerError, match="taken over by host second"):
            store.renew_ownership(campaign_id, "first")
        with pytest.raises(NotOwnerError):
            first.log_event(campaign_id, "note", {})
        return
    with pytest.raises(OwnedError):
        store.begin_campaign(campaign_id)
    store.renew_ownership(campaign_id, "first")
    be_silent(store, monkeypatch, 2 * seconds)  # so long since the first claim
    with pytest.raises(OwnedError):
        store.begin_campaign(campaign_id)


def test_who_gives_a_campaign_back_leaves_it_to_others_and_can_write_no_more(store, campaign_id):
    first = owned(store, campaign_id, "first")
    store.release_ownership(campaign_id, "another")
    first.log_event(campaign_id, "note", {})
    store.release_ownership(campaign_id, "first")
    assert store.campaign(campaign_id).owner is None
    with pytest.raises(NotOwnerError):
        first.log_event(campaign_id, "note", {})
    owned(store, campaign_id, "second")


def test_what_the_one_before_hands_in_is_refused_whole(store, campaign_id):
    first = owned(store, campaign_id, "first")
    lease = lease_next(first, campaign_id)
    second = owned(store, campaign_id, "second", gone="first")
    late = measurement(lease.configuration, attempt_key=lease.attempt_key)
    with pytest.raises(NotOwnerError):
        first.record_and_lease([(late, lease.id)], [])
    assert second.release_leases(campaign_id) == 1
    assert store.outcome_counts(campaign_id) == {}
    again = lease_next(second, campaign_id)
    assert (again.id, again.attempts, again.failures) == (lease.id, 2, 0)


def test_of_many_that_claim_at_once_one_gets_it(store, database_url, campaign_id):
    store.begin_campaign(campaign_id)
    barrier, got = threading.Barrier(8), []

    def claim(name):
        with Store.open(database_url) as mine:
            barrier.wait()
            try:
                got.append(mine.claim_campaign(campaign_id, name, process(name)) and name)
            except OwnedError:
                got.append(None)

    threads = [threading.Thread(target=claim, args=(f"host {n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (name,) = [one for one in got if one]
    assert store.campaign(campaign_id).owner.id == name


def test_the_end_of_a_campaign_is_timed_and_no_end_is_ended_again(store, campaign_id):
    mine = owned(store, campaign_id)
    assert mine.end_campaign(campaign_id, CampaignState.FAILED, "x") == "failed"
    assert store.campaign(campaign_id).finished_at is None
    store.begin_campaign(campaign_id, gone="o")
    assert mine.finish_campaign(campaign_id, "done", None)
    assert mine.finish_campaign(campaign_id, "done", None)  # the first answer was lost
    ended = store.campaign(campaign_id)
    assert ended.state == "finished"
    assert ended.finished_at is not None
    for order in (CampaignState.CANCELLED, CampaignState.PAUSED):
        with pytest.raises(InputError, match="is finished already"):
            store.stop_campaign(campaign_id, order)
    with pytest.raises(InputError, match="is finished already"):
        store.begin_campaign(campaign_id)
    assert mine.end_campaign(campaign_id, CampaignState.FAILED, "too late") == "finished"
    assert store.campaign(campaign_id).finished_at == ended.finished_at


@pytest.mark.parametrize("order", [CampaignState.CANCELLED, CampaignState.PAUSED])
def test_a_campaign_that_was_stopped_publishes_nothing(store, campaign_id, order):
    mine = owned(store, campaign_id)
    store.stop_campaign(campaign_id, order)
    assert not mine.finish_campaign(campaign_id, "done", snapshot(campaign_id))
    assert store.snapshots() == []
    assert mine.end_campaign(campaign_id, CampaignState.FAILED, "x") == order
    assert not store.claim_campaign(campaign_id, "late", process("late"))


def test_a_campaign_is_finished_with_its_snapshot_or_not_at_all(store, campaign_id):
    mine = owned(store, campaign_id)
    store.register_snapshot("s1", campaign_id=None, location="elsewhere", manifest={})
    with pytest.raises(SnapshotError, match="published already"):
        mine.finish_campaign(campaign_id, "done", snapshot(campaign_id))
    assert store.campaign_state(campaign_id) == "running"
    assert mine.finish_campaign(campaign_id, "done", snapshot(campaign_id, "s2"))
    assert store.snapshot("s2").campaign_id == campaign_id
