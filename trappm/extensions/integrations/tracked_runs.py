"""Labels from finished runs of an experiment tracker, such as MLflow or Weights & Biases."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.extensions.integrations.training_watch import PROTOCOL, checked_name
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.errors import InputError, TrappmError
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
_SIZES = ("batch_size", "input_size")
_SETTINGS = tuple(setting.name for setting in fields(Configuration))
_FIELDS = ("device", *_SETTINGS, *_FIGURES)
_STATES, _IDS = ("status", "State"), ("run_id", "ID", "Name")
"""Columns of MLflow and W&B."""
_UNKNOWN = "the run does not have it"
_UNKNOWN_TIME = "1970-01-01T00:00:00+00:00"


def write_runs(
    runs: pd.DataFrame, file: str | Path, columns: Mapping[str, str], **shared: Any
) -> int:
    """Append a record for each finished run to a file, for `trappm labels import`.

    No model learns from these labels, as from all labels with the protocol `in-training`. Importing
    a run again has no effect unless its settings or figures differ.

    Args:
        runs: One run per row: `mlflow.search_runs()`, or a CSV export of W&B, read by pandas.
        file: JSON lines.
        columns: Column of each setting or figure: the fields of `Configuration`, `device`,
            `step_time_ms` (the median of steps after warm-up) and `memory_mib` (the peak).
        **shared: Settings that all runs have, such as `device="a100"`. Settings without a value
            have the defaults of `Configuration`, such as fp32.

    Returns:
        Number of records; runs that failed, or without a figure, have none.

    Raises:
        InputError: An unknown field or column, or a run with a wrong or missing value.
    """
    if wrong := {*columns, *shared} - {*_FIELDS}:
        raise InputError(f"unknown: {', '.join(sorted(wrong))}; fields: {', '.join(_FIELDS)}")
    if twice := columns.keys() & shared.keys():
        raise InputError(f"{', '.join(sorted(twice))} has a column and a shared value; keep one")
    if not columns.keys() & {*_FIGURES}:
        raise InputError(f"no figure has a column; name one for {' or '.join(_FIGURES)}")
    if runs.empty:
        return 0
    if missing := {*columns.values()} - {*runs.columns}:
        raise InputError(f"the runs lack the columns {', '.join(sorted(missing))}")
    records = []
    cells = runs.astype(object).where(runs.notna(), None)
    for at, row in enumerate(cells.to_dict("records")):
        states = [str(row[column]).lower() for column in _STATES if row.get(column) is not None]
        values = {field: row[column] for field, column in columns.items()} | shared
        values = {field: value for field, value in values.items() if value is not None}
        if values.keys().isdisjoint(_FIGURES) or any(state != "finished" for state in states):
            continue
        try:
            records.append(_record(row, values))
        except TrappmError as error:
            raise InputError(f"row {at} of the runs: {error}; nothing was written") from error
    if records:
        with JsonLines(Path(file), Measurement) as lines:
            for record in records:
                lines.append(record)
    return len(records)


def _record(row: Mapping[Any, Any], values: Mapping[str, Any]) -> Measurement:
    for field in ("device", "architecture", *_SIZES):
        if field not in values:
            raise InputError(f"{field} is missing; give a column or a value for all runs")
    named = str(values["device"])
    device = named if is_cpu_device(named) else read_name(named).key
    settings = {field: values[field] for field in _SETTINGS if field in values}
    settings["architecture"] = checked_name(str(values["architecture"]))
    settings |= {size: int(_number(size, values[size], whole=True)) for size in _SIZES}
    configuration = Configuration(**settings)
    figures = {name: _number(name, values[name]) for name in _FIGURES if name in values}
    step_ms = figures.get("step_time_ms")
    step = None
    if step_ms is not None:
        step = StepSummary(median_ms=step_ms, mean_ms=step_ms, iqr_ms=0.0, p95_ms=step_ms)
    run = next((row[column] for column in _IDS if row.get(column) is not None), None)
    identity = f"{run} {configuration.id} {device} {sorted(figures.items())}"
    begun = row.get("start_time")
    unknown = {*_FIGURES, "power_w", "energy_j", "step_spread", "duration_s"} - {*figures}
    return Measurement(
        configuration=configuration,
        device=device,
        outcome=Outcome.OK,
        protocol=PROTOCOL,
        started_at=begun.isoformat() if isinstance(begun, datetime) else _UNKNOWN_TIME,
        duration_s=0.0,
        attempt_key=hashlib.sha256(identity.encode()).hexdigest()[:32],
        provenance=Provenance.IMPORTED,
        step=step,
        memory_mib=figures.get("memory_mib"),
        missing=dict.fromkeys(sorted(unknown), _UNKNOWN),
        environment={"device": device, "device_name": named, "source": RECORDED},
    )


def _number(name: str, value: object, *, whole: bool = False) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf or (whole and number % 1):
        kind = "whole number" if whole else "number"
        raise InputError(f"{name} is {value!r}; it must be a {kind} above 0")
    return number
