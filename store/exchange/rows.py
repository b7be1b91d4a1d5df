"""The row that measurements travel in: flat, versioned, the same in Parquet, CSV and JSON lines.

A row has everything that `profiler.records.Measurement` has, and the fingerprint of its stack.
Whoever wrote the file may be wrong or worse, so every value of a row that comes in is checked: its
type, its range, its length.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

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

FORMAT: Final = 1
"""The version of the row; a file of a newer one is refused."""

MAX_ROW_BYTES = 3 << 20
"""Of a row as JSON, so that what is exported can be read again in every format."""

_LARGEST_AMOUNT = 1e9
"""Of a time, of memory, power and energy in their units: far beyond any device."""

_LONGEST_NAME = 64
Name = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME)]
_Whole = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Amount = Annotated[float, Field(strict=True, ge=0, le=_LARGEST_AMOUNT)]
Positive = Annotated[float, Field(strict=True, gt=0, le=_LARGEST_AMOUNT)]


def with_zone(text: str) -> str:
    """The text of a time, if it is one with a zone; else ValueError."""
    try:
        time = datetime.fromisoformat(text)
        time.astimezone(UTC)  # as it is stored, which in UTC may be a year that there is not
    except (ValueError, OverflowError):
        time = None
    if time is None or time.tzinfo is None:
        raise ValueError("it must be a time in ISO 8601 with a zone")
    return text


def as_written(protocol: object) -> object:
    """Nothing of a protocol is filled in or converted: by its name labels are told apart."""
    if not isinstance(protocol, Mapping):
        return protocol
    name = protocol.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= _LONGEST_NAME:
        raise ValueError(f"it has no name of 1 to {_LONGEST_NAME} letters")
    for field in dataclasses.fields(Protocol):
        given = protocol.get(field.name, field.default)
        wanted = (int, float) if isinstance(field.default, float) else type(field.default)
        if isinstance(given, bool) or not isinstance(given, wanted):
            raise ValueError(f"{field.name} is {given!r}; it must be a number")
    return protocol


class _Columns(BaseModel):
    """The columns of a row, in the order of a file."""

    model_config = ConfigDict(extra="forbid")

    format_version: Literal[1] = FORMAT
    attempt_key: Name
    architecture: Annotated[str, Field(min_length=1, max_length=200)]
    batch_size: _Whole
    input_size: _Whole
    precision: Name
    memory_format: Name
    optimizer: Name
    phase: Name
    device: Name
    fingerprint: str | None = None
    outcome: Outcome
    provenance: Provenance
    started_at: Annotated[Name, AfterValidator(with_zone)]
    duration_s: Amount
    step_median_ms: Positive | None = None
    step_mean_ms: Positive | None = None
    step_iqr_ms: Amount | None = None
    step_p95_ms: Positive | None = None
    step_forward_share: _Share | None = None
    step_backward_share: _Share | None = None
    step_optimizer_share: _Share | None = None
    memory_mib: Positive | None = None
    power_w: Positive | None = None
    energy_j: Positive | None = None
    failed_in: Annotated[str, Field(max_length=16)] | None = None
    message: Annotated[str, Field(max_length=10_000)] | None = None
    step_samples_ms: list[Number]
    memory_detail_mib: dict[str, Number]
    missing: dict[str, str]
    protocol: Annotated[Protocol, BeforeValidator(as_written)]
    environment: dict[str, Any]


COLUMNS = tuple(_Columns.model_fields)
DOCUMENTS = ("step_samples_ms", "memory_detail_mib", "missing", "protocol", "environment")
"""Columns with structure: JSON, as text where the format knows none."""

_WORKLOAD = tuple(f.name for f in dataclasses.fields(Configuration))
_STEP = tuple(f.name for f in dataclasses.fields(StepSummary))
_TIMES = ("median_ms", "mean_ms", "iqr_ms", "p95_ms")
_SAME = (
    "device", "outcome", "protocol", "started_at", "duration_s", "attempt_key", "memory_mib",
    "power_w", "energy_j", "memory_detail_mib", "missing", "failed_in", "message", "environment",
)  # fmt: skip
"""Columns that are fields of `Measurement` as they are."""

WHOLE = ("format_version", "batch_size", "input_size")
FLOATS = ("duration_s", *(f"step_{name}" for name in _STEP), "memory_mib", "power_w", "energy_j")

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

    Raises:
        InputError: a column is missing or unknown, or a value cannot be.
    """
    try:
        columns = _Columns.model_validate({k: v for k, v in row.items() if v is not None})
    except ValidationError as error:
        raise InputError(first_fault(error)) from error
    measurement = Measurement(
        configuration=Configuration(**{name: getattr(columns, name) for name in _WORKLOAD}),
        provenance=_provenance(columns),
        step_samples_ms=tuple(columns.step_samples_ms),
        step=_step(columns),
        **{name: getattr(columns, name) for name in _SAME},
    )
    if reason := why_not_kept(measurement) or _why_impossible(measurement):
        raise InputError(reason)
    if len(json.dumps(row_of(measurement))) > MAX_ROW_BYTES:
        raise InputError(f"the row is longer than {MAX_ROW_BYTES >> 20} MiB when it is exported")
    return measurement


def first_fault(error: ValidationError) -> str:
    """The first thing that is wrong, in one line."""
    fault = error.errors(include_url=False)[0]
    name = ".".join(map(str, fault["loc"]))
    if fault["type"] == "missing":
        return f"{name} is missing"
    if fault["type"] == "extra_forbidden":
        return (
            f"an export has no column {_shown(name)} (published sheets: python -m research import)"
        )
    if name == "format_version":
        return f"{name} is {fault['input']}; this version of TraPPM reads {FORMAT}, update it"
    return f"{name} is {_shown(fault['input'])}; {fault['msg']}"


def _provenance(columns: _Columns) -> Provenance:
    """`measured` only if the row vouches for it; otherwise it becomes `imported`.

    It vouches with an environment whose fingerprint is the one that the row names, or, where a row
    names none, with one that a measuring process wrote.
    """
    environment = columns.environment
    vouched = (
        "measuring_version" in environment
        if columns.fingerprint is None
        else bool(environment) and columns.fingerprint == fingerprint_of(environment)
    )
    if columns.provenance is Provenance.MEASURED and not vouched:
        return Provenance.IMPORTED
    return columns.provenance


def _step(columns: _Columns) -> StepSummary | None:
    values = {name: getattr(columns, f"step_{name}") for name in _STEP}
    missing = [name for name in _TIMES if values[name] is None]
    if missing and any(value is not None for value in values.values()):
        raise InputError(f"step_{missing[0]} is missing, though others of the step are there")
    return None if missing else StepSummary(**values)


def _why_impossible(measurement: Measurement) -> str | None:
    """What `store check` would find wrong; None if there is nothing."""
    step, memory_mib = measurement.step, measurement.memory_mib
    if step is not None and step.p95_ms < step.median_ms:
        return f"step_p95_ms is {step.p95_ms}, below the median of {step.median_ms}"
    named = (
        measurement.environment.get("device_memory_mib"),
        measurement.environment.get("host_memory_mib"),
        measurement.memory_detail_mib.get("capacity"),
    )
    numbers = (x for x in named if isinstance(x, int | float) and not isinstance(x, bool))
    capacity_mib = next(numbers, None)
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
