"""What the store promises of campaigns, rounds, labels that they take over, and snapshots."""

from __future__ import annotations

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

from trappm.profiler.errors import CampaignError, InputError, SnapshotError, StoreError
from trappm.profiler.records import Precision
from trappm.store import LabelFilter


def test_a_campaign_is_kept_with_its_spec_and_the_latest_comes_first(store):
    first = store.create_campaign("one", {"pool": [1, 2], "at": None}, 2**31)
    second = store.create_campaign("two", {}, 1)
    assert store.campaign(first.id) == first
    assert (first.state, first.finished_at) == ("paused", None)
    assert first.spec == {"pool": [1, 2], "at": None}
    assert [c.id for c in store.campaigns()] == [second.id, first.id]
    assert store.campaign().id == second.id


def test_a_campaign_that_is_not_there_is_said_so(store):
    with pytest.raises(InputError, match="no campaign yet"):
        store.campaign()
    known = store.create_campaign("one", {}, 0).id
    with pytest.raises(InputError, match=f"no campaign 'nope'; there are: {known}"):
        store.campaign("nope")
    with pytest.raises(CampaignError, match="nope"):
        store.begin_campaign("nope")
    with pytest.raises(StoreError):
        store.log_event("nope", "note", {})


def test_a_pool_is_set_once(store):
    campaign_id = store.create_campaign("one", {}, 0).id
    pool = [(configuration(2), True), (configuration(1, precision=Precision.AMP_BF16), False)]
    store.set_campaign_pool(campaign_id, pool)
    store.set_campaign_pool(campaign_id, pool)
    assert store.campaign_pool(campaign_id) == sorted(pool)
    with pytest.raises(CampaignError, match="2 configurations already"):
        store.set_campaign_pool(campaign_id, pool[:1])
    assert store.campaign_pool(campaign_id) == sorted(pool)


def test_two_campaigns_share_configurations_and_nothing_else(store):
    one, two = (campaign_with(store, [configuration(1), configuration(2)]) for _ in "ab")
    measure_next(store, one)
    assert [state for state, _, _ in states(store, one)] == ["done", "open"]
    assert [state for state, _, _ in states(store, two)] == ["open", "open"]
    assert store.campaign_labels(two) == []


def test_a_round_is_planned_once(store):
    campaign_id = campaign_with(store, [configuration(1), configuration(2)])
    before = store.assignments(campaign_id)
    store.plan_round(campaign_id, 0, "initial", planned([configuration(2)]))
    assert store.assignments(campaign_id) == before
    assert before[0].reason == {"score": 0.5}
    assert [r.purpose for r in store.rounds(campaign_id)] == ["initial"]


def test_each_device_has_its_part_of_a_round_planned_by_itself(store):
    campaign_id = campaign_with(store, [configuration(1), configuration(2)])
    for _ in "twice":
        other = planned([configuration(2)], device="a100")
        store.plan_round(campaign_id, 0, "initial", other)
    found = [(a.device, a.configuration.batch_size) for a in store.assignments(campaign_id)]
    assert sorted(found) == [("a100", 2), (DEVICE, 1), (DEVICE, 2)]
    (late,) = store.assignments(campaign_id, device="a100", round_number=0)
    assert late.state == "open"
    assert store.assignments(campaign_id, round_number=1) == []


def test_named_assignments_are_leased_together_or_not_at_all(store):
    campaign_id = campaign_with(store, [configuration(b) for b in (1, 2, 3)])
    first, second, third = store.assignments(campaign_id)
    wanted = [(third.id, "two"), (first.id, "one")]
    leases = store.record_and_lease([], wanted)
    assert [(a.id, a.worker, a.attempts) for a in leases] == [(i, w, 1) for i, w in wanted]
    assert (
        store.record_and_lease([], wanted)[0].attempts == 1
    )  # asked again, after an answer was lost
    for impossible in ((first.id, "other"), ("nothing", "other")):
        with pytest.raises(StoreError):
            store.record_and_lease([], [(second.id, "other"), impossible])
    states = {a.id: a.state for a in store.assignments(campaign_id)}
    assert states == {first.id: "leased", second.id: "open", third.id: "leased"}
    store.record(measurement(configuration(3), attempt_key=leases[0].attempt_key),
                 assignment_id=third.id)  # fmt: skip
    with pytest.raises(StoreError, match="done"):
        store.record_and_lease([], [(third.id, "two")])


def test_a_turn_of_a_campaign_is_recorded_and_leased_as_one(store):
    campaign_id = campaign_with(store, [configuration(b) for b in (1, 2)])
    first, second = store.assignments(campaign_id)
    (lease,) = store.record_and_lease([], [(first.id, "w")])
    result = (measurement(configuration(1), attempt_key=lease.attempt_key), first.id)
    with pytest.raises(StoreError, match="no assignment"):
        store.record_and_lease([result], [("nothing", "w")])
    assert states(store, campaign_id) == [("leased", 1, 0), ("open", 0, 0)]
    for _ in "twice":  # asked again, after an answer was lost
        (lease,) = store.record_and_lease([result], [(second.id, "w")])
        assert states(store, campaign_id) == [("done", 1, 0), ("leased", 1, 0)]
    assert [label.configuration for label in store.campaign_labels(campaign_id)] == [
        configuration(1)
    ]
    bad = (measurement(configuration(2), "error", attempt_key=lease.attempt_key), second.id)
    (again,) = store.record_and_lease([bad], [(second.id, "other")])  # and tried again at once
    assert (again.attempts, again.failures, again.worker) == (2, 1, "other")


@pytest.mark.parametrize(
    "wrong", [[configuration(1), configuration(99)], [configuration(3), configuration(1)]]
)
def test_a_round_that_cannot_be_is_not_planned_in_part(store, wrong):
    campaign_id = store.create_campaign("one", {}, 0).id
    store.set_campaign_pool(campaign_id, [(configuration(b), False) for b in (1, 2, 3)])
    store.plan_round(campaign_id, 0, "initial", planned([configuration(1)]))
    with pytest.raises(StoreError):  # one is not in the pool; one was planned before
        store.plan_round(campaign_id, 1, "acquired", planned(wrong))
    assert [r.number for r in store.rounds(campaign_id)] == [0]
    assert len(store.assignments(campaign_id)) == 1


def test_a_closed_round_keeps_its_first_report(store):
    campaign_id = campaign_with(store, [configuration()])
    store.close_round(campaign_id, 0, {"mape": 12.5, "power": None})
    store.close_round(campaign_id, 0, {"mape": 99})
    (record,) = store.rounds(campaign_id)
    assert (record.state, record.report) == ("closed", {"mape": 12.5, "power": None})
    with pytest.raises(CampaignError, match="no round 5"):
        store.close_round(campaign_id, 5, {})


def test_a_report_that_is_no_json_is_refused_and_the_round_stays_open(store):
    campaign_id = campaign_with(store, [configuration()])
    with pytest.raises(StoreError, match="JSON compliant"):
        store.close_round(campaign_id, 0, {"mape": math.nan})
    assert store.rounds(campaign_id)[0].state == "open"


def test_events_come_back_in_order(store):
    campaign_id = store.create_campaign("one", {}, 0).id
    store.log_event(campaign_id, "paused", {"message": "stopped"})
    store.log_event(campaign_id, "running", {})
    events = store.events(campaign_id)
    assert [(e.kind, e.message) for e in events] == [
        ("paused", {"message": "stopped"}), ("running", {}),
    ]  # fmt: skip
    assert events[0].at <= events[1].at


def test_labels_of_an_earlier_campaign_are_adopted(store):
    one = campaign_with(store, [configuration(1), configuration(2)])
    measure_next(store, one)
    measure_next(store, one, "oom")
    fingerprint = store.labels()[0].fingerprint
    two = campaign_with(store, [configuration(2), configuration(1), configuration(4)])
    assert store.adopt_labels(two, DEVICE, fingerprint, "quick") == 1
    assert store.adopt_labels(two, DEVICE, fingerprint, "quick") == 0
    assert store.campaign_labels(two) == store.campaign_labels(one)
    assert [state for state, _, _ in states(store, two)] == ["open", "done", "open"]
    assert store.outcome_counts(two) == {}


@pytest.mark.parametrize(
    "other",
    [
        {"protocol": "paper"},
        {"device": "cpu-1t"},
        {"provenance": "simulated"},
        {"environment": {**ENVIRONMENT, "torch": "1"}},
    ],
)
def test_what_is_not_the_same_is_not_adopted(store, other):
    store.record(measurement(configuration(1), **other))
    store.record(measurement(configuration(9)))
    (usual,) = store.labels(LabelFilter(batch_size=9))
    campaign_id = campaign_with(store, [configuration(1)])
    assert store.adopt_labels(campaign_id, DEVICE, usual.fingerprint, "quick") == 0


def test_snapshots_are_found_by_id_and_by_alias(store):
    campaign_id = store.create_campaign("one", {}, 0).id
    for name in ("s1", "s2"):
        store.register_snapshot(
            name, campaign_id=campaign_id, location=f"folder-{name}", manifest={"heads": {}}
        )
    store.set_alias("latest", "s1")
    assert store.snapshot("latest").id == "s1"
    store.set_alias("latest", "s2")
    assert store.snapshot("latest") == store.snapshot("s2")
    assert store.snapshot("s2").location == "folder-s2"
    assert store.aliases() == {"latest": "s2"}
    assert [s.id for s in store.snapshots()] == ["s2", "s1"]
    assert store.snapshot("nope") is None


def test_a_snapshot_never_changes_and_names_never_clash(store):
    given = {"campaign_id": None, "location": "here", "manifest": {"a": 1}}
    store.register_snapshot("s1", **given)
    store.register_snapshot("s1", **given)
    with pytest.raises(SnapshotError, match="never changes"):
        store.register_snapshot("s1", **{**given, "manifest": {"a": 2}})
    with pytest.raises(SnapshotError, match="no snapshot 'nope'"):
        store.set_alias("latest", "nope")
    with pytest.raises(SnapshotError, match="can be no alias"):
        store.set_alias("s1", "s1")
    store.set_alias("latest", "s1")
    with pytest.raises(SnapshotError, match="is an alias"):
        store.register_snapshot("latest", **given)
    assert store.snapshot("s1").manifest == {"a": 1}
