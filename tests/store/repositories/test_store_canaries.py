"""Readings of the canary: kept once, read back whole, on both back ends."""

import dataclasses

from store_samples import ENVIRONMENT, campaign_with, configuration, measurement

from trappm.profiler.measuring.canary import CanaryPlan, read_canary
from trappm.store import measurements as store_measurements

PLAN = CanaryPlan(configuration=configuration(4))


def readings(steps_ms, **fields):
    """What the canary says when it takes so long; None stands for a run that died."""
    taken = []
    for minute, step_ms in enumerate(steps_ms):
        result = measurement(
            PLAN.configuration, "ok" if step_ms else "error", step_ms=step_ms or 1.0,
            started_at=f"2026-01-02T03:{minute:02d}:05.678901+00:00", **fields,
        )  # fmt: skip
        taken.append(read_canary(result, taken, PLAN))
    return taken


def test_canary_readings_are_stored_once_and_read_unchanged(store):
    taken = readings([10, 10.2, 11, None, 13, 14])
    for reading in reversed(taken):
        store.canaries.save(reading)
    store.canaries.save(dataclasses.replace(taken[0], step_time_ms=99.0))
    history = store.canaries.all(device="cpu-2t")
    assert history == taken
    assert [r.decision for r in history] == ["ok", "ok", "drifting", "drifting", "stop", "stop"]
    assert history[-1].series == history[0].series


def test_a_long_history_is_read_at_its_ends_only(store, monkeypatch):
    monkeypatch.setattr(store_measurements, "SERIES_END", 2)
    taken = readings([10, 10.1, 10.2, 10.3, 10.4, 10.5])
    other = readings([20], environment=ENVIRONMENT | {"host": "far"})
    for reading in [*taken, *other, *readings([30], device="cpu-1t")]:
        store.canaries.save(reading)
    kept = store.canaries.history("cpu-2t")
    assert [r for r in kept if r.host == taken[0].host] == [*taken[:2], *taken[-2:]]
    assert [r for r in kept if r.host != taken[0].host] == other


def test_canary_readings_are_filtered_by_device_and_campaign(store):
    campaign_id = campaign_with(store, [configuration()])
    (mine,), (other,) = readings([10], device="cpu-1t"), readings([10])
    store.canaries.save(mine, campaign_id=campaign_id)
    store.canaries.save(other)
    assert (
        store.canaries.all(device="cpu-1t") == store.canaries.all(campaign_id=campaign_id) == [mine]
    )
    assert set(store.canaries.all()) == {mine, other}
