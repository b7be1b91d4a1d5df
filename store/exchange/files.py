"""Measurements to and from files, by their suffix: Parquet and JSON lines; CSV is only written.

Exporting writes beside the file and puts the whole in its place at the end. Importing reads a file
twice: first every row is checked, and one bad row refuses the file with nothing recorded; then
they are recorded in batches. What a broken connection leaves undone, importing again completes: an
attempt is recorded once, however often it comes.
"""

from __future__ import annotations

import csv
import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

from trappm.profiler.errors import InputError, one_line
from trappm.profiler.files.whole_file import made_whole
from trappm.profiler.records import Measurement, Outcome
from trappm.store.exchange import parquet_reader
from trappm.store.exchange.rows import (
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
_MAX_LINE_BYTES = 8 << 20
"""Bytes; more than a row of MAX_ROW_BYTES has with every quote in it doubled."""
_BATCH = 2000

_Row = dict[str, Any]
_Function = TypeVar("_Function")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What becomes of one row of a file: a measurement, or the reason why there is none."""

    kind: str
    """imported, censored (memory ran out, the capacity is the bound), failed, known or rejected."""
    reason: str
    measurement: Measurement | None = None


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What became of the rows of a file."""

    file: str
    source: str
    rows: int
    new: int
    """Attempts that were not in the store yet."""
    counts: Mapping[str, int]
    """Rows by the kind of their verdict."""
    reasons: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Rows by kind and reason."""


def export_file(measurements: Iterable[Measurement], path: Path) -> int:
    """Writes measurements into a Parquet, CSV or JSON lines file; replaces one that is there.

    Returns:
        How many.

    Raises:
        InputError: the suffix is of none of the three, or the file cannot be written.
    """
    write = _by_suffix(path, _WRITERS)
    numbers = itertools.count()
    rows = (row_of(measurement) for measurement, _ in zip(measurements, numbers, strict=False))
    try:
        with made_whole(path, replace=True) as unfinished:
            write(unfinished, rows)
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise InputError(f"{path} cannot be written: {reason}") from error
    return next(numbers)


def read_file(path: Path) -> Iterator[Verdict]:
    """The measurements of a file that `export_file` wrote, or the profiler as JSON lines.

    Raises:
        InputError: the file cannot be read, or a row cannot be; with the row's number.
    """
    rows = _by_suffix(path, _READERS)(checked_size(path))
    number = 0
    while True:
        number += 1
        try:
            row = next(rows, None)
            if row is None:
                return
            measurement = measurement_of(row)
        except (InputError, ValueError) as error:
            raise InputError(
                f"{path.name}, row {number}: {one_line(error)}; nothing was imported"
            ) from error
        yield _verdict(measurement)


class Tally:
    """Counts verdicts as they pass."""

    def __init__(self) -> None:
        self._reasons: Counter[tuple[str, str]] = Counter()

    def add(self, verdict: Verdict) -> None:
        self._reasons[verdict.kind, verdict.reason] += 1

    def report(self, file: str, source: str, new: int) -> ImportReport:
        """What was counted of a file, of which so many attempts were recorded as new."""
        counts: Counter[str] = Counter()
        for (kind, _), count in self._reasons.items():
            counts[kind] += count
        return ImportReport(
            file=file,
            source=source,
            rows=counts.total(),
            new=new,
            counts=dict(counts),
            reasons=dict(self._reasons.most_common()),
        )


def checked_size(path: Path) -> Path:
    """The path, if a file of a size that we read is there.

    Raises:
        InputError: there is none.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if not path.is_file() or size > MAX_BYTES:
        raise InputError(f"{path} is no file of at most {MAX_BYTES >> 30} GiB")
    return path


def check_columns(names: Sequence[str]) -> None:
    """Raises InputError for a column that a table has twice: which one counts, nobody can know."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(f"it has the column {twice[0][:60]!r} twice")


def _verdict(measurement: Measurement) -> Verdict:
    """Of a measurement that was recorded elsewhere."""
    if measurement.outcome is Outcome.OK:
        return Verdict(kind="imported", reason=f"{measurement.provenance}", measurement=measurement)
    kind = "censored" if measurement.outcome is Outcome.OOM else "failed"
    return Verdict(kind=kind, reason=f"outcome {measurement.outcome}", measurement=measurement)


def _write_jsonl(path: Path, rows: Iterable[_Row]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)


def _read_jsonl(path: Path) -> Iterator[_Row]:
    with path.open("rb") as file:
        for line in _lines(file):
            if line.strip():
                row = strict_json(line.decode())
                if not isinstance(row, dict):
                    raise InputError("the line is no JSON object")
                yield row if "format_version" in row else flattened(row)


def _lines(file: IO[bytes] | None) -> Iterator[bytes]:
    assert file is not None  # noqa: S101  # a pipe where it is of a process
    while line := file.readline(_MAX_LINE_BYTES + 1):
        if len(line) > _MAX_LINE_BYTES:
            raise InputError(f"the line is longer than {_MAX_LINE_BYTES >> 20} MiB")
        yield line


def _as_texts(row: Mapping[str, Any]) -> _Row:
    return {**row, **{name: json.dumps(row[name], allow_nan=False) for name in DOCUMENTS}}


def _from_texts(row: _Row) -> _Row:
    documents = {name: row[name] for name in DOCUMENTS if row.get(name) is not None}
    return {**row, **{name: strict_json(text) for name, text in documents.items()}}


def _write_csv(path: Path, rows: Iterable[_Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        # As RFC 4180 ends lines: the writer puts quotes around what stands in its line ends only.
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
        while batch := [_as_texts(row) for row in islice(remaining, _BATCH)]:
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))


def _read_parquet(path: Path) -> Iterator[_Row]:
    """By a process of its own, whose memory is bounded."""
    with subprocess.Popen(
        [sys.executable, "-IS", parquet_reader.__file__, path.absolute(), *sys.path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as reader:
        try:
            for line in _lines(reader.stdout):
                row = strict_json(line.decode())
                if isinstance(row, list):
                    if row:
                        raise InputError(row[0])
                    return
                for name in DOCUMENTS:
                    if not isinstance(row.get(name), str | None):
                        raise InputError(f"{name} is no text")
                yield _from_texts(row)
        finally:
            reader.kill()  # there may be rows that nobody wants any more
    raise InputError(f"it ended the process that reads it ({reader.returncode})")


_WRITERS = {".parquet": _write_parquet, ".csv": _write_csv, ".jsonl": _write_jsonl}
_READERS = {".parquet": _read_parquet, ".jsonl": _read_jsonl}


def _by_suffix(path: Path, formats: Mapping[str, _Function]) -> _Function:
    if path.suffix not in formats:
        raise InputError(
            f"{path.name} ends in none of {', '.join(formats)}; name a format so "
            "(published sheets: python -m research import)"
        )
    return formats[path.suffix]
