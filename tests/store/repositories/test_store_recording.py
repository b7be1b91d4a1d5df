"""Which measurement makes a label, which label gives way, and recording many at once."""

from __future__ import annotations

import dataclasses

import pytest
from store_samples import campaign_with, configuration, contents, measure_next, measurement, states

import trappm.store.measurements as store_recording
from trappm.profiler.errors import StoreError
from trappm.store import LabelFilter

# Censored labels.

CAPACITY = {"capacity": 40_536.0, "last_allocation": 512.0}


def test_running_out_of_memory_makes_a_label_with_the_capacity_as_bound(store):
    campaign_id = campaign_with(store, [configuration()])
    _, recorded = measure_next(store, campaign_id, "oom", memory_detail_mib=CAPACITY)
    (label,) = store.labels.of_campaign(campaign_id)
    assert (label.id, label.measurement_id) == (recorded.label_id, recorded.measurement_id)
    assert (label.memory_mib, label.memory_above_mib) == (None, 40_536.0)
    assert label.step_time_ms is label.power_w is label.energy_j is None
    assert states(store, campaign_id) == [("done", 1, 0)]


@pytest.mark.parametrize(
    ("outcome", "detail"),
    [
        ("oom", {}),
        ("oom", {"capacity": 0.0}),
        ("oom", {"capacity": -1.0}),
        ("error", CAPACITY),
        ("timeout", CAPACITY),
        ("unstable", CAPACITY),
        ("unsupported", CAPACITY),
    ],
)
def test_without_a_bound_there_is_no_label(store, outcome, detail):
    assert (
        store.measurements.record(measurement(outcome=outcome, memory_detail_mib=detail)).label_id
        is None
    )
    assert store.labels.matching() == []


def oom(provenance="measured"):
    return measurement(outcome="oom", memory_detail_mib=CAPACITY, provenance=provenance)


def ok(provenance="measured"):
    return measurement(provenance=provenance)


@pytest.mark.parametrize(
    ("first", "then", "replaced"),
    [
        (oom(), ok(), True),
        (oom("imported"), ok("imported"), True),
        (oom("imported"), ok(), True),
        (oom("imported"), oom(), True),
        (ok("imported"), oom(), True),
        (ok("imported"), ok(), True),
        (ok("simulated"), ok(), True),
        (oom(), ok("imported"), False),
        (oom(), ok("simulated"), False),
        (oom("imported"), ok("simulated"), False),
        (ok("imported"), ok("simulated"), False),
        (ok(), oom(), False),
        (ok(), ok(), False),
        (ok(), ok("imported"), False),
        (ok("imported"), oom("imported"), False),
        (oom(), oom(), False),
    ],
)
def test_a_label_gives_way_to_what_is_worth_more_only(store, first, then, replaced):
    first, then = (dataclasses.replace(m, attempt_key=k) for m, k in [(first, "a"), (then, "b")])
    recorded = [store.measurements.record(first), store.measurements.record(then)]
    (label,) = store.labels.matching()
    assert [r.label_id for r in recorded] == [label.id, label.id]
    kept = then if replaced else first
    assert label.measurement_id == recorded[replaced].measurement_id
    assert (label.provenance, label.memory_mib) == (kept.provenance, kept.memory_mib)
    assert label.memory_above_mib == (40_536.0 if kept.outcome == "oom" else None)
    assert store.measurements.record(then) == recorded[1]


def test_the_shares_of_a_step_come_back(store):
    step = dataclasses.replace(ok().step, forward_share=0.25, optimizer_share=0.125)
    recorded = store.measurements.record(dataclasses.replace(ok(), step=step))
    assert store.measurements.get(recorded.measurement_id).step == step


# Many at once.


def test_many_are_recorded_as_one_after_the_other(store, database_url, monkeypatch):
    monkeypatch.setattr(store_recording, "BATCH", 4)
    given = [
        measurement(configuration(1), "oom", memory_detail_mib=CAPACITY),
        measurement(configuration(1), power_w=31.5),
        measurement(configuration(1), step_ms=99.0),
        measurement(configuration(2), environment={"torch": "1"}),
        measurement(configuration(2), "error"),
        measurement(configuration(3), memory_mib=0.0),
        measurement(configuration(3), device="a100"),
    ]
    assert store.measurements.record_many(iter(given)) == len(given)
    kept = {m.attempt_key: m for m in map(store.measurements.get, range(1, len(given) + 1))}
    assert (
        kept[given[5].attempt_key].missing["memory_mib"] == "measured as 0.0, which is impossible"
    )
    assert [kept[m.attempt_key] for m in given[:5]] == given[:5]
    many = [dataclasses.replace(x, id=0, created_at="") for x in store.labels.matching()]
    assert len(many) == 4
    before = contents(database_url)
    assert store.measurements.record_many(given) == 0
    for again in given:
        store.measurements.record(again)
    assert contents(database_url) == before


def test_a_batch_with_one_that_cannot_be_is_not_kept_at_all(store, monkeypatch):
    monkeypatch.setattr(store_recording, "BATCH", 2)
    good = [measurement(configuration(b)) for b in (1, 2, 3, 4)]
    bad = measurement(configuration(9), step_ms=-1.0)
    with pytest.raises(StoreError, match="cannot be"):
        store.measurements.record_many([*good[:3], bad, good[3]])
    assert [x.configuration.batch_size for x in store.labels.matching()] == [1, 2]
    assert store.measurements.record_many(good) == 2
    assert [x.configuration.batch_size for x in store.labels.matching()] == [1, 2, 3, 4]


def test_an_attempt_key_is_of_one_measurement(store):
    first = measurement(outcome="error", attempt_key="same")
    store.measurements.record(first)
    for other in (
        measurement(configuration(10), attempt_key="same"),
        measurement(step_ms=3.0, attempt_key="same"),
    ):
        with pytest.raises(StoreError, match="'same' was recorded before, of another"):
            store.measurements.record(other)
    store.measurements.record(first)


@pytest.mark.parametrize(
    "fields",
    [
        {"environment": {"device": "cpu-2t", "host": "a\0b"}},
        {"attempt_key": "k" * 65},
        {"device": "d" * 65},
        {"outcome": "error", "failed_in": "somewhere in the end"},
        {"outcome": "error", "message": "\ud800"},
        {"step_samples_ms": (1e39,)},
        {"step_samples_ms": (1e-46,)},
        {"step": None, "memory_mib": 0.0},
    ],
)
def test_what_one_back_end_cannot_keep_neither_does(store, fields):
    """SQLite takes most of it, and could then never be restored into PostgreSQL."""
    with pytest.raises(StoreError, match="cannot be stored: "):
        store.measurements.record(measurement(**fields))
    assert store.labels.query(LabelFilter(outcome="any")).empty
