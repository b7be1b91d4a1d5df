"""Files of measured steps: a table that a user writes, or labels of TraPPM.

A table has a row per step, with columns named as the arguments and results of `trappm.predict`. A
malformed file is refused as a whole.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trappm.profiler.errors import InputError, nearest
from trappm.profiler.files import read_plain
from trappm.profiler.records import (
    MAX_SIZE,
    Execution,
    Measurement,
    MemoryFormat,
    Optimizer,
    Outcome,
    Phase,
    Precision,
    Provenance,
    StepSettings,
)
from trappm.store.files import Positive, check_size, first_fault, read_file

MAX_BYTES = 1 << 20
MAX_STEPS = 100
"""Largest number of steps: each is left out once. A campaign learns from more."""
SAME_COLUMNS = {"architecture": "model", "sequence_length": "input_size"}
"""Other names of columns: those of `trappm labels query`, and of options."""

_Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
_Amount = Annotated[Positive, Field(strict=False, allow_inf_nan=False)]


class MeasuredStep(BaseModel):
    """A step that the user measured, with its settings; the columns of a table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[str, Field(min_length=1, max_length=200)]
    batch_size: _Size
    input_size: _Size | None = None
    """Pixels or tokens; None for the model's default."""
    phase: Phase = Phase.TRAIN
    precision: Precision = Precision.FP32
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    optimizer: Optimizer = Optimizer.SGD
    execution: Execution = Execution.EAGER
    device: str | None = None
    step_time_ms: _Amount | None = None
    memory_mib: _Amount | None = None
    """GPU memory of the whole process."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.step_time_ms is None and self.memory_mib is None:
            raise ValueError("it has neither step_time_ms nor memory_mib")
        return self

    @property
    def settings(self) -> StepSettings:
        return StepSettings(self.precision, self.memory_format, self.optimizer)

    def value(self, metric: str) -> float | None:
        """Return a metric by its name, in its unit; None if it was not measured."""
        return {"step_time_ms": self.step_time_ms, "memory_mib": self.memory_mib}[metric]

    def __str__(self) -> str:
        return f"{self.model} batch {self.batch_size}"


COLUMNS = tuple(MeasuredStep.model_fields)


class Unusable(NamedTuple):
    """A row of a file that has no part in a calibration."""

    row: int
    reason: str

    def __str__(self) -> str:
        return f"row {self.row} is left out: {self.reason}"


class Row(NamedTuple):
    """A step in a file."""

    number: int
    """Number of the row, from 1, without the header."""
    step: MeasuredStep
    provenance: Provenance


def read_steps(path: Path) -> tuple[list[Row], list[Unusable]]:
    """Return the steps of a file, and its attempts that failed or were simulated.

    Raises:
        InputError: The file cannot be read, a row is malformed, or there are too many.
    """
    rows, unusable = list[Row](), list[Unusable]()
    read = _of_table if path.suffix == ".csv" else _of_labels
    for number, parsed in enumerate(read(path), 1):
        if number > MAX_STEPS:
            raise InputError(
                f"{path.name} has more than {MAX_STEPS} steps; give fewer, or learn from all of "
                "them in a campaign: trappm campaign launch"
            )
        if isinstance(parsed, str):
            unusable.append(Unusable(number, parsed))
        else:
            rows.append(Row(number, *parsed))
    return rows, unusable


def _of_table(path: Path) -> Iterator[tuple[MeasuredStep, Provenance]]:
    text = read_plain(path, MAX_BYTES).decode("utf-8-sig", errors="replace")
    lines = csv.reader(text.splitlines(), skipinitialspace=True)
    try:
        header = [SAME_COLUMNS.get(name.strip(), name.strip()) for name in next(lines, [])]
        _check_header(path, header)
        for cells in filter(any, lines):
            if len(cells) != len(header):
                raise InputError(
                    f"{path.name}, line {lines.line_num}: it has {len(cells)} cells, and the "
                    f"header has {len(header)}"
                )
            values = {n: c.strip() for n, c in zip(header, cells, strict=True) if c.strip()}
            yield _step(values, f"{path.name}, line {lines.line_num}"), Provenance.IMPORTED
    except csv.Error as error:
        raise InputError(f"{path.name}, line {lines.line_num}: {error}") from error


def _check_header(path: Path, header: list[str]) -> None:
    """Raise InputError for unknown, repeated or missing columns."""
    for name in header:
        if name not in COLUMNS:
            hint = nearest(name, COLUMNS, otherwise=f"columns are {', '.join(COLUMNS)}")
            raise InputError(f"{path.name} has an unknown column {name!r}; {hint}")
        if header.count(name) > 1:
            raise InputError(f"{path.name} has the column {name!r} twice; remove one")
    for name in ("model", "batch_size"):
        if name not in header:
            raise InputError(f"{path.name} has no column {name!r}; begin with a line of columns")


def _step(values: Mapping[str, object], place: str) -> MeasuredStep:
    try:
        return MeasuredStep.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{place}: {first_fault(error)}") from error


def _of_labels(path: Path) -> Iterator[tuple[MeasuredStep, Provenance] | str]:
    if path.suffix not in {".jsonl", ".parquet"}:
        raise InputError(f"{path.name} must end in .csv, .jsonl or .parquet")
    for row in read_file(check_size(path)):
        measured = row.measurement
        if measured is None or measured.outcome is not Outcome.OK:
            yield row.reason
        elif measured.provenance is Provenance.SIMULATED:
            yield "it was simulated"
        elif measured.step_time_ms is None and measured.memory_mib is None:
            yield "it has neither step time nor memory"
        else:
            yield _of_measurement(measured), measured.provenance


def _of_measurement(measured: Measurement) -> MeasuredStep:
    settings = measured.configuration.to_dict()
    return MeasuredStep(
        model=settings.pop("architecture"),
        **settings,
        device=measured.device,
        step_time_ms=measured.step_time_ms,
        memory_mib=measured.memory_mib,
    )
