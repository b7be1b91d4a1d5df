"""What the published sheets have in common: columns of numbers, and nothing but a result a row."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from trappm.profiler.errors import InputError, UnknownArchitectureError
from trappm.profiler.records import (
    Configuration,
    Measurement,
    Outcome,
    Protocol,
    Provenance,
    StepSummary,
)
from trappm.store.exchange.files import check_columns, checked_size

MAX_SHEET_BYTES = 64 << 20
UNTOLD_TIME = "1970-01-01T00:00:00+00:00"
"""For a time that the source does not give; `Measurement.missing` says so too."""

_LARGEST = 1e9
_UNTOLD = {
    "started_at": "not told by the source",
    "duration_s": "not told by the source",
}


def read_sheet(
    path: Path, texts: tuple[str, ...], wholes: tuple[str, ...], numbers: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """The rows of a CSV file with these columns; others are left out.

    Raises:
        InputError: the file is too large or not there, a column is missing, or a cell is no (whole)
            number above 0; with the line's number.
    """
    for line, cells in read_cells(path, {*texts, *wholes, *numbers}):
        try:
            row: dict[str, Any] = {name: _text(name, cells[name]) for name in texts}
            row |= {name: number_in(name, cells[name]) for name in numbers}
            yield row | {name: whole_in(name, cells[name]) for name in wholes}
        except InputError as error:
            raise InputError(f"{path.name}, line {line}: {error}; nothing was imported") from error


def read_cells(path: Path, needed: Set[str] = frozenset()) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a CSV file as they stand there, each with the number of its line.

    Raises:
        InputError: the file is too large or not there, is no CSV file, or lacks a needed column.
    """
    if checked_size(path).stat().st_size > MAX_SHEET_BYTES:
        raise InputError(f"{path.name} is larger than {MAX_SHEET_BYTES >> 20} MiB; split it")
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True, restval="")
        try:
            check_columns(reader.fieldnames or ())
            if missing := sorted(needed - {*(reader.fieldnames or ())}):
                raise InputError(f"the sheet lacks the columns {', '.join(missing)}")
            for cells in reader:
                yield reader.line_num, cells
        except (InputError, UnicodeDecodeError, csv.Error) as error:
            raise InputError(
                f"{path.name}, line {reader.line_num}: {error}; nothing was imported"
            ) from error


def current_name(model: str) -> str:
    """What timm calls the architecture of this model today."""
    from trappm.profiler.models.zoo import current_name

    return current_name(model)


def known_input_size(architecture: str) -> int | None:
    """timm's own input size of an architecture in pixels; None if timm does not know either."""
    from trappm.profiler.models.zoo import native_input_size

    try:
        return native_input_size(architecture)
    except UnknownArchitectureError:
        return None


def published(
    configuration: Configuration,
    protocol: Protocol,
    environment: Mapping[str, Any],
    *,
    outcome: Outcome = Outcome.OK,
    row: str,
    step_time_ms: float | None = None,
    memory_mib: float | None = None,
    memory_detail_mib: Mapping[str, float] | None = None,
    message: str | None = None,
) -> Measurement:
    """A measurement by others, whose attempt key is a hash of the row.

    A step time is taken as mean and median; the spread is not known.
    """
    identity = f"{protocol.name} {environment} {configuration.id} {outcome} {row}"
    metrics = {"step_time_ms": step_time_ms, "memory_mib": memory_mib, "power_w": None}
    missing = dict.fromkeys((k for k, v in metrics.items() if v is None), "not told by the source")
    step = None
    if step_time_ms is not None:
        step = StepSummary(
            median_ms=step_time_ms, mean_ms=step_time_ms, iqr_ms=0.0, p95_ms=step_time_ms
        )
        missing["step_spread"] = "the source tells a mean; median, p95 and range are no findings"
    return Measurement(
        configuration=configuration,
        device=environment["device"],
        outcome=outcome,
        protocol=protocol,
        started_at=UNTOLD_TIME,
        duration_s=0.0,
        attempt_key=hashlib.sha256(identity.encode()).hexdigest()[:32],
        provenance=Provenance.IMPORTED,
        step=step,
        memory_mib=memory_mib,
        memory_detail_mib=memory_detail_mib or {},
        missing=missing | {"energy_j": "not told by the source"} | _UNTOLD,
        failed_in=None if outcome is Outcome.OK else "measure",
        message=message,
        environment=environment,
    )


def _text(name: str, cell: str | None) -> str:
    if not cell or len(cell) > 200 or "\0" in cell:
        raise InputError(f"{name} is {(cell or '')[:60]!r}; it must be 1 to 200 letters")
    return cell


def number_in(name: str, cell: str | None) -> float:
    """The number above 0 in a cell; raises InputError where there is none."""
    try:
        value = float(cell) if cell and len(cell) <= 40 else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < _LARGEST:
        raise InputError(f"{name} is {(cell or '')[:60]!r}; it must be a number above 0, below 1e9")
    return value


def whole_in(name: str, cell: str | None) -> int:
    """The whole number above 0 in a cell; raises InputError where there is none."""
    value = number_in(name, cell)
    if value != int(value):
        raise InputError(f"{name} is {value}; it must be a whole number")
    return int(value)
