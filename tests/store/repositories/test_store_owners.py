"""Who runs a campaign, and what nobody else may do meanwhile: over the store, on both back ends."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from store_samples import campaign_with, configuration, owned, process

import trappm.store.owners
from trappm.profiler.errors import InputError
from trappm.store import CampaignState, NotOwnerError
from trappm.store.engine import database_time
from trappm.store.owners import SILENT_S, OwnedError


@pytest.fixture
def campaign_id(store):
    return campaign_with(store, [configuration(1), configuration(2)])


def be_silent(store, monkeypatch, seconds):
    """The clock of the database continues by so much, and nothing is heard."""

    def later(connection):
        return database_time(connection) + timedelta(seconds=seconds)

    monkeypatch.setattr(trappm.store.owners, "database_time", later)
    monkeypatch.setattr(trappm.store.campaigns, "database_time", later)


def test_a_second_owner_is_refused_with_the_name_of_the_first(store, campaign_id):
    assert store.campaigns.get(campaign_id).owner is None
    owned(store, campaign_id, "gpu-3")
    owner = store.campaigns.get(campaign_id).owner
    assert (owner.id, owner.process) == ("gpu-3", process("gpu-3"))
    pattern = (
        rf"campaign {campaign_id} runs on host gpu-3 \(process 1\) since .* UTC, last heard of \d+ "
        rf"s ago; follow it with: trappm campaign status {campaign_id} --follow; stop it with: "
    )
    with pytest.raises(OwnedError, match=pattern) as refused:
        store.owners.begin_campaign(campaign_id)
    assert "\n" not in str(refused.value)
    arrived = pickle.loads(pickle.dumps(refused.value))  # noqa: S301  (as Ray brings it)
    assert (str(arrived), arrived.owner) == (str(refused.value), refused.value.owner)
    with pytest.raises(OwnedError, match=pattern):
        store.owners.claim_campaign(campaign_id, "other", process("other"))
    assert store.owners.claim_campaign(
        campaign_id, "gpu-3", process("gpu-3")
    )  # its answer was lost
    store.owners.release(campaign_id, "other")
    assert store.campaigns.get(campaign_id).owner.since == owner.since


@pytest.mark.parametrize(("seconds", "is_dead"), [(SILENT_S - 10, False), (SILENT_S + 1, True)])
def test_silent_owners_expire_by_the_database_clock(
    store, campaign_id, monkeypatch, seconds, is_dead
):
    first = owned(store, campaign_id, "first")
    be_silent(store, monkeypatch, seconds)
    if is_dead:
        owned(store, campaign_id, "second")
        with pytest.raises(NotOwnerError, match="taken over by host second"):
            store.owners.renew(campaign_id, "first")
        with pytest.raises(NotOwnerError):
            first.campaigns.log_event(campaign_id, "note", {})
        return
    with pytest.raises(OwnedError):
        store.owners.begin_campaign(campaign_id)
    store.owners.renew(campaign_id, "first")
    be_silent(store, monkeypatch, 2 * seconds)  # so long since the first claim
    with pytest.raises(OwnedError):
        store.owners.begin_campaign(campaign_id)


def test_one_of_many_simultaneous_claims_succeeds(store, campaign_id):
    store.owners.begin_campaign(campaign_id)

    def claim(name):
        try:
            return name if store.owners.claim_campaign(campaign_id, name, process(name)) else None
        except OwnedError:
            return None

    with ThreadPoolExecutor(8) as threads:
        (name,) = filter(None, threads.map(claim, [f"host {n}" for n in range(8)]))
    assert store.campaigns.get(campaign_id).owner.id == name


def test_a_finished_campaign_has_its_snapshot_and_cannot_be_ended_again(store, campaign_id):
    mine = owned(store, campaign_id)
    assert mine.owners.end_campaign(campaign_id, CampaignState.FAILED, "x") == "failed"
    assert store.campaigns.get(campaign_id).finished_at is None
    store.owners.release(campaign_id, "o")
    mine = owned(store, campaign_id)
    for _ in "twice":  # the first answer was lost
        assert mine.owners.finish_campaign(campaign_id, "done", "s2")
    ended = store.campaigns.get(campaign_id)
    assert (ended.state, ended.snapshot) == ("finished", "s2")
    assert ended.finished_at is not None
    for order in (CampaignState.CANCELLED, CampaignState.PAUSED):
        with pytest.raises(InputError, match="is finished already"):
            store.owners.stop_campaign(campaign_id, order)
    with pytest.raises(InputError, match="is finished already"):
        store.owners.begin_campaign(campaign_id)
    assert mine.owners.end_campaign(campaign_id, CampaignState.FAILED, "too late") == "finished"
    assert store.campaigns.get(campaign_id).finished_at == ended.finished_at
