"""The row that measurements travel in: flat, versioned, the same in Parquet, CSV and JSON lines.

A row has everything that `profiler.records.Measurement` has, and the fingerprint of its stack.
Whoever wrote the file may be wrong or worse, so every value of a row that comes in is checked: its
type, its range, its length.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from trappm.profiler.errors import InputError
from trappm.profiler.records import (
    Configuration,
    Measurement,
    Outcome,
    Protocol,
    Provenance,
    StepSummary,
)
from trappm.store.repositories.measurements import fingerprint_of
from trappm.store.validation import why_not_kept

FORMAT = 1
"""The version of the row; a file of a newer one is refused."""

_WORKLOAD = tuple(f.name for f in dataclasses.fields(Configuration))
_STEP = tuple(f.name for f in dataclasses.fields(StepSummary))
_TIMES = ("median_ms", "mean_ms", "iqr_ms", "p95_ms")
_SHARES = ("forward_share", "backward_share", "optimizer_share")
_METRICS = ("memory_mib", "power_w", "energy_j")
_LONGEST = {"architecture": 200, "failed_in": 16, "message": 10_000}
_LONGEST_NAME = 64
_LARGEST = 2**31 - 1
_LARGEST_AMOUNT = 1e9
"""Of a time, of memory, power and energy in their units: far beyond any device."""
MAX_ROW_BYTES = 3 << 20
"""Of a row as JSON, so that what is exported can be read again in every format."""

WHOLE = ("format_version", "batch_size", "input_size")
FLOATS = ("duration_s", *(f"step_{name}" for name in _STEP), *_METRICS)
DOCUMENTS = ("step_samples_ms", "memory_detail_mib", "missing", "protocol", "environment")
"""Columns with structure: JSON, as text where the format knows none."""
COLUMNS = (
    "format_version", "attempt_key", *_WORKLOAD, "device", "fingerprint", "outcome", "provenance",
    "started_at", *FLOATS, "failed_in", "message", *DOCUMENTS,
)  # fmt: skip
_MAY_MISS = {"failed_in", "message", *FLOATS} - {"duration_s"}

Row = Mapping[str, Any]


def row_of(measurement: Measurement) -> dict[str, Any]:
    """The row of a measurement, in the order of COLUMNS; `measurement_of` is its inverse."""
    data = measurement.to_dict()
    step = data["step"] or dict.fromkeys(_STEP)
    flat = {
        **data,
        **data["configuration"],
        **{f"step_{name}": step[name] for name in _STEP},
        "format_version": FORMAT,
        "fingerprint": fingerprint_of(measurement.environment),
    }
    return {name: flat[name] for name in COLUMNS}


def flattened(record: Row) -> dict[str, Any]:
    """A line of `Measurement.to_dict`, as the profiler prints it, as a row without fingerprint."""
    if not isinstance(record.get("configuration"), dict):
        raise InputError("it is neither a row of an export nor a measurement of the profiler")
    step = record.get("step")
    if step is not None and not isinstance(step, dict):
        raise InputError(f"step is {_shown(step)}; it must be an object or null")
    rest = {name: value for name, value in record.items() if name not in {"configuration", "step"}}
    return {**rest, **record["configuration"], **{f"step_{k}": v for k, v in (step or {}).items()}}


def measurement_of(row: Row) -> Measurement:
    """The measurement in a row of which nothing is known yet.

    `measured` stays so only if the row vouches for it: with an environment whose fingerprint is the
    one that the row names, or, where a row names none, with one that a measuring process wrote.
    Otherwise it becomes `imported`.

    Raises:
        InputError: a column is missing or unknown, or a value cannot be.
    """
    version = _whole("format_version", row["format_version"]) if "format_version" in row else FORMAT
    if version != FORMAT:
        raise InputError(
            f"format_version is {version}; this version of TraPPM reads {FORMAT}, update it"
        )
    allowed = {*COLUMNS}
    for name in row:
        if name not in allowed:
            raise InputError(
                f"an export has no column {_shown(name)} (a published sheet needs its --source)"
            )
    for name in allowed - {"format_version", "fingerprint"} - _MAY_MISS:
        if row.get(name) is None:
            raise InputError(f"{name} is missing")
    numbers = {name: _number(name, row.get(name)) for name in FLOATS}
    environment = _checked("environment", row["environment"], lambda _: True)
    workload: dict[str, Any] = {
        name: (_whole if name in WHOLE else _text)(name, row[name]) for name in _WORKLOAD
    }
    given = _text("provenance", row["provenance"])
    provenance = _member(Provenance, "provenance", given)
    fingerprint = row.get("fingerprint")
    vouched = (
        "measuring_version" in environment
        if fingerprint is None
        else bool(environment) and fingerprint == fingerprint_of(environment)
    )
    if provenance is Provenance.MEASURED and not vouched:
        provenance = Provenance.IMPORTED
    measurement = Measurement(
        configuration=Configuration(**workload),
        device=_text("device", row["device"]),
        outcome=_member(Outcome, "outcome", _text("outcome", row["outcome"])),
        protocol=_protocol(row["protocol"]),
        started_at=_time(row["started_at"]),
        duration_s=numbers["duration_s"] or 0.0,
        attempt_key=_text("attempt_key", row["attempt_key"]),
        provenance=provenance,
        step_samples_ms=_samples(row["step_samples_ms"]),
        step=_step(numbers),
        **{name: numbers[name] for name in _METRICS},
        memory_detail_mib=_checked("memory_detail_mib", row["memory_detail_mib"], _is_number),
        missing=_checked("missing", row["missing"], lambda value: isinstance(value, str)),
        failed_in=_optional_text("failed_in", row.get("failed_in")),
        message=_optional_text("message", row.get("message")),
        environment=environment,
    )
    if reason := why_not_kept(measurement) or _why_impossible(measurement):
        raise InputError(reason)
    if len(json.dumps(row_of(measurement))) > MAX_ROW_BYTES:
        raise InputError(f"the row is longer than {MAX_ROW_BYTES >> 20} MiB when it is exported")
    return measurement


def _why_impossible(measurement: Measurement) -> str | None:
    """What `store check` would find wrong; None if there is nothing."""
    step, memory_mib = measurement.step, measurement.memory_mib
    if step is not None:
        if step.p95_ms < step.median_ms:
            return f"step_p95_ms is {step.p95_ms}, below the median of {step.median_ms}"
        for name in _SHARES:
            if not 0 <= (getattr(step, name) or 0) <= 1:
                return f"step_{name} is {getattr(step, name)}; a share is 1 at most"
    named = (
        measurement.environment.get("device_memory_mib"),
        measurement.environment.get("host_memory_mib"),
        measurement.memory_detail_mib.get("capacity"),
    )
    capacity_mib = next((x for x in named if _is_number(x)), None)
    if memory_mib and capacity_mib is not None and memory_mib > capacity_mib + 1:
        return f"memory_mib is {memory_mib}, and there are {capacity_mib} MiB"
    return None


def strict_json(text: str) -> Any:
    """JSON without NaN and infinity, which are none.

    Raises:
        InputError: it is none.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{_shown(text)} is no JSON: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _text(name: str, value: object) -> str:
    longest = _LONGEST.get(name, _LONGEST_NAME)
    if not isinstance(value, str) or not 0 < len(value) <= longest or "\0" in value:
        raise InputError(f"{name} is {_shown(value)}; it must be a text of 1 to {longest} letters")
    return value


def _optional_text(name: str, value: object) -> str | None:
    return None if value is None else "" if value == "" else _text(name, value)


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        raise InputError(f"{name} is {_shown(value)}; it must be a whole number of 1 or more")
    return value


def _number(name: str, value: object) -> float | None:
    """A number as this column may have it; None if it is missing."""
    if value is None:
        return None
    may_be_0 = name in {"duration_s", "step_iqr_ms"} or name.endswith("_share")
    if not _is_number(value) or value < 0 or (value == 0 and not may_be_0):  # type: ignore[operator]
        least = "0 or more" if may_be_0 else "above 0"
        raise InputError(f"{name} is {_shown(value)}; it must be a number {least}")
    if value > _LARGEST_AMOUNT:  # type: ignore[operator]
        raise InputError(f"{name} is {_shown(value)}; at most {_LARGEST_AMOUNT:g} can be")
    return float(value)  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    """Whether it is a finite number that a float can hold; an integer of JSON has no bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def _member(kind: type[Outcome] | type[Provenance], name: str, value: str) -> Any:
    try:
        return kind(value)
    except ValueError as error:
        raise InputError(
            f"{name} is {_shown(value)}; it must be one of {', '.join(kind)}"
        ) from error


def _time(value: object) -> str:
    text = _text("started_at", value)
    try:
        time = datetime.fromisoformat(text)
        time.astimezone(UTC)  # as it is stored, which in UTC may be a year that there is not
    except (ValueError, OverflowError):
        time = None
    if time is None or time.tzinfo is None:
        raise InputError(f"started_at is {_shown(text)}; it must be a time in ISO 8601 with a zone")
    return text


def _samples(value: object) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or not all(map(_is_number, value)):
        raise InputError(f"step_samples_ms is {_shown(value)}; it must be a list of times above 0")
    return tuple(float(x) for x in value)


def _step(numbers: Mapping[str, float | None]) -> StepSummary | None:
    values = {name: numbers[f"step_{name}"] for name in _STEP}
    missing = [name for name in _TIMES if values[name] is None]
    if missing and any(value is not None for value in values.values()):
        raise InputError(f"step_{missing[0]} is missing, though others of the step are there")
    return None if missing else StepSummary(**values)  # type: ignore[arg-type]


def _checked(name: str, value: object, is_good: Callable[[object], bool]) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(map(is_good, value.values())):
        raise InputError(f"{name} is {_shown(value)}; it must be an object of such values")
    return value


def _protocol(value: object) -> Protocol:
    types = {f.name: type(f.default) for f in dataclasses.fields(Protocol)}
    fields = _checked("protocol", value, lambda _: True)
    for name, given in fields.items():
        if name not in types:
            raise InputError(f"protocol has no {_shown(name)}; it has {', '.join(types)}")
        if types[name] is str:
            _text(name, given)
        elif not _is_number(given) or (types[name] is int and not isinstance(given, int)):
            raise InputError(f"protocol's {name} is {_shown(given)}; it must be a number")
    if "name" not in fields:
        raise InputError("protocol has no name")
    return Protocol(**fields)
