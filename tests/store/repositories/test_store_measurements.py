"""What the store promises of measurements, and of the labels that they make."""

import dataclasses
import math

import pytest
from store_samples import (
    DEVICE,
    ENVIRONMENT,
    campaign_with,
    configuration,
    contents,
    lease_next,
    measure_next,
    measurement,
    planned,
    states,
)

from trappm.profiler.errors import StoreError
from trappm.store import LabelFilter
from trappm.store.records import MAX_LOSSES

ANY = LabelFilter(outcome="any")


def test_measurements_are_read_unchanged(store):
    whole = measurement(power_w=41.5, energy_j=0.5, missing={})
    step = dataclasses.replace(whole.step, forward_share=0.25, optimizer_share=0.125)
    for given in (dataclasses.replace(whole, step=step), measurement(outcome="oom")):
        store.measurements.record_many([given])
        assert [*store.measurements.each(ANY)][-1] == given


def test_a_successful_measurement_creates_a_label(store):
    campaign_id = campaign_with(store, [configuration()], role="evaluate")
    given = measure_next(store, campaign_id)
    (label,) = store.labels.of_campaign(campaign_id)
    assert store.measurements.get(label.measurement_id) == given
    assert (label.step_time_ms, label.memory_mib, label.power_w) == (12.5, 321.5, None)
    assert (label.role, label.provenance, label.protocol) == ("evaluate", "measured", "quick")
    assert label.configuration == given.configuration
    assert store.labels.find() == [dataclasses.replace(label, role=None)]
    assert store.campaigns.outcome_counts(campaign_id) == {DEVICE: {"ok": 1}}


def test_labels_of_a_campaign_are_in_planned_order(store):
    sizes = [8, 1, 64, 4]
    campaign_id = campaign_with(store, [configuration(b) for b in sizes])
    for outcome in ("unstable", *["ok"] * len(sizes)):
        measure_next(store, campaign_id, outcome)
    labels = store.labels.of_campaign(campaign_id)
    assert [label.configuration.batch_size for label in labels] == sizes


def test_the_first_label_of_a_stack_and_protocol_is_kept(store):
    other_stack = {**ENVIRONMENT, "torch": "2.14.0"}
    other_load = {**ENVIRONMENT, "load_average_before": 3.0, "host": "there"}
    for step_ms, fields in (
        (10.0, {}),
        (20.0, {}),
        (30.0, {"protocol": "paper"}),
        (40.0, {"environment": other_stack}),
        (50.0, {"environment": other_load}),
    ):
        store.measurements.record_many([measurement(step_ms=step_ms, **fields)])
    assert [x.step_time_ms for x in store.labels.find()] == [10.0, 30.0, 40.0]


def test_invalid_metrics_are_stored_as_missing_with_the_reason(store):
    values = (0.0, -3.5, math.inf, math.nan)
    for batch_size, value in enumerate(values, 1):
        given = measurement(configuration(batch_size), memory_mib=value)
        store.measurements.record_many([given])
    for value, kept in zip(values, store.measurements.each(ANY), strict=True):
        assert kept.memory_mib is None
        assert kept.missing["memory_mib"] == f"measured as {value}, which is impossible"
    labels = store.labels.find()
    assert [(x.step_time_ms, x.memory_mib) for x in labels] == [(12.5, None)] * len(values)


def test_measurements_of_something_else_settle_no_assignment(store, database_url):
    campaign_id = campaign_with(store, [configuration(1)])
    lease = lease_next(store, campaign_id)
    before = contents(database_url)
    for wrong in (measurement(configuration(2)), measurement(device="a100")):
        with pytest.raises(StoreError, match="something else"):
            store.measurements.record([(wrong, lease.id)])
    with pytest.raises(StoreError, match="no assignment 'nope'"):
        store.measurements.record([(measurement(), "nope")])
    assert contents(database_url) == before


CAPACITY = {"capacity": 40_536.0, "last_allocation": 512.0}


def test_out_of_memory_creates_a_label_with_the_capacity_as_bound(store):
    campaign_id = campaign_with(store, [configuration()])
    given = measure_next(store, campaign_id, "oom", memory_detail_mib=CAPACITY)
    (label,) = store.labels.of_campaign(campaign_id)
    assert store.measurements.get(label.measurement_id) == given
    assert (label.memory_mib, label.memory_above_mib) == (None, 40_536.0)
    assert label.step_time_ms is label.power_w is label.energy_j is None
    assert states(store, campaign_id) == [("done", 1, 0)]


def test_out_of_memory_without_capacity_creates_no_label(store):
    for outcome, detail in (("oom", {}), ("oom", {"capacity": -1.0}), ("error", CAPACITY)):
        store.measurements.record_many([measurement(outcome=outcome, memory_detail_mib=detail)])
    assert store.labels.find() == []


def oom(provenance="measured"):
    return measurement(outcome="oom", memory_detail_mib=CAPACITY, provenance=provenance)


def ok(provenance="measured"):
    return measurement(provenance=provenance)


REPLACEMENTS = [
    (oom(), ok(), True),
    (oom("imported"), ok(), True),
    (ok("imported"), oom(), True),
    (oom(), ok("imported"), False),
    (ok("imported"), ok("simulated"), False),
    (ok(), oom(), False),
    (ok(), ok(), False),
]
"""Two measurements of the same, and whether the label of the second replaces that of the first."""


def test_labels_are_replaced_only_by_more_valuable_ones(store):
    for batch_size, (*pair, is_replaced) in enumerate(REPLACEMENTS, 1):
        what = configuration(batch_size)
        first, then = (
            dataclasses.replace(given, configuration=what, attempt_key=f"{order} {batch_size}")
            for order, given in enumerate(pair)
        )
        for given in (first, then, then):
            store.measurements.record_many([given])
        (label,) = store.labels.find(LabelFilter(batch_size=batch_size))
        kept = then if is_replaced else first
        assert store.measurements.get(label.measurement_id) == kept
        assert (label.provenance, label.memory_mib) == (kept.provenance, kept.memory_mib)
        assert label.memory_above_mib == (40_536.0 if kept.outcome == "oom" else None)


def test_many_measurements_are_recorded_in_batches_and_once(store, database_url, monkeypatch):
    monkeypatch.setattr("trappm.store.measurements.BATCH", 4)
    given = [
        measurement(configuration(1), "oom", memory_detail_mib=CAPACITY),
        measurement(configuration(1), power_w=31.5),
        measurement(configuration(1), step_ms=99.0),
        measurement(configuration(2), environment={"torch": "1"}),
        measurement(configuration(2), "error"),
        measurement(configuration(3), device="a100"),
    ]
    assert store.measurements.record_many(iter(given)) == len(given)
    kept = {m.attempt_key: m for m in store.measurements.each(ANY)}
    assert [kept[m.attempt_key] for m in given] == given
    assert len(store.labels.find()) == 3
    before = contents(database_url)
    assert store.measurements.record_many(given) == 0
    assert contents(database_url) == before


def test_a_batch_with_an_invalid_measurement_is_rejected_whole(store, monkeypatch):
    monkeypatch.setattr("trappm.store.measurements.BATCH", 2)
    good = [measurement(configuration(b)) for b in (1, 2, 3, 4)]
    bad = measurement(configuration(9), step_ms=-1.0)
    with pytest.raises(StoreError, match="cannot be"):
        store.measurements.record_many([*good[:3], bad, good[3]])
    assert [x.configuration.batch_size for x in store.labels.find()] == [1, 2]
    assert store.measurements.record_many(good) == 2
    assert [x.configuration.batch_size for x in store.labels.find()] == [1, 2, 3, 4]


def test_an_attempt_key_belongs_to_one_measurement(store):
    campaign_id = campaign_with(store, [configuration(1), configuration(10)])
    lease, other_lease = (lease_next(store, campaign_id) for _ in range(2))
    first = measurement(lease.configuration, "error", attempt_key="same")
    store.measurements.record([(first, lease.id)])
    for other, of_lease in (
        (measurement(other_lease.configuration, attempt_key="same"), other_lease),
        (measurement(lease.configuration, step_ms=3.0, attempt_key="same"), lease),
    ):
        with pytest.raises(StoreError, match="'same' was recorded before, of another"):
            store.measurements.record([(other, of_lease.id)])
    store.measurements.record([(first, lease.id)])


def test_values_that_one_database_cannot_store_are_refused_by_both(store):
    """SQLite takes most of it, and could then never be restored into PostgreSQL."""
    for fields in (
        {"environment": {"device": "cpu-2t", "host": "a\0b"}},
        {"attempt_key": "k" * 65},
        {"outcome": "error", "failed_in": "somewhere in the end"},
        {"outcome": "error", "message": "\ud800"},
        {"step_samples_ms": (1e39,)},
        {"step": None, "memory_mib": 0.0},
        {"step_ms": -1.0},
        {"step_ms": math.nan},
    ):
        with pytest.raises(StoreError, match="cannot be stored: "):
            store.measurements.record_many([measurement(**fields)])
    assert store.labels.query(ANY).empty


def test_a_fault_of_the_worker_is_a_loss_and_no_failure_of_the_step(store):
    campaign_id = campaign_with(store, [configuration()])
    for count in range(1, MAX_LOSSES + 1):
        measure_next(store, campaign_id, "error", failed_in="worker")
        (after,) = store.assignments.of_campaign(campaign_id)
        assert (after.failures, after.losses) == (0, count)
        assert after.state == ("failed" if count == MAX_LOSSES else "open")
    assert store.campaigns.outcome_counts(campaign_id) == {DEVICE: {"error": MAX_LOSSES}}
    store.rounds.plan(campaign_id, 1, "acquired", DEVICE, planned([configuration()]))
    (again,) = store.assignments.of_campaign(campaign_id)
    assert (again.state, again.failures, again.losses) == ("open", 0, 0)


def test_a_late_failure_does_not_take_the_lease_of_another_worker(store):
    campaign_id = campaign_with(store, [configuration()])
    slow = lease_next(store, campaign_id, "slow")
    store.assignments.release_leases(campaign_id)
    lease_next(store, campaign_id, "fast")
    late = measurement(slow.configuration, "error", attempt_key=slow.attempt_key)
    store.measurements.record([(late, slow.id)])
    (after,) = store.assignments.of_campaign(campaign_id)
    assert (after.state, after.worker, after.failures) == ("leased", "fast", 0)
