"""Reading of published sheets: rows of CSV files, their numbers, and measurements by others."""

from __future__ import annotations

import csv
import gzip
import hashlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, TypeVar

from trappm.profiler.errors import InputError, UnknownArchitectureError
from trappm.profiler.models.zoo import native_input_size
from trappm.profiler.records import (
    Configuration,
    Measurement,
    Outcome,
    Protocol,
    Provenance,
    StepSummary,
)
from trappm.store.files import ParsedRow, check_size
from trappm.store.public_labels import UNKNOWN_TIME

Cells = Mapping[str, str]
Result = TypeVar("Result")
UNTOLD = "not told by the source"
_MAX_NUMBER = 1e9


def read_rows(
    path: Path, needed: Set[str], read: Callable[[Cells], Result], wanted: str = "sheet"
) -> Iterator[Result]:
    """Yield the parsed rows of a CSV file, which may be compressed with gzip.

    Args:
        path: The file.
        needed: Columns that it must have.
        read: Reads the cells of a row by column.
        wanted: Word for the file in messages.

    Raises:
        InputError: The file cannot be read, a column is missing or twice, or a row cannot be read;
            with the number of the line.
    """
    check_size(path)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True, restval="")
        try:
            names = reader.fieldnames or ()
            for name in names:
                if names.count(name) > 1:
                    raise InputError(f"duplicate column {name[:60]!r}")
            if missing := sorted(needed - {*(reader.fieldnames or ())}):
                raise InputError(f"the {wanted} lacks the columns {', '.join(missing)}")
            for cells in reader:
                yield read(cells)
        except (InputError, csv.Error, UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
            raise InputError(
                f"{path.name}, line {reader.line_num}: {error}; nothing was imported"
            ) from error


def number_in(cells: Cells, name: str, most: float = _MAX_NUMBER) -> float:
    """Return the number above 0 in a cell.

    Raises:
        InputError: The cell has no such number.
    """
    cell = cells[name]
    try:
        value = float(cell) if len(cell) <= 40 else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < most:
        raise InputError(f"{name} is {cell[:60]!r}; it must be a number above 0, below {most:g}")
    return value


def whole_in(cells: Cells, name: str, most: float = _MAX_NUMBER) -> int:
    """Return the whole number above 0 in a cell.

    Raises:
        InputError: The cell has no such number.
    """
    value = number_in(cells, name, most)
    if value != int(value):
        raise InputError(f"{name} is {value}; it must be a whole number")
    return int(value)


def text_in(cells: Cells, name: str) -> str:
    """Return the text of a cell.

    Raises:
        InputError: The cell is empty or longer than 200 letters.
    """
    cell = cells[name]
    if not 1 <= len(cell) <= 200 or not cell.isprintable():
        raise InputError(f"{name} is {cell[:60]!r}; it must be 1 to 200 letters")
    return cell


def known_input_size(architecture: str) -> int | None:
    """Return timm's own input size in pixels, or None if timm does not know the architecture."""
    try:
        return native_input_size(architecture)
    except UnknownArchitectureError:
        return None


def reject(reason: str) -> ParsedRow:
    return ParsedRow(reason=reason)


SECOND = reject("a second row for the same run")


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
    """Return an imported measurement with a hash of `row` and its setting as its attempt key.

    A step time is used as both mean and median; its spread is unknown.
    """
    identity = f"{protocol.name} {environment} {configuration.id} {outcome} {row}"
    metrics = {"step_time_ms": step_time_ms, "memory_mib": memory_mib, "power_w": None}
    missing = dict.fromkeys((name for name, value in metrics.items() if value is None), UNTOLD)
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
        started_at=UNKNOWN_TIME,
        duration_s=0.0,
        attempt_key=hashlib.sha256(identity.encode()).hexdigest()[:32],
        provenance=Provenance.IMPORTED,
        step=step,
        memory_mib=memory_mib,
        memory_detail_mib=memory_detail_mib or {},
        missing=missing | dict.fromkeys(("energy_j", "started_at", "duration_s"), UNTOLD),
        failed_in=None if outcome is Outcome.OK else "measure",
        message=message,
        environment=environment,
    )
