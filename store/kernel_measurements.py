"""Measurements of kernels: in the store, and in files of JSON lines."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from trappm.profiler.errors import InputError, StoreError
from trappm.profiler.host.environment import utc_now
from trappm.profiler.kernels.kernel_call import KernelCall, Operator
from trappm.profiler.kernels.kernel_measurement import KernelMeasurement
from trappm.profiler.records import Outcome, Protocol, Provenance
from trappm.store.engine import insert_new
from trappm.store.files import checked_size, numbered, read_jsonl, write_jsonl, write_whole
from trappm.store.measurements import device_id
from trappm.store.rows import (
    Amount,
    Name,
    Phase,
    Positive,
    ProtocolColumn,
    Samples,
    Time,
    check_texts,
    fingerprint_of,
    first_fault,
    unfit,
)
from trappm.store.schema import DeviceRow, KernelConditionsRow, KernelMeasurementRow
from trappm.store.transactions import Repository, reading, writing

BATCH = 5000
"""Kernels per transaction where there may be more than memory holds."""

LONGEST_CALL = 300
"""Letters of a call's text."""
LONGEST_FINGERPRINT = 64
_MAX_LINE_BYTES = 1 << 20
_MAX_SAMPLES = 10_000
_SAMPLES = np.dtype("<f4")
_Whole = Select[*tuple[Any, ...]]


class KernelRow(BaseModel):
    """A line of a file of kernel measurements, and what one must be to be stored."""

    model_config = ConfigDict(extra="forbid")

    call: Annotated[str, Field(max_length=LONGEST_CALL)]
    device: Name
    outcome: Outcome
    protocol: ProtocolColumn
    started_at: Time
    duration_s: Amount
    attempt_key: Name
    provenance: Provenance
    samples_ms: Annotated[Samples, Field(max_length=_MAX_SAMPLES)]
    time_ms: Positive | None
    iqr_ms: Amount | None
    power_w: Positive | None
    energy_j: Positive | None
    missing: dict[str, str]
    failed_in: Phase | None
    message: str | None
    facts: dict[str, Any]
    environment: dict[str, Any]

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_texts(self)
        if self.outcome is Outcome.OK and self.time_ms is None:
            raise ValueError("its outcome is ok, but there is no time")
        return self


@dataclass(frozen=True)
class TimedStack:
    """A software stack under which kernels of a device were timed."""

    fingerprint: str
    timed_at: str
    """The last time."""
    environment: Mapping[str, Any]

    def is_of(self, fingerprint: str, environment: Mapping[str, Any] | None = None) -> bool:
        """Whether this is the stack of a fingerprint, with which measurements may go.

        How memory is counted belongs to a stack, but of kernels it is not.

        Args:
            fingerprint: of a worker, or of labels.
            environment: of labels.
        """
        own = fingerprint_of({**self.environment, "memory_method": None})
        of_labels = environment and fingerprint_of({**environment, "memory_method": None})
        return fingerprint in (self.fingerprint, own) or own == of_labels


class Kernels(Repository):
    """Every attempt to time a kernel, on every device."""

    @writing
    def record(self, session: Session, measurements: Sequence[KernelMeasurement]) -> None:
        """Keeps the kernels of a run, all or nothing; the same attempt key twice changes nothing.

        Raises:
            StoreError: the store cannot be written, or a measurement is none that can be kept.
        """
        if not measurements:
            return
        environments = {id(m.environment): m.environment for m in measurements}
        for environment in environments.values():
            if fault := why_environment_not_kept(environment):
                raise StoreError(f"the kernels of {measurements[0].device} are not kept: {fault}")
        for measurement in measurements:
            if fault := why_not_kept(measurement):
                raise StoreError(f"the measurement of {measurement.call} is not kept: {fault}")
        conditions: dict[str, dict[str, Any]] = {}
        places: dict[tuple[str, Protocol, int], tuple[int, str]] = {}
        rows = []
        for m in measurements:
            # Those of a run share one environment, which takes longer to hash than all the rest.
            run = m.device, m.protocol, id(m.environment)
            if run not in places:
                shared = {"protocol": m.protocol.to_dict(), "environment": dict(m.environment)}
                name = _hash(shared)
                conditions[name] = {"content_hash": name, **shared}
                fingerprint = fingerprint_of(m.environment)
                places[run] = device_id(session, m.device, fingerprint, m.environment), name
            rows.append(_row(m, *places[run]))
        insert_new(session, KernelConditionsRow, [conditions[name] for name in sorted(conditions)])
        insert_new(session, KernelMeasurementRow, rows)

    def record_many(self, measurements: Iterable[KernelMeasurement]) -> int:
        """As `record`, in batches, each of which is one transaction; how many were new."""
        count = 0
        remaining = iter(measurements)
        while batch := [*itertools.islice(remaining, BATCH)]:
            keys = {m.attempt_key for m in batch}
            count += len(keys) - self._known(keys)
            self.record(batch)
        return count

    @reading
    def _known(self, session: Session, keys: Collection[str]) -> int:
        """Return how many of these attempts are recorded already."""
        query = select(func.count()).where(KernelMeasurementRow.attempt_key.in_([*keys]))
        return session.scalar(query) or 0

    @reading
    def all(
        self,
        session: Session,
        *,
        device: str | None = None,
        operator: Operator | None = None,
        outcome: Outcome | None = None,
        limit: int | None = None,
    ) -> list[KernelMeasurement]:
        """Those of a device (under any stack), of an operator, of an outcome; oldest first."""
        query = _query(device, operator, outcome).limit(limit)
        return [_measurement(*row) for row in session.execute(query)]

    def each(self, *, device: str | None = None) -> Iterator[KernelMeasurement]:
        """The same, a few at a time, of one transaction that is not tried again."""
        query = _query(device, None, None).execution_options(yield_per=BATCH)
        with self._database.reading() as session:
            for row in session.execute(query):
                yield _measurement(*row)

    @reading
    def devices(self, session: Session) -> dict[str, int]:
        """How many kernels were measured on each device, failed ones included, by its key."""
        query = (
            select(DeviceRow.key, func.count())
            .join(KernelMeasurementRow, KernelMeasurementRow.device_id == DeviceRow.id)
            .group_by(DeviceRow.key)
            .order_by(DeviceRow.key)
        )
        return {row[0]: row[1] for row in session.execute(query)}

    @reading
    def newest(self, session: Session, device: str) -> list[TimedStack]:
        """The software stacks under which kernels of a device were timed; good attempts count."""
        query = (
            select(
                DeviceRow.fingerprint,
                func.max(KernelMeasurementRow.started_at),
                func.max(DeviceRow.id),
            )
            .join(KernelMeasurementRow, KernelMeasurementRow.device_id == DeviceRow.id)
            .where(DeviceRow.key == device, KernelMeasurementRow.outcome == Outcome.OK)
            .group_by(DeviceRow.fingerprint)
        )
        rows = session.execute(query).all()
        environments = {
            row.id: row.environment
            for row in session.scalars(select(DeviceRow).where(DeviceRow.key == device))
        }
        return [TimedStack(stack, at, environments[id_]) for stack, at, id_ in rows]

    @reading
    def latest(
        self, session: Session, device: str, fingerprint: str | None = None
    ) -> list[KernelMeasurement]:
        """What is known of a device: of each call the last `ok` attempt, or the last one.

        Of several software stacks that of this fingerprint counts, or of the last attempt.

        Raises:
            InputError: no kernel was measured on it; the message says on which there were.
        """
        last = (
            select(KernelMeasurementRow.device_id)
            .join(DeviceRow, DeviceRow.id == KernelMeasurementRow.device_id)
            .where(DeviceRow.key == device)
            .order_by(KernelMeasurementRow.started_at.desc(), KernelMeasurementRow.id.desc())
            .limit(1)
        )
        if fingerprint is not None:
            last = last.where(DeviceRow.fingerprint == fingerprint)
        stack = session.scalar(last)
        if stack is None:
            known = session.scalars(
                select(DeviceRow.key)
                .join(KernelMeasurementRow, KernelMeasurementRow.device_id == DeviceRow.id)
                .distinct()
            ).all()
            there = f"; there are some of {', '.join(sorted(known))}" if known else ""
            raise InputError(
                f"no kernels of {device!r} are known{there}; measure them: "
                f"trappm measure --kernels --device {device}"
            )
        query = _query(device, None, None).where(KernelMeasurementRow.device_id == stack)
        latest: dict[str, tuple[Any, ...]] = {}
        for row in session.execute(query):
            before = latest.get(row[0].call)
            if (
                before is None
                or row[0].outcome is Outcome.OK
                or before[0].outcome is not Outcome.OK
            ):
                latest[row[0].call] = tuple(row)
        return [_measurement(*row) for row in latest.values()]


def why_environment_not_kept(environment: Mapping[str, Any]) -> str | None:
    """Return why an environment cannot be stored, or None if it can."""
    if reason := unfit(environment):
        return f"environment has {reason}"
    if len(fingerprint_of(environment)) > LONGEST_FINGERPRINT:
        return f"its stack's fingerprint is longer than {LONGEST_FINGERPRINT} letters"
    return None


def recordable(measurement: KernelMeasurement) -> KernelMeasurement:
    """Return the measurement if it can be stored, else a failed attempt with the reason.

    One invalid kernel does not refuse its run. The environment is that of the whole run.
    """
    fault = why_not_kept(measurement)
    if fault is None:
        return measurement
    return KernelMeasurement(
        call=measurement.call,
        device=measurement.device,
        outcome=Outcome.ERROR,
        protocol=measurement.protocol,
        started_at=utc_now(),
        duration_s=0.0,
        provenance=measurement.provenance,
        failed_in="record",
        message=f"what was measured cannot be recorded: {ascii(fault)[1:-1]}",
        environment=measurement.environment,
    )


def why_not_kept(measurement: KernelMeasurement) -> str | None:
    """Return why a measurement cannot be stored, except for its environment, or None."""
    try:
        KernelRow.model_validate({**measurement.to_dict(), "environment": {}})
    except ValidationError as error:
        return first_fault(error)
    return None


def _query(device: str | None, operator: Operator | None, outcome: Outcome | None) -> _Whole:
    query: _Whole = (
        select(KernelMeasurementRow, KernelConditionsRow, DeviceRow.key)
        .join(
            KernelConditionsRow,
            KernelConditionsRow.content_hash == KernelMeasurementRow.conditions_hash,
        )
        .join(DeviceRow, DeviceRow.id == KernelMeasurementRow.device_id)
        .order_by(KernelMeasurementRow.id)
    )
    if device is not None:
        query = query.where(DeviceRow.key == device)
    if operator is not None:
        query = query.where(KernelMeasurementRow.operator == operator.value)
    if outcome is not None:
        query = query.where(KernelMeasurementRow.outcome == outcome)
    return query


def _hash(shared: Mapping[str, Any]) -> str:
    text = json.dumps(shared, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _row(m: KernelMeasurement, device: int, conditions: str) -> dict[str, Any]:
    call = m.call
    return {
        "attempt_key": m.attempt_key,
        "device_id": device,
        "conditions_hash": conditions,
        "call": call.text,
        "operator": call.operator.value,
        "data_type": call.data_type.value,
        "memory_format": call.memory_format.value,
        "direction": call.direction.value,
        "tf32": call.tf32,
        "provenance": m.provenance,
        "outcome": m.outcome,
        "failed_in": m.failed_in,
        "message": m.message,
        "started_at": m.started_at,
        "duration_s": m.duration_s,
        "samples_ms": np.asarray(m.samples_ms, dtype=_SAMPLES).tobytes(),
        "time_ms": m.time_ms,
        "iqr_ms": m.iqr_ms,
        "power_w": m.power_w,
        "energy_j": m.energy_j,
        "missing": dict(m.missing),
        "facts": dict(m.facts),
    }


def _measurement(
    row: KernelMeasurementRow, conditions: KernelConditionsRow, device: str
) -> KernelMeasurement:
    return KernelMeasurement(
        call=KernelCall.from_text(row.call),
        device=device,
        outcome=row.outcome,
        protocol=Protocol(**conditions.protocol),
        started_at=row.started_at,
        duration_s=row.duration_s,
        attempt_key=row.attempt_key,
        provenance=row.provenance,
        samples_ms=tuple(np.frombuffer(row.samples_ms, dtype=_SAMPLES).tolist()),
        time_ms=row.time_ms,
        iqr_ms=row.iqr_ms,
        power_w=row.power_w,
        energy_j=row.energy_j,
        missing=row.missing,
        failed_in=row.failed_in,
        message=row.message,
        facts=row.facts,
        environment=conditions.environment,
    )


def export_kernels(measurements: Iterable[KernelMeasurement], path: Path) -> int:
    """Write kernel measurements as JSON lines, and return their number.

    Raises:
        InputError: The file cannot be written.
    """
    return write_whole(path, measurements, KernelMeasurement.to_dict, write_jsonl)


def read_kernels(path: Path) -> Iterator[KernelMeasurement]:
    """Return the kernel measurements of a file of JSON lines.

    A measurement becomes `imported` unless its environment was written by a measuring process.

    Raises:
        InputError: The file or a line is invalid; the message has the line's number.
    """
    lines = read_jsonl(checked_size(path), _MAX_LINE_BYTES)
    return numbered(path, "line", lines, _measurement_of_line)


def _measurement_of_line(line: dict[str, Any]) -> KernelMeasurement:
    try:
        given = KernelRow.model_validate(line)
    except ValidationError as error:
        raise InputError(first_fault(error)) from error
    values = {name: getattr(given, name) for name in KernelRow.model_fields}
    values |= {"call": KernelCall.from_text(given.call), "samples_ms": tuple(given.samples_ms)}
    if given.provenance is Provenance.MEASURED and "measuring_version" not in given.environment:
        values["provenance"] = Provenance.IMPORTED
    if reason := why_environment_not_kept(given.environment):
        raise InputError(reason)
    return KernelMeasurement(**values)
