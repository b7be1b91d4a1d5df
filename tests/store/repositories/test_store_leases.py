"""What the store promises of leases."""

from __future__ import annotations

import pytest
from store_samples import campaign_with, configuration, lease_next, measure_next, states


def test_released_leases_do_not_count_as_failures(store):
    campaign_id = campaign_with(store, [configuration()])
    keys = set()
    for _ in range(5):
        keys.add(lease_next(store, campaign_id).attempt_key)
        store.assignments.release_leases(campaign_id)
    assert len(keys) == 5
    assert states(store, campaign_id) == [("open", 5, 0)]


@pytest.mark.parametrize("failure", ["outcome", "lost"])
def test_what_failed_keeps_its_place_for_readers(store, failure):
    campaign_id = campaign_with(store, [configuration(b) for b in (1, 2, 4)])
    if failure == "outcome":
        measure_next(store, campaign_id, "unstable")
    else:
        store.assignments.take_back(lease_next(store, campaign_id).id, "died")
    planned_order = [a.configuration.batch_size for a in store.assignments.of_campaign(campaign_id)]
    assert planned_order == [1, 2, 4]


def test_what_was_given_up_gets_another_chance_while_its_round_is_open(store):
    campaign_id = campaign_with(store, [configuration(1), configuration(2)])
    measure_next(store, campaign_id)
    for _ in range(3):
        measure_next(store, campaign_id, "error")
    store.assignments.reopen_failed(campaign_id)
    assert states(store, campaign_id) == [("done", 1, 0), ("open", 3, 0)]
    measure_next(store, campaign_id)
    store.assignments.reopen_failed(campaign_id)
    assert states(store, campaign_id) == [("done", 1, 0), ("done", 4, 0)]


def test_what_was_given_up_in_a_closed_round_stays_so(store):
    campaign_id = campaign_with(store, [configuration()])
    for _ in range(3):
        measure_next(store, campaign_id, "error")
    store.rounds.close(campaign_id, 0, {})
    store.assignments.reopen_failed(campaign_id)
    assert states(store, campaign_id) == [("failed", 3, 3)]


def test_a_lost_worker_gives_its_lease_back_with_the_reason(store):
    campaign_id = campaign_with(store, [configuration()])
    for failures in (1, 2, 3):
        lease = lease_next(store, campaign_id)
        store.assignments.take_back(lease.id, f"died {failures}", max_attempts=3)
        store.assignments.take_back(lease.id, "told twice", max_attempts=3)
    assert states(store, campaign_id) == [("failed", 3, 3)]
    assert lease_next(store, campaign_id) is None
    assert [e.message["message"] for e in store.campaigns.events(campaign_id)] == [
        "died 1", "died 2", "died 3",
    ]  # fmt: skip
