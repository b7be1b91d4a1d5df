"""Measurements in files: export as Parquet, JSON lines or CSV, and import of the first two.

An export appears under its name when it is complete. A file is read twice by an import: first every
row is checked, and one bad row refuses the file; then the rows are recorded in batches. Repeating
an interrupted import completes it, because an attempt is recorded once.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from trappm.profiler.errors import InputError, one_line
from trappm.profiler.files.whole_file import made_whole
from trappm.profiler.records import Measurement, Outcome
from trappm.store.measurements import BATCH, Measurements
from trappm.store.rows import (
    COLUMNS,
    DOCUMENTS,
    FLOATS,
    WHOLE,
    flattened,
    measurement_of,
    row_of,
    strict_json,
)

MAX_BYTES = 8 << 30

_Row = dict[str, Any]
_Function = TypeVar("_Function")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What becomes of a row of a file: a measurement, or the reason why there is none."""

    kind: str
    """imported, censored (out of memory, with the capacity as bound), failed or rejected."""
    reason: str
    measurement: Measurement | None = None


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What became of the rows of a file."""

    file: str
    source: str
    rows: int
    new: int
    """Number of attempts that were not in the store."""
    counts: Mapping[str, int]
    """Rows by the kind of their verdict."""
    reasons: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Rows by kind and reason."""


def export_file(measurements: Iterable[Measurement], path: Path) -> int:
    """Write measurements into a Parquet, CSV or JSON lines file, and return their number.

    Raises:
        InputError: The suffix is another one, or the file cannot be written.
    """
    write = _by_suffix(path, _WRITERS)
    return write_whole(path, measurements, row_of, write)


def write_whole(
    path: Path,
    records: Iterable[Any],
    row_of: Callable[[Any], _Row],
    write: Callable[[Path, Iterable[_Row]], None],
) -> int:
    """Write the rows of records into a file that appears when it is complete; return their number.

    Raises:
        InputError: The file cannot be written.
    """
    numbers = itertools.count()
    rows = (row_of(record) for record, _ in zip(records, numbers, strict=False))
    try:
        with made_whole(path, replace=True) as unfinished:
            write(unfinished, rows)
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise InputError(f"{path} cannot be written: {reason}") from error
    return next(numbers)


def read_file(path: Path) -> Iterator[Verdict]:
    """Return the measurements of a file of `export_file`, or of the profiler as JSON lines.

    Raises:
        InputError: The file or a row is invalid; the message has the row's number.
    """
    read = _by_suffix(path, _READERS)
    for measurement in numbered(path, "row", read(checked_size(path)), measurement_of):
        kind = {Outcome.OK: "imported", Outcome.OOM: "censored"}.get(measurement.outcome, "failed")
        is_ok = measurement.outcome is Outcome.OK
        reason = f"{measurement.provenance}" if is_ok else f"outcome {measurement.outcome}"
        yield Verdict(kind=kind, reason=reason, measurement=measurement)


def numbered(
    path: Path, what: str, rows: Iterator[_Row], parse: Callable[[_Row], _Function]
) -> Iterator[_Function]:
    """Parse the rows of a file, whose errors name the file and the row's number.

    Raises:
        InputError: A row is invalid.
    """
    for number in itertools.count(1):
        try:
            row = next(rows, None)
            if row is None:
                return
            record = parse(row)
        except (InputError, ValueError) as error:
            raise InputError(
                f"{path.name}, {what} {number}: {one_line(error)}; nothing was imported"
            ) from error
        yield record


def checked_size(path: Path) -> Path:
    """Return the path if it is a file of at most MAX_BYTES.

    Raises:
        InputError: It is not.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if not path.is_file() or size > MAX_BYTES:
        raise InputError(f"{path} is not a file of at most {MAX_BYTES >> 30} GiB")
    return path


def write_jsonl(path: Path, rows: Iterable[_Row]) -> None:
    """Write rows as JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)


def read_jsonl(path: Path) -> Iterator[_Row]:
    """Read the objects of a file of JSON lines.

    Raises:
        InputError: A line is not an object.
    """
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                row = strict_json(line.decode())
                if not isinstance(row, dict):
                    raise InputError("the line is not a JSON object")
                yield row


def _read_rows(path: Path) -> Iterator[_Row]:
    for row in read_jsonl(path):
        yield row if "format_version" in row else flattened(row)


def _as_texts(row: Mapping[str, Any]) -> _Row:
    return {**row, **{name: json.dumps(row[name], allow_nan=False) for name in DOCUMENTS}}


def _from_texts(row: _Row) -> _Row:
    for name in DOCUMENTS:
        if not isinstance(row.get(name), str | None):
            raise InputError(f"{name} is not a text")
    documents = {name: row[name] for name in DOCUMENTS if row.get(name) is not None}
    return {**row, **{name: strict_json(text) for name, text in documents.items()}}


def _write_csv(path: Path, rows: Iterable[_Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        # The writer quotes only its own line ends, which are those of RFC 4180.
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\r\n")
        writer.writeheader()
        writer.writerows(map(_as_texts, rows))


def _write_parquet(path: Path, rows: Iterable[_Row]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = dict.fromkeys(WHOLE, pa.int64()) | dict.fromkeys(FLOATS, pa.float64())
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in COLUMNS])
    remaining = iter(rows)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while batch := [_as_texts(row) for row in itertools.islice(remaining, BATCH)]:
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))


def _read_parquet(path: Path) -> Iterator[_Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # A column that is not buffered is unpacked page by page, not a row group at once.
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            for batch in file.iter_batches(batch_size=500):
                yield from map(_from_texts, batch.to_pylist())
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"it is not a Parquet file that can be read: {one_line(error)}") from error


_WRITERS = {".parquet": _write_parquet, ".csv": _write_csv, ".jsonl": write_jsonl}
_READERS = {".parquet": _read_parquet, ".jsonl": _read_rows}


def _by_suffix(path: Path, formats: Mapping[str, _Function]) -> _Function:
    if path.suffix not in formats:
        raise InputError(
            f"{path.name} must end in one of {', '.join(formats)} (published sheets: "
            "python -m research import)"
        )
    return formats[path.suffix]


def import_file(measurements: Measurements, path: Path) -> ImportReport:
    """Record the measurements of an export, of the profiler or of a training callback.

    Raises:
        InputError: The file or one of its rows is invalid; nothing was recorded.
        StoreError: The store cannot be written; importing again completes it.
    """
    return record_verdicts(measurements, path.name, "TraPPM", lambda: read_file(path))


def record_verdicts(
    measurements: Measurements, file: str, source: str, read: Callable[[], Iterable[Verdict]]
) -> ImportReport:
    """Record the measurements of verdicts, all of which are checked first.

    Args:
        measurements: Part of the store that records them.
        file: Name of the file, for the report.
        source: Name of its source, for the report.
        read: Returns the verdicts; it is called twice.

    Raises:
        InputError: A row is invalid; nothing was recorded.
        StoreError: The store cannot be written; importing again completes it.
    """
    reasons = Counter((verdict.kind, verdict.reason) for verdict in read())
    counts: Counter[str] = Counter()
    for (kind, _), count in reasons.items():
        counts[kind] += count
    new = measurements.record_many(v.measurement for v in read() if v.measurement is not None)
    return ImportReport(
        file=file,
        source=source,
        rows=counts.total(),
        new=new,
        counts=dict(counts),
        reasons=dict(reasons.most_common()),
    )
