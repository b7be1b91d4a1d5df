"""Kernel measurements to and from JSON lines, as `trappm device characterise --out` writes them.

Whoever wrote a file may be wrong or worse, so every value that comes in is checked: its type, range
and length. One bad line refuses the file, with nothing recorded.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from trappm.profiler.errors import InputError, one_line
from trappm.profiler.files.whole_file import made_whole
from trappm.profiler.kernels.kernel_call import KernelCall
from trappm.profiler.kernels.kernel_measurement import KernelMeasurement
from trappm.profiler.records import Outcome, Protocol, Provenance
from trappm.store.exchange.files import checked_size
from trappm.store.exchange.rows import (
    Amount,
    Name,
    Number,
    Positive,
    as_written,
    first_fault,
    strict_json,
    with_zone,
)
from trappm.store.kernels.measurements import (
    LONGEST_CALL,
    why_environment_not_kept,
    why_not_kept,
)

_MAX_LINE_BYTES = 1 << 20
_MAX_SAMPLES = 10_000


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    call: Annotated[str, Field(max_length=LONGEST_CALL)]
    device: Name
    outcome: Outcome
    protocol: Annotated[Protocol, BeforeValidator(as_written)]
    started_at: Annotated[Name, AfterValidator(with_zone)]
    duration_s: Amount
    attempt_key: Name
    provenance: Provenance
    samples_ms: Annotated[list[Number], Field(max_length=_MAX_SAMPLES)]
    time_ms: Positive | None
    iqr_ms: Amount | None
    power_w: Positive | None
    energy_j: Positive | None
    missing: dict[str, str]
    failed_in: Annotated[str, Field(max_length=16)] | None
    message: Annotated[str, Field(max_length=10_000)] | None
    facts: dict[str, Any]
    environment: dict[str, Any]


def export_kernels(measurements: Iterable[KernelMeasurement], path: Path) -> int:
    """Writes kernel measurements as JSON lines; replaces a file that is there.

    Returns:
        How many.

    Raises:
        InputError: the file cannot be written.
    """
    numbers = itertools.count()
    try:
        with made_whole(path, replace=True) as unfinished, unfinished.open("w") as file:
            for measurement, _ in zip(measurements, numbers, strict=False):
                file.write(json.dumps(measurement.to_dict(), allow_nan=False) + "\n")
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise InputError(f"{path} cannot be written: {reason}") from error
    return next(numbers)


def read_kernels(path: Path) -> Iterator[KernelMeasurement]:
    """The kernel measurements of a file of JSON lines.

    What claims to be measured is `imported` unless its environment is one that a measuring process
    wrote.

    Raises:
        InputError: the file cannot be read, or a line of it cannot be; with its number.
    """
    with checked_size(path).open("rb") as file:
        for number in itertools.count(1):
            line = file.readline(_MAX_LINE_BYTES + 1)
            if not line:
                return
            try:
                measurement = _measurement(line)
            except (InputError, ValueError) as error:
                raise InputError(
                    f"{path.name}, line {number}: {one_line(error)}; nothing was imported"
                ) from error
            yield measurement


def _measurement(line: bytes) -> KernelMeasurement:
    if len(line) > _MAX_LINE_BYTES:
        raise InputError(f"it is longer than {_MAX_LINE_BYTES >> 20} MiB")
    data = strict_json(line.decode())
    if not isinstance(data, dict):
        raise InputError("it is no JSON object")
    try:
        given = _Line.model_validate(data)
    except ValidationError as error:
        raise InputError(first_fault(error)) from error
    values = {name: getattr(given, name) for name in _Line.model_fields}
    values |= {"call": KernelCall.from_text(given.call), "samples_ms": tuple(given.samples_ms)}
    if given.provenance is Provenance.MEASURED and "measuring_version" not in given.environment:
        values["provenance"] = Provenance.IMPORTED
    measurement = KernelMeasurement(**values)
    if reason := why_not_kept(measurement) or why_environment_not_kept(given.environment):
        raise InputError(reason)
    return measurement
