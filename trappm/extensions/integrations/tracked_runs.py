"""Labels from finished runs of an experiment tracker, such as MLflow or Weights & Biases."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.extensions.integrations.training_watch import PROTOCOL
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.errors import InputError
from trappm.profiler.files.json_lines import JsonLines
from trappm.profiler.records import (
    Configuration,
    Measurement,
    Outcome,
    Provenance,
    StepSummary,
    is_cpu_device,
)
from trappm.profiler.records.step_scope import RECORDED

if TYPE_CHECKING:
    import pandas as pd

_FIGURES = ("step_time_ms", "memory_mib")
_SETTINGS = tuple(setting.name for setting in fields(Configuration))
_UNKNOWN = "the run does not have it"
_UNTOLD_TIME = "1970-01-01T00:00:00+00:00"


def write_runs(
    runs: pd.DataFrame, file: str | Path, columns: Mapping[str, str], **shared: Any
) -> int:
    """Append a record for each run to a file, for `trappm labels import`.

    As all steps recorded in a training, they are kept apart: no model learns from them. Importing a
    run twice has no effect.

    Args:
        runs: One run per row: `mlflow.search_runs()`, or a CSV export of W&B, read by pandas.
        file: JSON lines.
        columns: Column of each setting or figure: the fields of `Configuration`, `device`,
            `step_time_ms` (the median of steps after warm-up) and `memory_mib` (the peak).
        **shared: Settings that all runs have, such as `device="a100"`.

    Returns:
        Number of records; runs without a figure, such as failed ones, have none.

    Raises:
        InputError: An unknown field or column, or a run with a wrong value; with the run's row.
    """
    names = {*_SETTINGS, *_FIGURES, "device"}
    if unknown := {*columns, *shared} - names:
        raise InputError(f"unknown: {', '.join(sorted(unknown))}; fields: {', '.join(names)}")
    if missing := set(columns.values()) - set(runs.columns):
        raise InputError(f"the runs lack the columns {', '.join(sorted(missing))}")
    records = []
    for at, row in enumerate(runs.to_dict("records")):
        values = {name: row[column] for name, column in columns.items()} | shared
        try:
            figures = {name: _number(name, values.get(name)) for name in _FIGURES}
            if any(figures.values()):
                records.append(_record(row, values, figures))
        except (InputError, KeyError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise InputError(f"row {at} of the runs: {reason}; nothing was written") from error
    with JsonLines(Path(file), Measurement) as lines:
        for record in records:
            lines.append(record)
    return len(records)


def _record(
    row: Mapping[Any, Any], values: Mapping[str, Any], figures: Mapping[str, float | None]
) -> Measurement:
    named = str(values["device"])
    device = named if is_cpu_device(named) else read_name(named).key
    settings = {name: values[name] for name in _SETTINGS if name in values}
    for size in ("batch_size", "input_size"):
        settings[size] = int(_number(size, values[size]) or 0)
    step_ms = figures["step_time_ms"]
    identity = sorted((str(key), str(value)) for key, value in row.items())
    return Measurement(
        configuration=Configuration(**settings),
        device=device,
        outcome=Outcome.OK,
        protocol=PROTOCOL,
        started_at=str(row.get("start_time", _UNTOLD_TIME)).replace(" ", "T"),
        duration_s=0.0,
        attempt_key=hashlib.sha256(repr(identity).encode()).hexdigest()[:32],
        provenance=Provenance.IMPORTED,
        step=None
        if step_ms is None
        else StepSummary(median_ms=step_ms, mean_ms=step_ms, iqr_ms=0.0, p95_ms=step_ms),
        memory_mib=figures["memory_mib"],
        missing={
            **{name: _UNKNOWN for name, value in figures.items() if value is None},
            **dict.fromkeys(("power_w", "energy_j", "step_spread", "duration_s"), _UNKNOWN),
        },
        environment={"device": device, "device_name": named, "source": RECORDED},
    )


def _number(name: str, value: object) -> float | None:
    """Return the number above 0 of a cell; None if it is empty."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    try:
        number = float(str(value))
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise InputError(f"{name} is {value!r}; it must be a number above 0")
    return number
