"""Measurements as rows of the database, there and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from sqlalchemy import Select, select

from trappm.profiler.records import Measurement, Protocol, StepSummary
from trappm.store.db.models import ConfigurationRow, DeviceRow, MeasurementRow
from trappm.store.records import Assignment
from trappm.store.repositories.workloads import configuration_of

_SAMPLES = np.dtype("<f4")
_NO_STEP = dict.fromkeys((f.name for f in fields(StepSummary)), None)

WHOLE: Select[*tuple[Any, ...]] = (
    select(MeasurementRow, ConfigurationRow, DeviceRow.key)
    .join(ConfigurationRow, ConfigurationRow.id == MeasurementRow.configuration_id)
    .join(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
)
"""Measurements with what `measurement_of_row` needs."""


def row_values(
    measurement: Measurement, device_id: int, assignment: Assignment | None
) -> dict[str, Any]:
    step = measurement.step
    return {
        "attempt_key": measurement.attempt_key,
        "configuration_id": measurement.configuration.id,
        "device_id": device_id,
        "protocol_name": measurement.protocol.name,
        "protocol": vars(measurement.protocol),
        "campaign_id": None if assignment is None else assignment.campaign_id,
        "assignment_id": None if assignment is None else assignment.id,
        "provenance": measurement.provenance,
        "outcome": measurement.outcome,
        "failed_in": measurement.failed_in,
        "message": measurement.message,
        "started_at": measurement.started_at,
        "duration_s": measurement.duration_s,
        "step_samples_ms": np.asarray(measurement.step_samples_ms, dtype=_SAMPLES).tobytes(),
        **{f"step_{k}": v for k, v in (_NO_STEP if step is None else vars(step)).items()},
        "memory_mib": measurement.memory_mib,
        "power_w": measurement.power_w,
        "energy_j": measurement.energy_j,
        "memory_detail_mib": dict(measurement.memory_detail_mib),
        "missing": dict(measurement.missing),
        "environment": dict(measurement.environment),
    }


def measurement_of_row(
    row: MeasurementRow, configuration: ConfigurationRow, device: str
) -> Measurement:
    return Measurement(
        configuration=configuration_of(configuration),
        device=device,
        outcome=row.outcome,
        protocol=Protocol(**row.protocol),
        started_at=row.started_at,
        duration_s=row.duration_s,
        attempt_key=row.attempt_key,
        provenance=row.provenance,
        step_samples_ms=tuple(np.frombuffer(row.step_samples_ms, dtype=_SAMPLES).tolist()),
        step=_step(row),
        memory_mib=row.memory_mib,
        power_w=row.power_w,
        energy_j=row.energy_j,
        memory_detail_mib=row.memory_detail_mib,
        missing=row.missing,
        failed_in=row.failed_in,
        message=row.message,
        environment=row.environment,
    )


def _step(row: MeasurementRow) -> StepSummary | None:
    """The summary; a constraint keeps its four times together."""
    values = {name: getattr(row, f"step_{name}") for name in _NO_STEP}
    return None if row.step_median_ms is None else StepSummary(**values)
