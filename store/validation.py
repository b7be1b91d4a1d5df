"""What a measurement must be so that both back ends can keep it; checked before it is written.

SQLite takes almost anything: longer texts than a column has room for, a NUL in JSON, times that
float32 makes infinite. PostgreSQL does not, and a store goes from one to the other.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import String
from sqlalchemy.orm import InstrumentedAttribute

from trappm.profiler.errors import StoreError, one_line
from trappm.profiler.host.environment import utc_now
from trappm.profiler.records import (
    METRICS,
    Configuration,
    Measurement,
    Outcome,
    Protocol,
    StepSummary,
)
from trappm.store.db.models import ConfigurationRow, DeviceRow, MeasurementRow


def _room(column: InstrumentedAttribute[Any]) -> int:
    """Letters that a column has room for."""
    kind = column.property.columns[0].type
    return (kind.length if isinstance(kind, String) else None) or sys.maxsize


_LONGEST = {
    "architecture": _room(ConfigurationRow.architecture),
    "device": _room(DeviceRow.key),
    "attempt_key": _room(MeasurementRow.attempt_key),
    "protocol": _room(MeasurementRow.protocol_name),
    "failed_in": _room(MeasurementRow.failed_in),
}

_FREE = (
    "device", "attempt_key", "failed_in", "message", "memory_detail_mib", "missing", "environment",
)  # fmt: skip
"""Texts and documents that a profiler may fill freely."""

_DEEPEST = 100


def with_possible_metrics(measurement: Measurement) -> Measurement:
    """The measurement with metrics that cannot be taken for missing, with the reason.

    Raises:
        StoreError: its step times cannot be, or it cannot be kept.
    """
    step = measurement.step
    if step is not None and not (0 < step.median_ms < math.inf and 0 < step.p95_ms < math.inf):
        raise StoreError(
            f"{measurement.configuration} on {measurement.device} was measured at {step}, "
            "which cannot be; this is a fault of the profiler"
        )
    changes: dict[str, Any] = {}
    missing = dict(measurement.missing)
    for name in ("memory_mib", "power_w", "energy_j"):
        value = getattr(measurement, name)
        if value is not None and not 0 < value < math.inf:
            changes[name] = None
            missing[name] = f"measured as {value}, which cannot be"
    if changes:
        measurement = replace(measurement, missing=missing, **changes)
    if reason := why_not_kept(measurement):
        raise StoreError(
            f"{measurement.configuration} on {measurement.device} cannot be kept: {reason}"
        )
    return measurement


class Wanted(NamedTuple):
    """A measurement that a worker was to take."""

    configuration: Configuration
    device: str
    protocol: Protocol
    attempt_key: str
    fingerprint: str
    """Fingerprint of the worker's stack."""


def recordable(measurement: Measurement, wanted: Wanted) -> Measurement:
    """Return the measurement if it can be kept and is the one wanted; else a failed attempt."""
    try:
        given = (measurement.configuration, measurement.device, measurement.attempt_key)
        if (*given, measurement.protocol) == (
            wanted.configuration, wanted.device, wanted.attempt_key, wanted.protocol
        ):  # fmt: skip
            return with_possible_metrics(measurement)
        reason = f"it is of {given}, which is not what was wanted"
    except (StoreError, TypeError, ValueError, AttributeError) as error:
        reason = one_line(error)
    return unrecordable(reason, wanted)


def unrecordable(reason: str, wanted: Wanted) -> Measurement:
    """Return the failed attempt that is recorded instead of a measurement that cannot be."""
    return Measurement(
        configuration=wanted.configuration,
        device=wanted.device,
        outcome=Outcome.ERROR,
        protocol=wanted.protocol,
        started_at=utc_now(),
        duration_s=0.0,
        attempt_key=wanted.attempt_key,
        missing=dict.fromkeys((*METRICS, "energy_j"), "no result"),
        failed_in="record",
        message=f"what was measured cannot be recorded: {ascii(reason)[1:-1]}",
        environment={"stack_fingerprint": wanted.fingerprint},
    )


def why_not_kept(measurement: Measurement) -> str | None:
    """Why this cannot be kept on one of the back ends; None if it can."""
    names = {
        "architecture": measurement.configuration.architecture,
        "device": measurement.device,
        "attempt_key": measurement.attempt_key,
        "protocol": measurement.protocol.name,
        "failed_in": measurement.failed_in or "",
    }
    for name, text in names.items():
        if len(text) > _LONGEST[name]:
            return f"{name} is {text[:40]!r}..., {len(text)} letters long; at most {_LONGEST[name]}"
    fingerprint = str(measurement.environment.get("stack_fingerprint") or "")
    if len(fingerprint) > _room(DeviceRow.fingerprint):
        return f"its stack's fingerprint is {len(fingerprint)} letters long"
    if not 0 <= measurement.duration_s < math.inf:
        return f"it took {measurement.duration_s} s"
    if datetime.fromisoformat(measurement.started_at).tzinfo is None:
        return f"its time {measurement.started_at!r} names no time zone"
    if reason := _unfit_step(measurement.step):
        return reason
    for name in ("configuration", "protocol"):
        if reason := unfit(vars(getattr(measurement, name))):
            return f"{name} has {reason}"
    for name in _FREE:
        if reason := unfit(getattr(measurement, name)):
            return f"{name} has {reason}"
    if not are_possible_samples(measurement.step_samples_ms):
        return "step_samples_ms has a time that is not above 0 and finite as a float32"
    metrics = (measurement.step, measurement.memory_mib, measurement.power_w)
    if measurement.outcome is Outcome.OK and metrics == (None, None, None):
        return "the outcome is ok, but there is neither a step time nor memory nor power"
    return None


def are_possible_samples(times_ms: Sequence[float]) -> bool:
    """Whether step times are above 0 and finite as they are kept, in float32."""
    with np.errstate(over="ignore", under="ignore"):
        kept = np.asarray(times_ms, dtype=np.float32)
    return bool((kept > 0).all() and np.isfinite(kept).all())


def _unfit_step(step: StepSummary | None) -> str | None:
    if step is None:
        return None
    times = (step.median_ms, step.mean_ms, step.p95_ms)
    if not all(0 < time < math.inf for time in times) or not 0 <= step.iqr_ms < math.inf:
        return f"its step times are {step}"
    shares = (step.forward_share, step.backward_share, step.optimizer_share)
    if not all(share is None or math.isfinite(share) for share in shares):
        return f"its shares of a step are {shares}"
    return None


def unfit(document: Any) -> str | None:
    """What in a text or JSON document cannot be kept; None if there is nothing."""
    remaining = [(document, 0)]
    while remaining:
        value, depth = remaining.pop()
        if isinstance(value, str):
            if "\0" in value or not (value.isascii() or _has_utf8(value)):
                return f"a text that a database cannot keep: {value[:40]!r}"
        elif isinstance(value, float) and not math.isfinite(value):
            return f"{value} in it, which is no number"
        elif isinstance(value, Mapping):
            remaining += [(part, depth + 1) for part in (*value, *value.values())]
        elif isinstance(value, list | tuple):
            remaining += [(part, depth + 1) for part in value]
        elif value is not None and not isinstance(value, bool | int | float):
            return f"a {type(value).__name__}, which is nothing that JSON knows"
        if depth > _DEEPEST:
            return f"more than {_DEEPEST} levels"
    return None


def _has_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return True
