"""The canary's decisions over invented and over real sequences of readings."""

import dataclasses

import pytest

from trappm.profiler.measuring.canary import (
    CanaryDecision,
    CanaryPlan,
    CanaryWatch,
    read_canary,
)
from trappm.profiler.records import Measurement, Outcome, Protocol
from trappm.profiler.steps.sampling import summarize

OK, DRIFTING, STOP = CanaryDecision
PLAN = CanaryPlan(drifting_relative=0.05, stop_relative=0.15, reference_readings=3)
BIRD = PLAN.reference_on("cpu-1t")


def measured(step_time_ms, outcome=Outcome.OK, **environment):
    return Measurement(
        configuration=BIRD,
        device="cpu-1t",
        outcome=outcome,
        protocol=Protocol(),
        started_at="2026-11-21T12:00:00+00:00",
        duration_s=1.0,
        step=None if step_time_ms is None else summarize((step_time_ms,)),
        step_samples_ms=() if step_time_ms is None else (step_time_ms,),
        memory_mib=80.0,
        message=None if outcome is Outcome.OK else "broken",
        environment={"host": "node-1", "torch": "2.13", **environment},
    )


def read_all(measurements):
    readings = []
    for measurement in measurements:
        readings.append(read_canary(measurement, readings, PLAN))
    return readings


@pytest.mark.parametrize(
    ("times_ms", "expected"),
    [
        ([100, 104, 98, 103], [OK] * 4),
        ([100, 100, 100, 107], [OK, OK, OK, DRIFTING]),
        ([100, 100, 100, 120, 121], [OK, OK, OK, DRIFTING, STOP]),
        ([100, 100, 100, 80, 80], [OK, OK, OK, DRIFTING, STOP]),  # faster is no better
        ([100, 100, 100, 120, 110, 120], [OK, OK, OK, DRIFTING, DRIFTING, DRIFTING]),
        ([100, 120, 120, 120], [OK, DRIFTING, DRIFTING, OK]),  # the first was the odd one
        # What stopped a node never becomes its reference, however early it was.
        ([100, 200, 200, 200, 200, 101], [OK, DRIFTING, STOP, STOP, STOP, OK]),
        # Slow creep is seen against the first readings, not against the latest ones.
        ([100, 101, 102, 106, 110, 114, 118, 122], [OK] * 3 + [OK] + [DRIFTING] * 3 + [STOP]),
    ],
)
def test_decisions(times_ms, expected):
    assert [r.decision for r in read_all(map(measured, times_ms))] == expected


def test_only_readings_of_one_stack_and_gpu_are_compared():
    before = read_all([measured(100)] * 3)
    assert read_canary(measured(300, torch="2.14"), before, PLAN).reference_ms is None
    assert read_canary(measured(300, host="node-2"), before, PLAN).decision is OK
    assert read_canary(measured(300), before, PLAN).decision is DRIFTING
    before = read_all([measured(100, device_uuid="GPU-a")] * 3)
    assert read_canary(measured(130, device_uuid="GPU-b"), before, PLAN).decision is OK
    assert read_canary(measured(130, device_uuid="GPU-a"), before, PLAN).decision is DRIFTING


def test_failures_stop_but_a_busy_host_does_not():
    steady = [measured(100)] * 3
    failed = read_all([*steady, measured(None, Outcome.ERROR), measured(None, Outcome.TIMEOUT)])
    assert [r.decision for r in failed[3:]] == [DRIFTING, STOP]
    assert "timeout" in (failed[-1].message or "")
    busy = read_all([*steady, *[measured(300, Outcome.UNSTABLE)] * 4, measured(101)])
    assert [r.decision for r in busy[3:]] == [DRIFTING] * 4 + [OK]
    assert busy[3].step_time_ms is None  # an unstable run is no reading of the time
    assert read_all([*steady, measured(300), measured(None, Outcome.OOM)])[-1].decision is STOP


def test_history_counts_but_a_new_process_looks_for_itself():
    watch = CanaryWatch(PLAN, history=read_all([measured(100)] * 3))
    assert watch.is_due()
    assert [watch.take(measured(130)).decision for _ in range(2)] == [DRIFTING, STOP]


def checks(times_ms, plan, ticks_s):
    """`r` where a reading was taken and `m` where it was a measurement's turn."""
    taken, marks, now = iter(times_ms), "", 0.0
    watch = CanaryWatch(plan, clock=lambda: now)
    for tick_s in ticks_s:
        while watch.is_due():
            watch.take(measured(next(taken)))
            marks += "r"
        watch.count_measurement()
        marks += "m"
        now += tick_s
    return marks


def test_readings_are_due_by_count_by_time_and_in_doubt():
    by_count = dataclasses.replace(PLAN, every_measurements=3)
    assert checks([100] * 9, by_count, [1] * 8) == "rmmmrmmmrmm"
    assert checks([100] * 9, dataclasses.replace(PLAN, every_measurements=1), [1] * 3) == "rmrmrm"
    by_time = dataclasses.replace(PLAN, every_s=10)
    assert checks([100] * 9, by_time, [1, 11, 1, 10, 1]) == "rmmrmmrm"
    # Doubt is settled at once; drift that is known and mild waits for its turn.
    assert checks([100, 120, 100, 100], by_count, [1] * 7) == "rmmmrrmmmrm"
    assert checks([100, 108, 108, 108, 108], by_count, [1] * 7) == "rmmmrrmmmrm"
