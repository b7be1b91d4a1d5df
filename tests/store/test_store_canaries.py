"""Readings of the canary: kept once, read back whole, on both back ends."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from sqlalchemy import create_engine, inspect
from store_samples import campaign_with, configuration, measurement

import store.migrate
from profiler.errors import StoreError
from profiler.measuring.canary import CanaryPlan, read_canary
from store import Store
from store.upkeep import upgrade_store

PLAN = CanaryPlan(configuration=configuration(4))


def readings(steps_ms, history=(), **fields):
    """What the canary says when it takes so long; None stands for a run that died."""
    taken = list(history)
    for minute, step_ms in enumerate(steps_ms):
        outcome = "ok" if step_ms is not None else "error"
        found = measurement(
            PLAN.configuration, outcome, step_ms=step_ms or 1.0,
            started_at=f"2026-01-02T03:{minute:02d}:05.678901+00:00", **fields,
        )  # fmt: skip
        taken.append(read_canary(found, taken, PLAN))
    return taken[len(history) :]


def test_what_was_read_is_what_was_saved_with_its_reference_drift_and_decision(store):
    taken = readings([10, 10.2, 11, None, 13, 14])
    for reading in reversed(taken):
        assert store.save_canary(reading)
    found = store.canaries(device="cpu-2t")
    assert found == taken
    assert [r.decision for r in found] == ["ok", "ok", "drifting", "drifting", "stop", "stop"]
    assert found[-1].series == found[0].series


def test_an_attempt_key_is_kept_once(store):
    (first,) = readings([10])
    other = dataclasses.replace(first, step_time_ms=99.0)
    assert store.save_canary(first)
    assert not store.save_canary(other)
    assert store.canaries() == [first]


def test_readings_are_asked_for_by_device_and_by_campaign(store):
    campaign_id = campaign_with(store, [configuration()])
    (mine,), (other,) = readings([10], device="cpu-1t"), readings([10])
    store.save_canary(mine, campaign_id=campaign_id)
    store.save_canary(other)
    assert store.canaries(device="cpu-1t") == store.canaries(campaign_id=campaign_id) == [mine]
    assert set(store.canaries()) == {mine, other}
    with pytest.raises(StoreError):
        store.save_canary(readings([10])[0], campaign_id="none")


@pytest.mark.parametrize(
    "changes",
    [
        {"step_time_ms": -1.0},
        {"reference_ms": 0.0},
        {"outcome": "error"},
        {"decision": "drifting"},
        {"message": "why?"},
        {"decision": "perhaps"},
    ],
    ids=str,
)
def test_what_cannot_be_is_not_kept(store, changes):
    (reading,) = readings([10])
    with pytest.raises(StoreError):
        store.save_canary(dataclasses.replace(reading, **changes))
    assert store.canaries() == []


def test_a_store_of_before_keeps_its_labels_and_takes_readings(database_url, monkeypatch):
    older = tuple(itertools.takewhile(lambda name: name != "0006", store.migrate.REVISIONS))
    monkeypatch.setattr(store.migrate, "REVISIONS", older)
    with Store.open(database_url) as before:
        label_id = before.record(measurement()).label_id
    assert "canaries" not in _inspected(database_url, "get_table_names")
    monkeypatch.undo()
    upgrade_store(database_url)
    (reading,) = readings([10])
    with Store.open(database_url) as opened:
        opened.save_canary(reading)
        assert opened.canaries() == [reading]
        assert [label.id for label in opened.labels()] == [label_id]
    indices = [
        index["column_names"] for index in _inspected(database_url, "get_indexes", "canaries")
    ]
    assert ["device", "stack_fingerprint", "host", "taken_at"] in indices


def _inspected(url, what, *arguments):
    """Seen by a new connection: SQLite lists indices as it knew them when it opened the file."""
    engine = create_engine(url)
    try:
        return getattr(inspect(engine), what)(*arguments)
    finally:
        engine.dispose()
