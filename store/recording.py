"""Recording measurements: every attempt once, and the label that an accepted one makes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from profiler.environment import stack_fingerprint
from profiler.errors import InputError, StoreError
from profiler.records import Measurement, Outcome, Protocol, Provenance, StepSummary
from store.database import Database, insert_new, new_row, utc_now
from store.leases import MAX_ATTEMPTS, count_failure, end_lease
from store.records import AssignmentState, Recorded
from store.schema import (
    AssignmentLabelRow,
    AssignmentRow,
    ConfigurationRow,
    DeviceRow,
    LabelRow,
    MeasurementRow,
)
from store.workloads import configuration_of, insert_configurations

_FINAL = {Outcome.OK, Outcome.OOM, Outcome.UNSUPPORTED}
"""Trying again would end the same way."""

_MAX_TIMEOUTS = 2
"""What runs into its time limit may have met a busy machine once, but costs too much thrice."""

_SAMPLES = np.dtype("<f4")


class Recording(Database):
    """The part of the store that takes measurements in."""

    def record(
        self,
        measurement: Measurement,
        *,
        assignment_id: str | None = None,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> Recorded:
        """Keeps an attempt, makes its label and settles its assignment, all or nothing.

        Recording an attempt key twice changes nothing. The first label of a configuration, device
        stack and protocol stays, except that a measured one takes the place of one that is not.
        A metric that cannot be (0 or less, or no number) is kept as missing, with the reason.

        Args:
            measurement: of a lease, under its `Assignment.attempt_key`: a bad outcome that comes
                in after its lease was lost is kept, but does not take the lease from another.
            assignment_id: what it was measured for.
            max_attempts: after so many failures the assignment is given up.

        Raises:
            StoreError: the store cannot be written, the assignment is of something else, or the
                step times cannot be.
        """
        measurement = _with_possible_metrics(measurement)
        with self._writing() as session:
            assignment = _assignment_of(session, measurement, assignment_id)
            insert_configurations(session, [measurement.configuration])
            device_id = _device_id(session, measurement)
            values = _row_values(measurement, device_id, assignment)
            measurement_id = session.scalar(
                new_row(session, MeasurementRow).values(values).returning(MeasurementRow.id)
            )
            if measurement_id is None:
                return _recorded_before(session, measurement, device_id)
            label_id = None
            if measurement.outcome is Outcome.OK:
                label_id = _label_id(session, measurement, device_id, measurement_id)
            if assignment is not None:
                _settle(session, assignment, measurement, label_id, max_attempts)
            return Recorded(measurement_id=measurement_id, label_id=label_id, is_new=True)

    def measurement(self, measurement_id: int) -> Measurement:
        """An attempt with its raw samples, which are kept to float32 precision.

        Raises:
            InputError: there is none of this id.
        """
        query = (
            select(MeasurementRow, ConfigurationRow, DeviceRow.key)
            .join(ConfigurationRow, ConfigurationRow.id == MeasurementRow.configuration_id)
            .join(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
            .where(MeasurementRow.id == measurement_id)
        )
        with self._reading() as session:
            found = session.execute(query).one_or_none()
            if found is None:
                raise InputError(f"no measurement has the id {measurement_id}")
            return _measurement(*found)


def _assignment_of(
    session: Session, measurement: Measurement, assignment_id: str | None
) -> AssignmentRow | None:
    """The assignment, locked until the transaction ends."""
    if assignment_id is None:
        return None
    row = session.get(AssignmentRow, assignment_id, with_for_update=True)
    if row is None:
        raise StoreError(f"there is no assignment {assignment_id!r} to record a measurement for")
    if (row.configuration_id, row.device_key) != (measurement.configuration.id, measurement.device):
        raise StoreError(
            f"a measurement of {measurement.configuration} on {measurement.device} was handed in "
            f"for assignment {assignment_id}, which is of something else"
        )
    return row


def _device_id(session: Session, measurement: Measurement) -> int:
    environment = dict(measurement.environment)
    fingerprint = environment.get("stack_fingerprint") or stack_fingerprint(environment)
    device = {"key": measurement.device, "fingerprint": fingerprint}
    insert_new(session, DeviceRow, [{**device, "environment": environment}])
    return session.scalars(select(DeviceRow.id).filter_by(**device)).one()


def _recorded_before(session: Session, measurement: Measurement, device_id: int) -> Recorded:
    key, label_id = measurement.attempt_key, None
    if measurement.outcome is Outcome.OK:
        place = _label_place(measurement, device_id)
        label_id = session.scalars(select(LabelRow.id).filter_by(**place)).one()
    return Recorded(
        measurement_id=session.scalars(select(MeasurementRow.id).filter_by(attempt_key=key)).one(),
        label_id=label_id,
        is_new=False,
    )


def _label_place(measurement: Measurement, device_id: int) -> dict[str, Any]:
    """What there is one label for."""
    return {
        "configuration_id": measurement.configuration.id,
        "device_id": device_id,
        "protocol_name": measurement.protocol.name,
    }


def _label_id(
    session: Session, measurement: Measurement, device_id: int, measurement_id: int
) -> int:
    """The label for this accepted measurement: a new one, or the one that is there."""
    place = _label_place(measurement, device_id)
    result = {
        "measurement_id": measurement_id,
        "provenance": measurement.provenance,
        "step_time_ms": measurement.step_time_ms,
        "memory_mib": measurement.memory_mib,
        "power_w": measurement.power_w,
        "energy_j": measurement.energy_j,
        "created_at": utc_now(),
    }
    insert_new(session, LabelRow, [place | result])
    if measurement.provenance is Provenance.MEASURED:
        session.execute(
            update(LabelRow)
            .filter_by(**place)
            .where(LabelRow.provenance != Provenance.MEASURED)
            .values(result)
        )
    return session.scalars(select(LabelRow.id).filter_by(**place)).one()


def _settle(
    session: Session,
    assignment: AssignmentRow,
    measurement: Measurement,
    label_id: int | None,
    max_attempts: int,
) -> None:
    if assignment.state is AssignmentState.DONE:
        return
    if measurement.outcome in _FINAL:
        end_lease(assignment, AssignmentState.DONE)
        if label_id is not None:
            session.add(AssignmentLabelRow(assignment_id=assignment.id, label_id=label_id))
    elif measurement.attempt_key == f"{assignment.id}-{assignment.attempts}" and (
        assignment.state is AssignmentState.LEASED
    ):
        timed_out = measurement.outcome is Outcome.TIMEOUT
        count_failure(assignment, min(max_attempts, _MAX_TIMEOUTS) if timed_out else max_attempts)


def _with_possible_metrics(measurement: Measurement) -> Measurement:
    step = measurement.step
    if step is not None and not (0 < step.median_ms < math.inf and 0 < step.p95_ms < math.inf):
        raise StoreError(
            f"{measurement.configuration} on {measurement.device} was measured at {step}, "
            "which cannot be; this is a fault of the profiler"
        )
    changes: dict[str, Any] = {}
    missing = dict(measurement.missing)
    for name in ("memory_mib", "power_w", "energy_j"):
        value = getattr(measurement, name)
        if value is not None and not 0 < value < math.inf:
            changes[name] = None
            missing[name] = f"measured as {value}, which cannot be"
    return replace(measurement, missing=missing, **changes) if changes else measurement


def _row_values(
    measurement: Measurement, device_id: int, assignment: AssignmentRow | None
) -> dict[str, Any]:
    step = measurement.step
    return {
        "attempt_key": measurement.attempt_key,
        "configuration_id": measurement.configuration.id,
        "device_id": device_id,
        "protocol_name": measurement.protocol.name,
        "protocol": measurement.protocol.to_dict(),
        "campaign_id": None if assignment is None else assignment.campaign_id,
        "assignment_id": None if assignment is None else assignment.id,
        "provenance": measurement.provenance,
        "outcome": measurement.outcome,
        "failed_in": measurement.failed_in,
        "message": measurement.message,
        "started_at": measurement.started_at,
        "duration_s": measurement.duration_s,
        "step_samples_ms": np.asarray(measurement.step_samples_ms, dtype=_SAMPLES).tobytes(),
        "step_median_ms": None if step is None else step.median_ms,
        "step_mean_ms": None if step is None else step.mean_ms,
        "step_iqr_ms": None if step is None else step.iqr_ms,
        "step_p95_ms": None if step is None else step.p95_ms,
        "memory_mib": measurement.memory_mib,
        "power_w": measurement.power_w,
        "energy_j": measurement.energy_j,
        "memory_detail_mib": dict(measurement.memory_detail_mib),
        "missing": dict(measurement.missing),
        "environment": dict(measurement.environment),
    }


def _measurement(row: MeasurementRow, configuration: ConfigurationRow, device: str) -> Measurement:
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
    """The summary; a constraint keeps its four numbers together."""
    if (
        row.step_median_ms is None
        or row.step_mean_ms is None
        or row.step_iqr_ms is None
        or row.step_p95_ms is None
    ):
        return None
    return StepSummary(
        median_ms=row.step_median_ms,
        mean_ms=row.step_mean_ms,
        iqr_ms=row.step_iqr_ms,
        p95_ms=row.step_p95_ms,
    )
