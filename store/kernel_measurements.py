"""Measurements of kernels: in the store, and in files of JSON lines."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from sqlalchemy import Row, Select, func, select
from sqlalchemy.orm import Session

from trappm.profiler.errors import InputError, StoreError
from trappm.profiler.host.environment import utc_now
from trappm.profiler.kernels.kernel_call import KernelCall, KernelMeasurement
from trappm.profiler.records import Outcome, Protocol, Provenance
from trappm.store.engine import insert_new
from trappm.store.files import (
    Amount,
    Name,
    Phase,
    Positive,
    ProtocolColumn,
    Samples,
    Time,
    check_texts,
    checked_size,
    fingerprint_of,
    first_fault,
    numbered,
    read_jsonl,
    unfit,
    write_jsonl,
    write_whole,
)
from trappm.store.measurements import device_id
from trappm.store.records import record_of
from trappm.store.schema import DeviceRow, KernelConditionsRow, KernelMeasurementRow
from trappm.store.transactions import Repository, reading, writing

BATCH = 5000
"""Kernels per transaction of many."""

_SAMPLES = np.dtype("<f4")


class KernelFileRow(BaseModel):
    """Line of a file of kernel measurements; also validates what is recorded."""

    model_config = ConfigDict(extra="forbid")

    call: Annotated[str, Field(max_length=300)]
    device: Name
    outcome: Outcome
    protocol: ProtocolColumn
    started_at: Time
    duration_s: Amount
    attempt_key: Name
    provenance: Provenance
    samples_ms: Annotated[Samples, Field(max_length=10_000)]
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
    """Time of the last measurement."""
    environment: Mapping[str, Any]

    def is_of(self, fingerprint: str, environment: Mapping[str, Any] | None = None) -> bool:
        """Return whether labels or a worker with this fingerprint have this stack.

        The memory method is part of a fingerprint, but does not matter for kernels.

        Args:
            fingerprint: Fingerprint of a worker or of labels.
            environment: Environment of labels.
        """
        own = fingerprint_of({**self.environment, "memory_method": None})
        of_labels = environment and fingerprint_of({**environment, "memory_method": None})
        return fingerprint in (self.fingerprint, own) or own == of_labels


class Kernels(Repository):
    """Every attempt to time a kernel, on every device."""

    @writing
    def record(self, session: Session, measurements: Sequence[KernelMeasurement]) -> None:
        """Record the kernels of a run, all or nothing; a known attempt key changes nothing.

        Measurements of this process are to be `recordable`.

        Raises:
            StoreError: The store cannot be written, or refuses a measurement.
        """
        # Kernels of a run share one environment, which takes longer to hash than all the rest.
        runs: dict[tuple[str, Protocol, int], tuple[int, str]] = {}
        rows = []
        for m in measurements:
            run = m.device, m.protocol, id(m.environment)
            if run not in runs:
                if fault := unfit(m.environment):
                    raise StoreError(f"the environment of {m.call} cannot be stored: {fault}")
                device = device_id(session, m.device, fingerprint_of(m.environment), m.environment)
                runs[run] = device, _conditions(session, m)
            rows.append(_row(m, *runs[run]))
        insert_new(session, KernelMeasurementRow, rows)

    def record_many(self, measurements: Iterable[KernelMeasurement]) -> int:
        """Record kernels in batches, each in one transaction, and return the number of new ones."""
        before = sum(self.devices().values())
        remaining = iter(measurements)
        while batch := [*itertools.islice(remaining, BATCH)]:
            self.record(batch)
        return sum(self.devices().values()) - before

    def each(self, *, device: str | None = None) -> Iterator[KernelMeasurement]:
        """Yield the kernels of a device (of all stacks), or of all devices, oldest first.

        All come from one transaction, which is not retried.
        """
        with self._database.reading() as session:
            query = _query(device).execution_options(yield_per=BATCH)
            yield from map(_measurement, session.execute(query))

    @reading
    def devices(self, session: Session) -> dict[str, int]:
        """Return the number of kernels by device key, failed ones included."""
        query = select(DeviceRow.key, func.count()).join(*_OF_DEVICE)
        query = query.group_by(DeviceRow.key).order_by(DeviceRow.key)
        return {row[0]: row[1] for row in session.execute(query)}

    @reading
    def newest(self, session: Session, device: str) -> list[TimedStack]:
        """Return the software stacks under which kernels of a device were timed successfully."""
        last = func.max(KernelMeasurementRow.started_at)
        query = (
            select(DeviceRow, last)
            .join(*_OF_DEVICE)
            .where(DeviceRow.key == device, KernelMeasurementRow.outcome == Outcome.OK)
            .group_by(DeviceRow.id)
        )
        rows = session.execute(query)
        return [TimedStack(row.fingerprint, at, row.environment) for row, at in rows]

    @reading
    def latest(
        self, session: Session, device: str, fingerprint: str | None = None
    ) -> list[KernelMeasurement]:
        """Return the last successful attempt of each call on a device, or else the last attempt.

        Args:
            device: Device key.
            fingerprint: Software stack; that of the last attempt by default.

        Raises:
            InputError: No kernel was measured on it; the message names devices with kernels.
        """
        row = KernelMeasurementRow
        last = (
            select(row.device_id)
            .join(DeviceRow, DeviceRow.id == row.device_id)
            .where(DeviceRow.key == device)
            .order_by(row.started_at.desc(), row.id.desc())
        )
        if fingerprint is not None:
            last = last.where(DeviceRow.fingerprint == fingerprint)
        stack = session.scalar(last.limit(1))
        if stack is None:
            known = session.scalars(select(DeviceRow.key).join(*_OF_DEVICE).distinct())
            names = ", ".join(sorted(known))
            there = f"; there are some of {names}" if names else ""
            raise InputError(
                f"no kernels of {device!r} are known{there}; measure them: "
                f"trappm measure --kernels --device {device}"
            )
        latest: dict[str, Row[Any]] = {}
        for found in session.execute(_query(device).where(row.device_id == stack)):
            before = latest.get(found.call)
            if before is None or found.outcome is Outcome.OK or before.outcome is not Outcome.OK:
                latest[found.call] = found
        return [_measurement(found) for found in latest.values()]


def recordable(measurement: KernelMeasurement) -> KernelMeasurement:
    """Return the measurement if it can be stored, else a failed attempt with the reason.

    One invalid kernel does not refuse its run. The environment is that of the whole run.
    """
    try:
        KernelFileRow.model_validate({**measurement.to_dict(), "environment": {}})
        return measurement
    except ValidationError as error:
        fault = first_fault(error)
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


_OF_DEVICE = (KernelMeasurementRow, KernelMeasurementRow.device_id == DeviceRow.id)


def _query(device: str | None) -> Select[*tuple[Any, ...]]:
    """Return a query of kernels with the columns that `_measurement` needs, oldest first."""
    row, conditions = KernelMeasurementRow, KernelConditionsRow
    query = (
        select(
            *row.__table__.columns, conditions.protocol, conditions.environment,
            DeviceRow.key.label("device"),
        )
        .join_from(row, conditions, conditions.content_hash == row.conditions_hash)
        .join(DeviceRow, DeviceRow.id == row.device_id)
        .order_by(row.id)
    )  # fmt: skip
    return query if device is None else query.where(DeviceRow.key == device)


def _conditions(session: Session, m: KernelMeasurement) -> str:
    """Return the key of a measurement's conditions, which are inserted if they are new."""
    shared = {"protocol": m.protocol.to_dict(), "environment": dict(m.environment)}
    text = json.dumps(shared, sort_keys=True, separators=(",", ":"), default=str)
    name = hashlib.sha256(text.encode()).hexdigest()
    insert_new(session, KernelConditionsRow, [{"content_hash": name, **shared}])
    return name


def _row(m: KernelMeasurement, device: int, conditions: str) -> dict[str, Any]:
    values = {field.name: getattr(m, field.name) for field in dataclasses.fields(m)}
    for name in ("device", "protocol", "environment"):
        del values[name]
    return values | {
        "device_id": device,
        "conditions_hash": conditions,
        "call": m.call.text,
        "operator": m.call.operator.value,
        "samples_ms": np.asarray(m.samples_ms, dtype=_SAMPLES).tobytes(),
        "missing": dict(m.missing),
        "facts": dict(m.facts),
    }


def _measurement(row: Row[Any]) -> KernelMeasurement:
    return record_of(
        KernelMeasurement,
        row,
        call=KernelCall.from_text(row.call),
        protocol=Protocol(**row.protocol),
        samples_ms=tuple(np.frombuffer(row.samples_ms, dtype=_SAMPLES).tolist()),
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
    lines = read_jsonl(checked_size(path))
    return numbered(path, "line", lines, _measurement_of_line)


def _measurement_of_line(line: dict[str, Any]) -> KernelMeasurement:
    try:
        given = KernelFileRow.model_validate(line)
    except ValidationError as error:
        raise InputError(first_fault(error)) from error
    values = {name: getattr(given, name) for name in KernelFileRow.model_fields}
    values |= {"call": KernelCall.from_text(given.call), "samples_ms": tuple(given.samples_ms)}
    if given.provenance is Provenance.MEASURED and "measuring_version" not in given.environment:
        values["provenance"] = Provenance.IMPORTED
    return KernelMeasurement(**values)
