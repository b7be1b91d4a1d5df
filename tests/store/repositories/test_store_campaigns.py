"""What the store promises of campaigns, rounds, labels that they take over, and snapshots."""

import math

import pytest
from store_samples import (
    DEVICE,
    ENVIRONMENT,
    campaign_with,
    configuration,
    measure_next,
    measurement,
    planned,
    states,
)

from trappm.profiler.errors import CampaignError, InputError, StoreError
from trappm.profiler.records import Precision
from trappm.store import LabelFilter


def test_campaigns_keep_their_spec_and_the_latest_comes_first(store):
    first = store.campaigns.create("one", {"pool": [1, 2], "at": None}, 2**31)
    second = store.campaigns.create("two", {}, 1)
    assert store.campaigns.get(first.id) == first
    assert (first.state, first.finished_at) == ("paused", None)
    assert first.spec == {"pool": [1, 2], "at": None}
    assert [c.id for c in store.campaigns.all()] == [second.id, first.id]
    assert store.campaigns.get().id == second.id


def test_unknown_campaigns_are_reported(store):
    with pytest.raises(InputError, match="no campaign yet"):
        store.campaigns.get()
    known = store.campaigns.create("one", {}, 0).id
    with pytest.raises(InputError, match=f"no campaign 'nope'; there are: {known}"):
        store.campaigns.get("nope")
    with pytest.raises(CampaignError, match="nope"):
        store.owners.begin_campaign("nope")
    with pytest.raises(StoreError):
        store.campaigns.log_event("nope", "note", {})


def test_a_pool_cannot_be_changed(store):
    campaign_id = store.campaigns.create("one", {}, 0).id
    pool = [(configuration(2), True), (configuration(1, precision=Precision.AMP_BF16), False)]
    store.campaigns.set_pool(campaign_id, pool)
    store.campaigns.set_pool(campaign_id, pool)
    assert store.campaigns.pool(campaign_id) == sorted(pool)
    with pytest.raises(CampaignError, match="2 configurations already"):
        store.campaigns.set_pool(campaign_id, pool[:1])
    assert store.campaigns.pool(campaign_id) == sorted(pool)


def test_rounds_are_planned_once_per_device(store):
    campaign_id = campaign_with(store, [configuration(1), configuration(2)])
    for _ in "twice":
        other = planned([configuration(2)], device="a100")
        store.rounds.plan(campaign_id, 0, "initial", other)
    assignments = [
        (a.device, a.configuration.batch_size) for a in store.assignments.of_campaign(campaign_id)
    ]
    assert sorted(assignments) == [("a100", 2), (DEVICE, 1), (DEVICE, 2)]
    (late,) = store.assignments.of_campaign(campaign_id, device="a100", round_number=0)
    assert late.state == "open"
    assert store.assignments.of_campaign(campaign_id, round_number=1) == []


def test_leases_are_all_or_none_and_a_repeated_call_changes_nothing(store):
    campaign_id = campaign_with(store, [configuration(b) for b in (1, 2)])
    first, second = store.assignments.of_campaign(campaign_id)
    (lease,) = store.assignments.lease([(first.id, "w")])
    result = (measurement(configuration(1), attempt_key=lease.attempt_key), first.id)
    with pytest.raises(StoreError, match="no assignment"):
        store.assignments.lease([(second.id, "w"), ("nothing", "w")])
    assert states(store, campaign_id) == [("leased", 1, 0), ("open", 0, 0)]
    for _ in "twice":  # asked again, after an answer was lost
        store.measurements.record([result])
        (lease,) = store.assignments.lease([(second.id, "w")])
        assert states(store, campaign_id) == [("done", 1, 0), ("leased", 1, 0)]
    (label,) = store.labels.of_campaign(campaign_id)
    assert label.configuration == configuration(1)
    bad = (measurement(configuration(2), "error", attempt_key=lease.attempt_key), second.id)
    store.measurements.record([bad])
    (again,) = store.assignments.lease([(second.id, "other")])  # tried again at once
    assert (again.attempts, again.failures, again.worker) == (2, 1, "other")


@pytest.mark.parametrize(
    "wrong", [[configuration(1), configuration(99)], [configuration(3), configuration(1)]]
)
def test_an_invalid_round_is_not_planned_in_part(store, wrong):
    campaign_id = store.campaigns.create("one", {}, 0).id
    store.campaigns.set_pool(campaign_id, [(configuration(b), False) for b in (1, 2, 3)])
    store.rounds.plan(campaign_id, 0, "initial", planned([configuration(1)]))
    with pytest.raises(StoreError):  # one is not in the pool; one was planned before
        store.rounds.plan(campaign_id, 1, "acquired", planned(wrong))
    assert [r.number for r in store.rounds.all(campaign_id)] == [0]
    assert len(store.assignments.of_campaign(campaign_id)) == 1


def test_a_closed_round_keeps_its_first_report(store):
    campaign_id = campaign_with(store, [configuration()])
    with pytest.raises(StoreError, match="JSON compliant"):
        store.rounds.close(campaign_id, 0, {"mape": math.nan})
    assert not store.rounds.all(campaign_id)[0].is_closed
    store.rounds.close(campaign_id, 0, {"mape": 12.5, "power": None})
    store.rounds.close(campaign_id, 0, {"mape": 99})
    (record,) = store.rounds.all(campaign_id)
    assert (record.is_closed, record.report) == (True, {"mape": 12.5, "power": None})
    with pytest.raises(CampaignError, match="no round 5"):
        store.rounds.close(campaign_id, 5, {})


def test_labels_of_an_earlier_campaign_are_adopted(store):
    first = campaign_with(store, [configuration(1), configuration(2)])
    measure_next(store, first)
    measure_next(store, first, "oom")
    fingerprint = store.labels.matching()[0].fingerprint
    second = campaign_with(store, [configuration(2), configuration(1), configuration(4)])
    for _ in range(2):
        store.assignments.adopt_labels(second, DEVICE, fingerprint, "quick")
    assert store.labels.of_campaign(second) == store.labels.of_campaign(first)
    assert [state for state, _, _ in states(store, second)] == ["open", "done", "open"]
    assert store.campaigns.outcome_counts(second) == {}


@pytest.mark.parametrize(
    "other",
    [
        {"protocol": "paper"},
        {"device": "cpu-1t"},
        {"provenance": "simulated"},
        {"environment": {**ENVIRONMENT, "torch": "1"}},
    ],
)
def test_labels_of_other_conditions_are_not_adopted(store, other):
    store.measurements.record_many([measurement(configuration(1), **other)])
    store.measurements.record_many([measurement(configuration(9))])
    (usual,) = store.labels.matching(LabelFilter(batch_size=9))
    campaign_id = campaign_with(store, [configuration(1)])
    store.assignments.adopt_labels(campaign_id, DEVICE, usual.fingerprint, "quick")
    assert states(store, campaign_id) == [("open", 0, 0)]


def test_assignments_that_failed_in_a_closed_round_stay_failed(store):
    campaign_id = campaign_with(store, [configuration()])
    for _ in range(3):
        measure_next(store, campaign_id, "error")
    store.rounds.close(campaign_id, 0, {})
    store.assignments.reopen_failed(campaign_id)
    assert states(store, campaign_id) == [("failed", 3, 3)]
