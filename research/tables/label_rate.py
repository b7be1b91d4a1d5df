"""Labels per hour of a sweep, replayed with other rules on its samples and seconds.

A measurement takes the seconds that it took, but its step times end where the rules of a variant
end. What a variant leaves out takes no time. A step that waits for the host is measured in two
processes, and the second is taken to last as long as the first. A label counts if it was a label in
the sweep, and is still stable with fewer samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd

from trappm.profiler.records import Measurement, Outcome, Protocol, Provenance
from trappm.profiler.steps.meter import StepTime, Window
from trappm.profiler.steps.sampling import sample_clean, unstable_reasons, waits_for_host

BUSY_SHARE = 0.8
"""NVML utilization of a GPU that never waits; below 1 because the power window has pauses."""
_EVENT_BATCH = 64
"""Steps between two synchronizations; each such batch has one untimed step more."""
_NO_DISTURBANCE = Window(seconds=1.0, energy_j=None)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Rules of measuring, as changes of those of the sweep."""

    rules: dict[str, Any] = field(default_factory=dict)
    """Fields of the protocol."""
    has_second_process: bool = True
    """True if steps that wait for the host are measured in two processes."""
    second_has_power: bool = False
    left_out: tuple[str, ...] = ()
    """Parts that take no time, as they happen during another measurement."""
    once: tuple[str, ...] = ()
    """Parts that take time only in the first measurement of each architecture."""


_THIRD, _EARLY, _SHORT = {"power_share": 1 / 3}, {"min_steps": 8}, {"max_seconds": 2.0}
_AHEAD = ("between", "create")
_IN_EACH_PROCESS = ("between", "prepare", "create", "first steps")

VARIANTS = {
    "one process, as in the sweep": Variant(has_second_process=False),
    "one process, power of a third": Variant(rules=_THIRD, has_second_process=False),
    "one process, all means (bound)": Variant(
        rules=_THIRD | _EARLY | _SHORT,
        has_second_process=False,
        left_out=_AHEAD,
        once=_IN_EACH_PROCESS,
    ),
    "two processes, power in both": Variant(second_has_power=True),
    "A: two processes, power in the first": Variant(),
    "B: A with power of a third": Variant(rules=_THIRD),
    "A, early stop from 8 steps on": Variant(rules=_EARLY),
    "A, at most 2 s of samples": Variant(rules=_SHORT),
    "A, next model built in advance (bound)": Variant(left_out=_AHEAD),
    "A, an architecture per process (bound)": Variant(once=_IN_EACH_PROCESS),
    "B, at most 2 s of samples": Variant(rules=_THIRD | _SHORT),
    "B, next model built in advance (bound)": Variant(rules=_THIRD, left_out=_AHEAD),
    "A, all means (bound)": Variant(
        rules=_THIRD | _EARLY | _SHORT, left_out=_AHEAD, once=_IN_EACH_PROCESS
    ),
    "A, no samples, no power (bound)": Variant(left_out=("timed steps", "power window")),
}
"""Means to measure faster; in a bound, some parts are assumed to take no time."""


def rates(sweep: Sequence[Measurement]) -> pd.DataFrame:
    """Return labels per hour, seconds and moved medians by variant; empty without seconds.

    Medians are those of one process, in percent of the recorded ones.
    """
    timed = _timed(sweep)
    variants = VARIANTS if timed else {}
    return pd.DataFrame({name: _row(timed, rules) for name, rules in variants.items()}).T


def parts(sweep: Sequence[Measurement]) -> pd.Series:
    """Return the mean seconds of an attempt by part; empty without seconds."""
    timed = _timed(sweep)
    between_s = seconds_between(timed)
    return pd.DataFrame([_parts(each, between_s) for each in timed]).mean()


def _timed(sweep: Iterable[Measurement]) -> list[Measurement]:
    """Return the measurements of real devices with their seconds."""
    return [
        each
        for each in sweep
        if each.provenance is Provenance.MEASURED and "phase_seconds" in each.environment
    ]


def seconds_between(sweep: Iterable[Measurement]) -> float:
    """Return the median seconds from the end of a measurement to the begin of the next."""
    gaps_s = [
        (_begin(after) - _begin(before)).total_seconds() - before.duration_s
        for before, after in itertools.pairwise(sweep)
    ]
    return float(np.median(gaps_s)) if gaps_s else 0.0


def _begin(measurement: Measurement) -> datetime:
    return datetime.fromisoformat(measurement.started_at)


def _row(sweep: Sequence[Measurement], variant: Variant) -> dict[str, float]:
    between_s = seconds_between(sweep)
    seconds, labels, with_power = 0.0, 0, 0
    moved: dict[bool, list[float]] = {True: [], False: []}
    known: set[tuple[str, str]] = set()
    for each in sweep:
        protocol = replace(each.protocol, **variant.rules)
        has_power = protocol.measures_power(each.configuration)
        kind = each.configuration.architecture, str(each.configuration.phase)
        left_out = {*variant.left_out, *(variant.once if kind in known else ())}
        known.add(kind)
        taken_s, samples_ms = _replayed(each, protocol, has_power, left_out, between_s)
        seconds += taken_s
        if each.outcome is not Outcome.OK or each.step is None:
            continue
        waits = _waits(each)
        moved[waits].append(100 * abs(float(np.median(samples_ms)) / _median_ms(each) - 1))
        if unstable_reasons(samples_ms, _NO_DISTURBANCE, protocol):
            continue
        labels, with_power = labels + 1, with_power + has_power
        if waits and variant.has_second_process:
            second = has_power and variant.second_has_power
            seconds += _replayed(each, protocol, second, left_out, between_s)[0]
    return {
        "per hour": 3600 * labels / seconds,
        "seconds": seconds / len(sweep),
        "labels": labels,
        "with power": with_power,
        **{
            f"{which} {name}": value
            for which, shifts in (("busy", moved[False]), ("waits", moved[True]))
            for name, value in _largest(shifts).items()
        },
    }


def _largest(shifts: Sequence[float]) -> dict[str, float]:
    values = np.array(shifts or [np.nan])
    return {"p95": float(np.quantile(values, 0.95)), "max": float(values.max())}


def _waits(measurement: Measurement) -> bool:
    utilization = measurement.environment.get("gpu_utilization")
    if "device_time_ms" in measurement.environment or utilization is None:
        return waits_for_host(measurement)
    return bool(utilization < BUSY_SHARE)


def _replayed(
    measurement: Measurement,
    protocol: Protocol,
    has_power: bool,
    left_out: Set[str],
    between_s: float,
) -> tuple[float, list[float]]:
    """Return the seconds of one process by the rules of this protocol, and its samples."""
    spent_s = _parts(measurement, between_s)
    samples_ms: list[float] = []
    if measurement.step is not None:
        samples_ms, timed_s = _samples(measurement, protocol)
        beyond_s = spent_s["power window"] - _missing_s(
            measurement.protocol, spent_s["timed steps"]
        )
        spent_s["timed steps"] = timed_s
        spent_s["power window"] = beyond_s + _missing_s(protocol, timed_s) if has_power else 0.0
    return sum(s for part, s in spent_s.items() if part not in left_out), samples_ms


def _missing_s(protocol: Protocol, timed_s: float) -> float:
    return max(0.0, protocol.power_window_s - timed_s)


def _parts(measurement: Measurement, between_s: float) -> dict[str, float]:
    """Return the seconds of one process by part."""
    facts, phases = measurement.environment, measurement.environment["phase_seconds"]
    warmup_s, window_s, timed_s, first_s = phases.get("warmup", 0.0), 0.0, 0.0, 0.0
    if measurement.step is not None:
        _, timed_s = _samples(measurement, measurement.protocol)
        window_s = max(timed_s, facts["window_s"] + (facts.get("paused_s") or 0.0))
        # The least that the steps before the window take once libraries and kernels are loaded.
        step_s = _median_ms(measurement) / 1000
        usual_s = 2 * step_s + max(0.5, measurement.protocol.warmup_steps * step_s)
        first_s = max(0.0, warmup_s - usual_s)
    return {
        "between": between_s,
        "prepare": facts.get("prepare_s", 0.0),
        "create": phases.get("create", 0.0),
        "first steps": first_s,
        "warm-up": warmup_s - first_s,
        "timed steps": timed_s,
        "power window": window_s - timed_s,
        "rest": max(0.0, phases.get("measure", 0.0) - window_s),
    }


def _of_first_process(measurement: Measurement) -> Sequence[float]:
    """Return the samples of the first process, which `phase_seconds` are of, too."""
    samples_ms = measurement.step_samples_ms
    is_two = "process_medians_ms" in measurement.environment
    return samples_ms[: len(samples_ms) // 2] if is_two else samples_ms


def _median_ms(measurement: Measurement) -> float:
    return float(np.median(_of_first_process(measurement)))


def _samples(measurement: Measurement, protocol: Protocol) -> tuple[list[float], float]:
    """Return the recorded samples up to where the protocol ends, and their wall seconds."""
    recorded, facts = _of_first_process(measurement), measurement.environment
    step_s = facts["window_s"] / facts["steps_in_window"]
    count, seconds = 0, 0.0

    def time_steps(steps: int) -> list[StepTime]:
        nonlocal count, seconds
        samples = [StepTime(ms) for ms in recorded[count : count + steps]]
        count += len(samples)
        seconds += step_s * (steps + -(-steps // _EVENT_BATCH))
        return samples

    capped = replace(
        protocol, max_steps=len(recorded), min_steps=min(protocol.min_steps, len(recorded))
    )
    sample_clean(time_steps, capped, lambda: seconds)
    return list(recorded[:count]), seconds
