"""What the store promises of leases."""

from __future__ import annotations

import dataclasses

import pytest
from store_samples import (
    DEVICE,
    campaign_with,
    configuration,
    measure_next,
    measurement,
    planned,
    states,
)


def test_assignments_are_leased_in_the_order_wanted_and_only_once(store):
    wanted = [configuration(8), configuration(1), configuration(4)]
    campaign_id = campaign_with(store, wanted)
    leases = [store.lease(campaign_id, DEVICE, "w", 60) for _ in wanted]
    assert [lease.configuration for lease in leases] == wanted
    assert {(x.state, x.attempts, x.worker) for x in leases} == {("leased", 1, "w")}
    assert store.lease(campaign_id, DEVICE, "w", 60) is None
    assert store.lease(campaign_id, "a100", "w", 60) is None
    assert store.assignment_counts(campaign_id) == {DEVICE: {"leased": 3}}


def test_an_earlier_round_is_measured_first(store):
    campaign_id = store.create_campaign("one", {}, 0).id
    store.set_campaign_pool(campaign_id, [(configuration(b), False) for b in (1, 2)])
    store.plan_round(campaign_id, 1, "initial", planned([configuration(1)]))
    store.plan_round(campaign_id, 0, "evaluation", planned([configuration(2)], role="evaluate"))
    assert store.lease(campaign_id, DEVICE, "w", 60).round_number == 0
    assert store.lease(campaign_id, DEVICE, "w", 60).round_number == 1


def test_released_leases_do_not_count_as_failures(store):
    campaign_id = campaign_with(store, [configuration()])
    keys = set()
    for _ in range(5):
        keys.add(store.lease(campaign_id, DEVICE, "w", 60).attempt_key)
        assert store.release_leases(campaign_id) == 1
    assert len(keys) == 5
    assert states(store, campaign_id) == [("open", 5, 0)]
    assert store.release_leases(campaign_id) == 0


def test_an_expired_lease_is_given_to_another_and_counts_as_a_failure(store):
    campaign_id = campaign_with(store, [configuration()])
    lost = store.lease(campaign_id, DEVICE, "lost", 0)
    again = store.lease(campaign_id, DEVICE, "other", 60)
    assert again.id == lost.id
    assert (again.attempts, again.failures, again.worker) == (2, 1, "other")
    assert not store.heartbeat(lost, 60)
    assert "lost" in store.events(campaign_id)[0].message["message"]


def test_an_assignment_that_takes_every_worker_down_is_given_up(store):
    campaign_id = campaign_with(store, [configuration()])
    for _ in range(2):
        assert store.lease(campaign_id, DEVICE, "w", 0, max_attempts=2) is not None
    assert store.lease(campaign_id, DEVICE, "w", 60, max_attempts=2) is None
    assert states(store, campaign_id) == [("failed", 2, 2)]


@pytest.mark.parametrize("failure", ["outcome", "lost", "expired"])
def test_what_failed_waits_for_the_rest_of_its_round_but_keeps_its_place_for_readers(
    store, failure
):
    campaign_id = campaign_with(store, [configuration(b) for b in (1, 2, 4)])
    if failure == "outcome":
        measure_next(store, campaign_id, "unstable")
    else:
        lease = store.lease(campaign_id, DEVICE, "w", 0 if failure == "expired" else 60)
        if failure == "lost":
            store.give_up_lease(lease.id, "died")
    order = [store.lease(campaign_id, DEVICE, "w", 60).configuration.batch_size for _ in range(3)]
    assert order == [2, 4, 1]
    planned_order = [a.configuration.batch_size for a in store.assignments(campaign_id)]
    assert planned_order == [1, 2, 4]


def test_what_was_given_up_gets_another_chance_while_its_round_is_open(store):
    campaign_id = campaign_with(store, [configuration(1), configuration(2)])
    measure_next(store, campaign_id)
    for _ in range(3):
        measure_next(store, campaign_id, "error")
    assert store.reopen_failed(campaign_id) == 1
    assert states(store, campaign_id) == [("done", 1, 0), ("open", 3, 0)]
    _, recorded = measure_next(store, campaign_id)
    assert recorded.is_new
    assert store.reopen_failed(campaign_id) == 0


def test_what_was_given_up_in_a_closed_round_stays_so(store):
    campaign_id = campaign_with(store, [configuration()])
    for _ in range(3):
        measure_next(store, campaign_id, "error")
    store.close_round(campaign_id, 0, {})
    assert store.reopen_failed(campaign_id) == 0
    assert states(store, campaign_id) == [("failed", 3, 3)]


def test_a_heartbeat_keeps_a_lease(store):
    campaign_id = campaign_with(store, [configuration()])
    lease = store.lease(campaign_id, DEVICE, "w", 0)
    assert store.heartbeat(lease, 60)
    assert store.lease(campaign_id, DEVICE, "other", 60) is None
    assert not store.heartbeat(dataclasses.replace(lease, worker="other"), 60)
    assert not store.heartbeat(dataclasses.replace(lease, id="nope"), 60)


def test_a_heartbeat_keeps_no_lease_that_ended_even_if_the_same_worker_has_it_again(store):
    campaign_id = campaign_with(store, [configuration()])
    first = store.lease(campaign_id, DEVICE, "w", 60)
    store.give_up_lease(first.id, "silent")
    assert not store.heartbeat(first, 60)
    again = store.lease(campaign_id, DEVICE, "w", 0)
    assert (again.id, again.worker) == (first.id, first.worker)
    assert not store.heartbeat(first, 60)
    assert store.assignments(campaign_id)[0].lease_expires_at == again.lease_expires_at
    assert store.heartbeat(again, 60)
    store.record(measurement(attempt_key=again.attempt_key), assignment_id=again.id)
    assert not store.heartbeat(again, 60)


def test_a_lost_worker_gives_its_lease_back_with_the_reason(store):
    campaign_id = campaign_with(store, [configuration()])
    for failures in (1, 2, 3):
        lease = store.lease(campaign_id, DEVICE, "w", 60)
        store.give_up_lease(lease.id, f"died {failures}", max_attempts=3)
        store.give_up_lease(lease.id, "told twice", max_attempts=3)
    assert states(store, campaign_id) == [("failed", 3, 3)]
    assert store.lease(campaign_id, DEVICE, "w", 60) is None
    assert [e.message["message"] for e in store.events(campaign_id)] == [
        "died 1", "died 2", "died 3",
    ]  # fmt: skip
