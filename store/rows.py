"""The flat row of a measurement, and the model that validates it before it is stored.

The same row goes into SQL, Parquet, CSV and JSON lines, and one model validates both imported and
recorded measurements. SQLite accepts almost anything, such as longer texts than a column allows, a
NUL in JSON, or times that float32 makes infinite. PostgreSQL does not, and rows move between them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from trappm.profiler.errors import InputError, StoreError, one_line
from trappm.profiler.host.environment import stack_fingerprint, utc_now
from trappm.profiler.records import (
    METRICS,
    Configuration,
    Measurement,
    Outcome,
    Protocol,
    Provenance,
    StepSummary,
)
from trappm.store.records import configuration_of, record_of

FORMAT: Final = 1
"""Version of the row; a newer one is refused."""

_LARGEST_AMOUNT = 1e9
"""Of a time, memory, power and energy in their units; far beyond any device."""

_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
"""An escaped NUL in JSON, in which a backslash of a text is doubled."""
_LONGEST_NAME = 64
Name = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME)]
Phase = Annotated[str, Field(max_length=16)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Amount = Annotated[float, Field(strict=True, ge=0, le=_LARGEST_AMOUNT)]
Positive = Annotated[float, Field(strict=True, gt=0, le=_LARGEST_AMOUNT)]
_Whole = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
_Share = Annotated[float, Field(strict=True, ge=0, le=1)]


def _check_time(text: str) -> str:
    try:
        time = datetime.fromisoformat(text)
        time.astimezone(UTC)  # it is stored in UTC, whose year may be out of range
    except (ValueError, OverflowError):
        time = None
    if time is None or time.tzinfo is None:
        raise ValueError("it must be a time in ISO 8601 with a zone")
    return text


def _check_protocol(protocol: object) -> object:
    """Refuse a protocol that would have to be completed or converted: labels differ by its name."""
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


def _check_samples(times_ms: Sequence[float]) -> Sequence[float]:
    with np.errstate(over="ignore", under="ignore"):
        stored = np.asarray(times_ms, dtype=np.float32)
    if not ((stored > 0).all() and np.isfinite(stored).all()):
        raise ValueError("a time is not above 0 and finite as a float32")
    return times_ms


Time = Annotated[Name, AfterValidator(_check_time)]
ProtocolColumn = Annotated[Protocol, BeforeValidator(_check_protocol)]
Samples = Annotated[list[Number], AfterValidator(_check_samples)]


class FileRow(BaseModel):
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
    fingerprint: Annotated[str, Field(max_length=_LONGEST_NAME)] | None = None
    outcome: Outcome
    provenance: Provenance
    started_at: Time
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
    failed_in: Phase | None = None
    message: str | None = None
    step_samples_ms: Samples
    memory_detail_mib: dict[str, Number]
    missing: dict[str, str]
    protocol: ProtocolColumn
    environment: dict[str, Any]

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_texts(self)
        times = {name: getattr(self, f"step_{name}") for name in _TIMES}
        missing = [name for name, time in times.items() if time is None]
        has_step = any(getattr(self, f"step_{name}") is not None for name in _STEP)
        if missing and has_step:
            raise ValueError(f"step_{missing[0]} is missing, although the step has other values")
        if not missing and times["p95_ms"] < times["median_ms"]:
            raise ValueError(
                f"step_p95_ms is {times['p95_ms']}, below the median of {times['median_ms']}"
            )
        metrics = (self.step_median_ms, self.memory_mib, self.power_w)
        if self.outcome is Outcome.OK and metrics == (None, None, None):
            raise ValueError("the outcome is ok, but it has neither step time nor memory nor power")
        return self


COLUMNS = tuple(FileRow.model_fields)
DOCUMENTS = ("step_samples_ms", "memory_detail_mib", "missing", "protocol", "environment")
"""Columns with structure: JSON, as text in Parquet and CSV."""

_STEP = tuple(f.name for f in dataclasses.fields(StepSummary))
_TIMES = ("median_ms", "mean_ms", "iqr_ms", "p95_ms")

WHOLE = ("format_version", "batch_size", "input_size")
FLOATS = ("duration_s", *(f"step_{name}" for name in _STEP), "memory_mib", "power_w", "energy_j")


def fingerprint_of(environment: Mapping[str, Any]) -> str:
    """Return the fingerprint of the software stack that a measurement belongs to."""
    return str(environment.get("stack_fingerprint") or stack_fingerprint(environment))


def row_of(measurement: Measurement) -> dict[str, Any]:
    """Return the row of a measurement, in the order of COLUMNS."""
    flat = flattened(measurement.to_dict()) | {
        "format_version": FORMAT,
        "fingerprint": fingerprint_of(measurement.environment),
    }
    return {name: flat.get(name) for name in COLUMNS}


def flattened(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row, without a fingerprint, of what `Measurement.to_dict` has written.

    Raises:
        InputError: It is something else.
    """
    if not isinstance(record.get("configuration"), dict):
        raise InputError("it is neither a row of an export nor a measurement of the profiler")
    step = record.get("step")
    if step is not None and not isinstance(step, dict):
        raise InputError(f"step is {_shown(step)}; it must be an object or null")
    rest = {name: value for name, value in record.items() if name not in {"configuration", "step"}}
    return {**rest, **record["configuration"], **{f"step_{k}": v for k, v in (step or {}).items()}}


def measurement_of(row: Mapping[str, Any]) -> Measurement:
    """Return the measurement in an untrusted row.

    Raises:
        InputError: A column is missing or unknown, or a value is invalid.
    """
    try:
        columns = FileRow.model_validate({k: v for k, v in row.items() if v is not None})
    except ValidationError as error:
        raise InputError(first_fault(error)) from error
    return measurement_in(
        columns,
        provenance=_provenance(columns),
        step_samples_ms=tuple(columns.step_samples_ms),
    )


def measurement_in(columns: Any, **given: Any) -> Measurement:
    """Return the measurement in the columns of a row, of a file or of the database.

    Args:
        columns: Object with the columns as attributes.
        given: Fields of the measurement that differ from their columns.
    """
    step = None
    if columns.step_median_ms is not None:  # a row has all four times or none
        step = StepSummary(**{name: getattr(columns, f"step_{name}") for name in _STEP})
    return record_of(
        Measurement, columns, configuration=configuration_of(columns), step=step, **given
    )


def with_possible_metrics(measurement: Measurement) -> Measurement:
    """Return the measurement, in which impossible metrics are missing, with the reason.

    Raises:
        StoreError: It cannot be stored, for example because of its step times.
    """
    changes: dict[str, Any] = {}
    missing = dict(measurement.missing)
    for name in ("memory_mib", "power_w", "energy_j"):
        value = getattr(measurement, name)
        if value is not None and not 0 < value < math.inf:
            changes[name] = None
            missing[name] = f"measured as {value}, which is impossible"
    if changes:
        measurement = dataclasses.replace(measurement, missing=missing, **changes)
    try:
        FileRow.model_validate(row_of(measurement))
    except ValidationError as error:
        raise StoreError(
            f"{measurement.configuration} on {measurement.device} cannot be stored: "
            f"{first_fault(error)}"
        ) from error
    return measurement


class Wanted(NamedTuple):
    """The measurement that a worker was asked for."""

    configuration: Configuration
    device: str
    protocol: Protocol
    attempt_key: str
    fingerprint: str
    """Fingerprint of the worker's software stack."""


def recordable(measurement: Measurement, wanted: Wanted) -> Measurement:
    """Return the measurement if it can be stored and is the one wanted, else a failed attempt."""
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
    """Return the failed attempt to record instead of a measurement that cannot be stored."""
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


def first_fault(error: ValidationError) -> str:
    """Return the first fault of a row in one line."""
    fault = error.errors(include_url=False)[0]
    name = ".".join(map(str, fault["loc"]))
    message = fault["msg"].removeprefix("Value error, ")
    if not name:
        return message
    if fault["type"] == "missing":
        return f"{name} is missing"
    if fault["type"] == "extra_forbidden":
        return f"an export has no column {_shown(name)}"
    if name == "format_version":
        return f"{name} is {fault['input']}; this version of TraPPM reads {FORMAT}, update it"
    return f"{name} is {_shown(fault['input'])}; {message}"


def check_texts(columns: BaseModel) -> None:
    """Refuse texts and documents that one of the back ends cannot store.

    Raises:
        ValueError: A column has such a text, or is not valid JSON.
    """
    for name, value in columns:
        if isinstance(value, str | dict) and (reason := unfit(value)):
            raise ValueError(f"{name} has {reason}")


def unfit(document: Any) -> str | None:
    """Return why a database cannot store a text or JSON document; None if it can."""
    try:
        text = json.dumps(document, allow_nan=False, ensure_ascii=False)
        text.encode()  # fails for half a surrogate pair
    except (ValueError, TypeError, RecursionError) as error:
        return f"a value that a database cannot store: {error}"
    return "a NUL character, which a database cannot store" if _NUL.search(text) else None


def strict_json(text: str) -> Any:
    """Parse JSON without NaN and infinity.

    Raises:
        InputError: It is not JSON.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{_shown(text)} is not JSON: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _provenance(columns: FileRow) -> Provenance:
    """Return `imported` instead of `measured` unless the row proves that TraPPM measured it.

    The proof is an environment with the fingerprint that the row names. In a row without a
    fingerprint it is an environment that a measuring process wrote.
    """
    environment = columns.environment
    is_proved = (
        "measuring_version" in environment
        if columns.fingerprint is None
        else bool(environment) and columns.fingerprint == fingerprint_of(environment)
    )
    if columns.provenance is Provenance.MEASURED and not is_proved:
        return Provenance.IMPORTED
    return columns.provenance


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
