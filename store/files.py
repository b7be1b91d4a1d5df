"""Measurements as flat rows, which are validated here, and their files.

The same row goes into SQL, Parquet, CSV and JSON lines, and one model validates both imported and
recorded measurements. SQLite accepts almost anything, such as longer texts than a column allows, a
NUL in JSON, or times that float32 makes infinite. PostgreSQL does not, and rows move between them.

An export appears under its name when it is complete. A file is read twice by an import: first every
row is checked, and one bad row refuses the file; then the rows are recorded in batches. Repeating
an interrupted import completes it, because an attempt is recorded once.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from trappm.profiler.errors import InputError, fault_text, one_line
from trappm.profiler.files import write_atomically
from trappm.profiler.host.environment import stack_fingerprint
from trappm.profiler.records import (
    Execution,
    Measurement,
    Outcome,
    Protocol,
    Provenance,
    StepSummary,
)
from trappm.store.records import configuration_of, record_of

FORMAT: Final = 1
"""Version of the row; a newer one is refused."""

_MAX_AMOUNT = 1e9
"""Largest time, memory, power or energy in its unit, far beyond any device."""

_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
"""An escaped NUL in JSON, in which a backslash of a text is doubled."""
_MAX_NAME = 64
Name = Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]
Phase = Annotated[str, Field(max_length=16)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Amount = Annotated[float, Field(strict=True, ge=0, le=_MAX_AMOUNT)]
Positive = Annotated[float, Field(strict=True, gt=0, le=_MAX_AMOUNT)]
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


def _check_protocol(given: object, validate: ValidatorFunctionWrapHandler) -> Protocol:
    """Refuse a protocol that would have to be completed or converted: labels differ by its name."""
    protocol: Protocol = validate(given)
    if isinstance(given, Mapping):
        if "name" not in given or not 1 <= len(protocol.name) <= _MAX_NAME:
            raise ValueError(f"it has no name of 1 to {_MAX_NAME} letters")
        for name, value in given.items():
            if isinstance(value, bool) or value != getattr(protocol, name):
                raise ValueError(f"{name} is {value!r}; it must be a number")
    return protocol


def _check_samples(times_ms: Sequence[float]) -> Sequence[float]:
    with np.errstate(over="ignore", under="ignore"):
        stored = np.asarray(times_ms, dtype=np.float32)
    if not ((stored > 0).all() and np.isfinite(stored).all()):
        raise ValueError("a time is not above 0 and finite as a float32")
    return times_ms


Time = Annotated[Name, AfterValidator(_check_time)]
ProtocolColumn = Annotated[Protocol, WrapValidator(_check_protocol)]
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
    execution: Name = Execution.EAGER.value
    device: Name
    fingerprint: Annotated[str, Field(max_length=_MAX_NAME)] | None = None
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
    flat = flatten(measurement.to_dict()) | {
        "format_version": FORMAT,
        "fingerprint": fingerprint_of(measurement.environment),
    }
    return {name: flat.get(name) for name in COLUMNS}


def flatten(record: Mapping[str, Any]) -> dict[str, Any]:
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


def first_fault(error: ValidationError) -> str:
    """Return the first fault of a row in one line."""
    fault = error.errors(include_url=False)[0]
    name = ".".join(map(str, fault["loc"]))
    message = fault_text(fault)
    if not name:
        return message
    if fault["type"] == "missing":
        return f"{name} {message}"
    if fault["type"] == "extra_forbidden":
        return f"an export has no column {_shown(name)}"
    if name == "format_version":
        return f"{name} is {fault['input']}; this version of TraPPM reads {FORMAT}, update it"
    it = "it " if message.startswith("must ") else ""
    return f"{name} is {_shown(fault['input'])}; {it}{message}"


def check_texts(columns: BaseModel) -> None:
    """Refuse texts and documents that one of the back ends cannot store.

    Raises:
        ValueError: A column has such a text, or is not valid JSON.
    """
    for name, value in columns:
        if isinstance(value, str | dict) and (reason := unfit(value)):
            raise ValueError(f"{name} has {reason}")


MAX_DEPTH = 32
"""Largest depth of a document, far below what serializers of Python handle."""


def _depth(document: Any) -> int:
    """Return the nesting depth of a JSON document, or `MAX_DEPTH + 1` if it is deeper."""
    level, depth = [document], 0
    while level and depth <= MAX_DEPTH:
        nested = [x for x in level if isinstance(x, dict | list)]
        level = [y for x in nested for y in (x.values() if isinstance(x, dict) else x)]
        depth += bool(nested)
    return depth


def unfit(document: Any) -> str | None:
    """Return why a database cannot store a text or JSON document; None if it can."""
    if _depth(document) > MAX_DEPTH:
        return f"more than {MAX_DEPTH} nested levels"
    try:
        text = json.dumps(document, allow_nan=False, ensure_ascii=False)
        text.encode()  # fails for half a surrogate pair
    except (ValueError, TypeError, RecursionError) as error:
        return f"a value that a database cannot store: {error}"
    return "a NUL character, which a database cannot store" if _NUL.search(text) else None


def _parse_json(text: str) -> Any:
    """Parse JSON, with NaN and infinity, which the models of rows refuse.

    Raises:
        InputError: It is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{_shown(text)} is not JSON: {error}") from error


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


MAX_BYTES = 8 << 30
MAX_LINE_BYTES = 8 << 20
MAX_BATCH_BYTES = 128 << 20
"""Largest size of a batch of unpacked Parquet rows, whose file may be far smaller."""
_BATCH = 500

_Row = dict[str, Any]
_Function = TypeVar("_Function")


@dataclass(frozen=True, kw_only=True)
class ParsedRow:
    """Result of reading a row of a file: a measurement, or the reason for its rejection."""

    reason: str
    measurement: Measurement | None = None

    @property
    def kind(self) -> str:
        """label, censored (out of memory, with the capacity as bound), failed or rejected."""
        if self.measurement is None:
            return "rejected"
        kinds = {Outcome.OK: "label", Outcome.OOM: "censored"}
        return kinds.get(self.measurement.outcome, "failed")


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """Numbers of imported and rejected rows of a file."""

    file: str
    source: str
    rows: int
    new: int
    """Number of attempts that were not in the store."""
    counts: Mapping[str, int]
    """Rows by the kind of the parsed row."""
    reasons: Mapping[tuple[str, str], int]
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
        with write_atomically(path, replace=True) as unfinished:
            write(unfinished, rows)
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise InputError(f"{path} cannot be written: {reason}") from error
    return next(numbers)


def read_file(path: Path) -> Iterator[ParsedRow]:
    """Return the measurements of a file of `export_file`, or of the profiler as JSON lines.

    Raises:
        InputError: The file or a row is invalid; the message has the row's number.
    """
    read = _by_suffix(path, _READERS)
    for measurement in parse_numbered(path, "row", read(check_size(path)), measurement_of):
        is_ok = measurement.outcome is Outcome.OK
        reason = f"{measurement.provenance}" if is_ok else f"outcome {measurement.outcome}"
        yield ParsedRow(reason=reason, measurement=measurement)


def parse_numbered(
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


def check_size(path: Path) -> Path:
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
        InputError: A line is too long, or not an object.
    """
    with path.open("rb") as file:
        if file.read(len(BOM_UTF8)) != BOM_UTF8:  # Windows writes it at the start
            file.seek(0)
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise InputError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
            if line.strip():
                row = _parse_json(line.decode())
                if not isinstance(row, dict):
                    raise InputError("the line is not a JSON object")
                yield row


def _read_rows(path: Path) -> Iterator[_Row]:
    for row in read_jsonl(path):
        yield row if "format_version" in row else flatten(row)


def _as_texts(row: Mapping[str, Any]) -> _Row:
    return {**row, **{name: json.dumps(row[name], allow_nan=False) for name in DOCUMENTS}}


def _from_texts(row: _Row) -> _Row:
    documents = {name: row[name] for name in DOCUMENTS if row.get(name) is not None}
    return {**row, **{name: _parse_json(text) for name, text in documents.items()}}


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
        while batch := [_as_texts(row) for row in itertools.islice(remaining, 2000)]:
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))


def _read_parquet(path: Path) -> Iterator[_Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # A column that is not buffered is unpacked page by page, not a row group at once.
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            # Such a batch has each value once; its rows would take far more memory.
            if shared := [c.name for c in file.schema_arrow if pa.types.is_dictionary(c.type)]:
                raise InputError(
                    f"its columns {', '.join(shared)} are dictionaries; write plain ones"
                )
            for batch in file.iter_batches(batch_size=_BATCH):
                if batch.nbytes > MAX_BATCH_BYTES:
                    limit_mib = MAX_BATCH_BYTES >> 20
                    raise InputError(f"{_BATCH} of its rows take more than {limit_mib} MiB")
                yield from map(_from_texts, batch.to_pylist())
    except (pa.ArrowException, OSError, MemoryError) as error:
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


RecordMany = Callable[[Iterable[Measurement]], int]
"""Type of `Measurements.record_many`."""


def import_file(record_many: RecordMany, path: Path) -> ImportReport:
    """Record the measurements of an export, of the profiler or of a training callback.

    Raises:
        InputError: The file or one of its rows is invalid; nothing was recorded.
        StoreError: The store cannot be written; importing again completes it.
    """
    return record_rows(record_many, path.name, "TraPPM", lambda: read_file(path))


def record_rows(
    record_many: RecordMany, file: str, source: str, read: Callable[[], Iterable[ParsedRow]]
) -> ImportReport:
    """Record the measurements of parsed rows, all of which are checked first.

    Args:
        record_many: Records measurements and returns the number of new ones.
        file: Name of the file, for the report.
        source: Name of its source, for the report.
        read: Returns the parsed rows; it is called twice.

    Raises:
        InputError: A row is invalid; nothing was recorded.
        StoreError: The store cannot be written; importing again completes it.
    """
    reasons = Counter((row.kind, row.reason) for row in read())
    counts: Counter[str] = Counter()
    for (kind, _), count in reasons.items():
        counts[kind] += count
    new = record_many(v.measurement for v in read() if v.measurement is not None)
    return ImportReport(
        file=file,
        source=source,
        rows=counts.total(),
        new=new,
        counts=dict(counts),
        reasons=dict(reasons.most_common()),
    )
