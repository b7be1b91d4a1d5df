"""Measurements: every attempt is stored once, and an accepted one makes a label.

Readings of the canary are stored here, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError
from sqlalchemy import Row, Select, and_, func, or_, select
from sqlalchemy.orm import Session

from trappm.profiler.errors import InputError, StoreError, one_line, storable
from trappm.profiler.host.environment import utc_now
from trappm.profiler.measuring.canary import CanaryReading
from trappm.profiler.records import (
    METRICS,
    Configuration,
    Measurement,
    Outcome,
    Protocol,
    Provenance,
)
from trappm.store.assignments import MAX_ATTEMPTS, lock_rows, write, write_labels
from trappm.store.engine import Insert, StoreAwayError, dialect_of, insert, insert_new
from trappm.store.files import COLUMNS, FileRow, fingerprint_of, first_fault, measurement_in, row_of
from trappm.store.label_filter import LabelFilter
from trappm.store.labels import apply_filter
from trappm.store.pools import insert_configurations
from trappm.store.records import (
    Assignment,
    AssignmentState,
    attempts_allowed,
    configuration_of,
    is_final,
    record_of,
)
from trappm.store.schema import (
    CONFIGURATION,
    CanaryRow,
    ConfigurationRow,
    DeviceRow,
    FailedHostRow,
    LabelRow,
    MeasurementRow,
)
from trappm.store.transactions import Repository, call_of, reading, writing

SERIES_END = 50
"""Number of readings at either end of a canary's series that a reference and a decision need."""

BATCH = 2000
"""Measurements per transaction, which takes less than a second."""

_SAMPLES = np.dtype("<f4")

_WHOLE: Select[*tuple[Any, ...]] = (
    select(*MeasurementRow.__table__.columns, *CONFIGURATION, DeviceRow.key.label("device"))
    .join(ConfigurationRow, ConfigurationRow.id == MeasurementRow.configuration_id)
    .join(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
)
"""Measurements with the columns that `_measurement_of` needs."""


def with_possible_metrics(measurement: Measurement) -> Measurement:
    """Return the measurement, in which impossible metrics are missing, with the reason.

    Raises:
        StoreError: It cannot be stored, for example because of its step times.
    """
    changes: dict[str, Any] = {}
    missing = dict(measurement.missing)
    for name in ("memory_mib", "power_w", "energy_j"):
        value = getattr(measurement, name)
        if value is not None and not 0 < value < math.inf:
            changes[name] = None
            missing[name] = f"measured as {value}, which is impossible"
    if changes:
        measurement = dataclasses.replace(measurement, missing=missing, **changes)
    try:
        FileRow.model_validate(row_of(measurement))
    except ValidationError as error:
        raise StoreError(
            f"{measurement.configuration} on {measurement.device} cannot be stored: "
            f"{first_fault(error)}"
        ) from error
    return measurement


class Wanted(NamedTuple):
    """The measurement that a worker was asked for."""

    configuration: Configuration
    device: str
    protocol: Protocol
    attempt_key: str
    fingerprint: str
    """Fingerprint of the worker's software stack."""


def ensure_recordable(measurement: Measurement, wanted: Wanted) -> Measurement:
    """Return the measurement if it can be stored and is the one wanted, else a failed attempt."""
    try:
        given = (measurement.configuration, measurement.device, measurement.attempt_key)
        if (*given, measurement.protocol) == (
            wanted.configuration, wanted.device, wanted.attempt_key, wanted.protocol
        ):  # fmt: skip
            return with_possible_metrics(measurement)
        reason = f"it is of {given}, which is not what was wanted"
    except (StoreError, TypeError, ValueError, AttributeError) as error:
        reason = one_line(error)
    return failed_attempt(f"what was measured cannot be recorded: {ascii(reason)[1:-1]}", wanted)


def failed_attempt(reason: str, wanted: Wanted) -> Measurement:
    """Return the attempt to record where there is no measurement that can be stored."""
    return Measurement(
        configuration=wanted.configuration,
        device=wanted.device,
        outcome=Outcome.ERROR,
        protocol=wanted.protocol,
        started_at=utc_now(),
        duration_s=0.0,
        attempt_key=wanted.attempt_key,
        missing=dict.fromkeys((*METRICS, "energy_j"), "no result"),
        failed_in="record",
        message=storable(reason),
        environment={"stack_fingerprint": wanted.fingerprint},
    )


class Measurements(Repository):
    """Every attempt to measure, and the devices on which they ran."""

    @writing
    def record(
        self,
        session: Session,
        results: Sequence[tuple[Measurement, str]],
        *,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> dict[str, Assignment]:
        """Record results of leases with their labels, and settle their assignments; all or nothing.

        Recording an attempt key twice changes nothing. The first label of a configuration, device
        stack and protocol stays, with two exceptions: a measured label replaces one that is not,
        and a label with values replaces a censored one of the same provenance. An impossible metric
        (0 or less, or not a number) is stored as missing, with the reason. A failure that arrives
        after its lease was lost does not take the lease from another worker. A fault of the worker
        itself counts as its loss.

        Args:
            results: Attempts, under the `Assignment.attempt_key` of their leases, each with the id
                of its assignment.
            max_attempts: Failures after which an assignment is abandoned.

        Returns:
            The assignments afterwards, by their ids.

        Raises:
            StoreError: The store cannot be written; step times are impossible; or an assignment
                does not exist, or is of something else.
        """
        known = lock_rows(session, (name for _, name in results))
        for measurement, name in results:
            assignment = known.get(name)
            if assignment is None:
                raise StoreError(f"there is no assignment {name!r} to record a measurement for")
            given = (measurement.configuration, measurement.device)
            if (assignment.configuration, assignment.device) != given:
                raise StoreError(
                    f"a measurement of {given[0]} on {given[1]} was handed in for assignment "
                    f"{name}, which is of something else"
                )
        attempts = _attempts(
            session, [(with_possible_metrics(m), known[name]) for m, name in results]
        )
        new = _insert(session, attempts)
        _refuse_other_results(
            session, [a.measurement for a in attempts if a.measurement.attempt_key not in new]
        )
        changed: dict[str, Assignment] = {}
        done: list[_Attempt] = []
        failed: list[dict[str, str]] = []
        for attempt in attempts:
            if attempt.measurement.attempt_key in new and attempt.assignment is not None:
                before = changed.get(attempt.assignment.id, attempt.assignment)
                after = _settle(before, attempt.measurement, max_attempts)
                if after is not before:
                    changed[after.id] = after
                    if after.state is AssignmentState.DONE:
                        done.append(attempt)
                    elif before.host is not None:
                        failed.append({"assignment_id": before.id, "host": before.host})
        write_labels(session, _labels_of(session, done))
        write(session, changed.values())
        insert_new(session, FailedHostRow, failed)
        return known | changed

    def record_many(self, measurements: Iterable[Measurement]) -> int:
        """Record attempts of no campaign and their labels, BATCH of them per transaction.

        Returns:
            The number of new attempts.

        Raises:
            StoreError: An attempt was recorded before with another result. Earlier batches stay,
                and recording everything again completes the rest.
        """
        before = self._count()
        possible = map(with_possible_metrics, measurements)
        while batch := [*itertools.islice(possible, BATCH)]:
            self._record_batch(batch)
        return self._count() - before

    @reading
    def _count(self, session: Session) -> int:
        return session.scalar(select(func.count(MeasurementRow.id))) or 0

    @writing
    def _record_batch(self, session: Session, batch: Sequence[Measurement]) -> None:
        _insert(session, _attempts(session, [(measurement, None) for measurement in batch]))

    @reading
    def get(self, session: Session, measurement_id: int) -> Measurement:
        """Return an attempt with its raw samples, which are stored in float32.

        Raises:
            InputError: There is no measurement with this id.
        """
        query = _WHOLE.where(MeasurementRow.id == measurement_id)
        row = session.execute(query).one_or_none()
        if row is None:
            raise InputError(f"no measurement has the id {measurement_id}")
        return _measurement_of(row)

    def each(self, wanted: LabelFilter) -> Iterator[Measurement]:
        """Yield the measurements of the labels that pass the filter, in the order of recording.

        If the filter names an outcome, yield the attempts that pass. All come from one transaction,
        which is not retried.
        """
        query = _WHOLE.order_by(MeasurementRow.id).execution_options(yield_per=BATCH)
        if wanted.outcome is None:
            query = query.join(LabelRow, LabelRow.measurement_id == MeasurementRow.id)
        with self._database.reading() as session:
            for row in session.execute(apply_filter(session, query, wanted)):
                yield _measurement_of(row)

    @reading
    def device_environments(self, session: Session, device: str) -> dict[str, Mapping[str, Any]]:
        """Return the environment of the first measurement under each stack of a device."""
        query = select(DeviceRow.fingerprint, DeviceRow.environment).filter_by(key=device)
        return {row.fingerprint: row.environment for row in session.execute(query)}

    @reading
    def device_memory_mib(self, session: Session, device: str) -> float | None:
        """Return the smallest memory that a stack of this device reports, or None.

        For a CPU device it is the memory that a process of its host may use.
        """
        environments = session.scalars(select(DeviceRow.environment).filter_by(key=device))
        known = [e.get("device_memory_mib") or e.get("memory_allowed_mib") for e in environments]
        return min(filter(None, known), default=None)


class _Attempt(NamedTuple):
    """A measurement with the rows that it refers to."""

    measurement: Measurement
    device_id: int
    assignment: Assignment | None

    @property
    def label_key(self) -> dict[str, Any]:
        """Columns that identify its label."""
        return {
            "configuration_id": self.measurement.configuration.id,
            "device_id": self.device_id,
            "protocol_name": self.measurement.protocol.name,
        }

    def to_row(self) -> dict[str, Any]:
        flat = row_of(self.measurement)
        samples = np.asarray(self.measurement.step_samples_ms, dtype=_SAMPLES)
        return {
            **{name: flat[name] for name in _STORED},
            **self.label_key,
            "campaign_id": self.assignment and self.assignment.campaign_id,
            "assignment_id": self.assignment and self.assignment.id,
            "step_samples_ms": samples.tobytes(),
        }


_STORED = [name for name in COLUMNS if name in MeasurementRow.__table__.columns]
"""Columns of a file's row that the table has, too."""


def _measurement_of(row: Row[Any]) -> Measurement:
    samples = np.frombuffer(row.step_samples_ms, dtype=_SAMPLES)
    return measurement_in(
        row, protocol=Protocol(**row.protocol), step_samples_ms=tuple(samples.tolist())
    )


def _settle(assignment: Assignment, measurement: Measurement, max_attempts: int) -> Assignment:
    """Return the assignment after an attempt; the same object if nothing changes."""
    if assignment.state is AssignmentState.DONE:
        return assignment
    if is_final(measurement.outcome):
        return assignment.with_state(AssignmentState.DONE)
    is_of_lease = measurement.attempt_key == assignment.attempt_key
    if is_of_lease and assignment.state is AssignmentState.LEASED:
        if measurement.is_fault_of_worker:
            return assignment.with_loss()
        return assignment.with_failure(attempts_allowed(measurement.outcome, max_attempts))
    return assignment


def _attempts(
    session: Session, results: Sequence[tuple[Measurement, Assignment | None]]
) -> list[_Attempt]:
    """Return measurements with their devices, which are inserted if they are new."""
    stacks = [(m.device, fingerprint_of(m.environment)) for m, _ in results]
    environments: dict[tuple[str, str], Mapping[str, Any]] = {}
    for stack, (measurement, _) in zip(stacks, results, strict=True):
        environments.setdefault(stack, measurement.environment)
    ids = {stack: device_id(session, *stack, environments[stack]) for stack in sorted(environments)}
    return [_Attempt(m, ids[s], a) for s, (m, a) in zip(stacks, results, strict=True)]


def device_id(session: Session, key: str, fingerprint: str, environment: Mapping[str, Any]) -> int:
    """Return the id of a device under one stack, which is inserted if it is new."""
    device = {"key": key, "fingerprint": fingerprint}
    query = select(DeviceRow.id).filter_by(**device)
    known: int | None = session.scalar(query)
    if known is None:
        insert_new(session, DeviceRow, [{**device, "environment": dict(environment)}])
        known = session.scalars(query).one()
    return known


def _insert(session: Session, attempts: Sequence[_Attempt]) -> dict[str, int]:
    """Insert the measurements that are new, and their labels; return ids by attempt key."""
    # Configurations of assignments exist. They are sorted, so that two concurrent imports wait for
    # each other in one order and cannot deadlock.
    unknown = {a.measurement.configuration for a in attempts if a.assignment is None}
    insert_configurations(session, sorted(unknown, key=attrgetter("id")))
    by_key: dict[str, _Attempt] = {}
    for attempt in attempts:
        by_key.setdefault(attempt.measurement.attempt_key, attempt)
    recorded = _measurement_ids(session, by_key)
    fresh = {key: attempt for key, attempt in by_key.items() if key not in recorded}
    if not fresh:
        return {}
    rows = [attempt.to_row() for attempt in fresh.values()]
    # Without RETURNING: a statement of 2,000 rows takes longer to parse than to execute.
    query = insert(dialect_of(session), MeasurementRow).on_conflict_do_nothing()
    query = query.execution_options(preserve_rowcount=True)
    if session.connection().execute(query, rows).rowcount != len(rows):
        raise StoreAwayError("another process was just recording the same attempts")
    new, at = _measurement_ids(session, fresh), call_of(session).at
    labels = [
        attempt.label_key | result | {"measurement_id": new[key], "created_at": at}
        for key, attempt in fresh.items()
        if (result := _label_values(attempt.measurement)) is not None
    ]
    if labels:
        session.connection().execute(_label_upsert(dialect_of(session)), labels)
    return new


def _measurement_ids(session: Session, attempt_keys: Iterable[str]) -> dict[str, int]:
    query = select(MeasurementRow.attempt_key, MeasurementRow.id)
    rows = session.execute(query.where(MeasurementRow.attempt_key.in_([*attempt_keys])))
    return {row.attempt_key: row.id for row in rows}


def _refuse_other_results(session: Session, measurements: Sequence[Measurement]) -> None:
    """Refuse measurements whose attempt keys were recorded before with other results."""
    if not measurements:
        return
    given = {m.attempt_key: _result_of(m) for m in measurements}
    query = _WHOLE.where(MeasurementRow.attempt_key.in_([*given]))
    for before in map(_measurement_of, session.execute(query)):
        if _result_of(before) != given[before.attempt_key]:
            raise StoreError(
                f"the attempt key {before.attempt_key!r} was recorded before, of another "
                "measurement; give every attempt a key of its own"
            )


_result_of = attrgetter(
    "configuration", "device", "protocol", "outcome", "step", "memory_mib", "power_w", "energy_j"
)


def makes_label(measurement: Measurement) -> bool:
    """Return whether its configuration has a label once it is recorded."""
    return _label_values(measurement) is not None


def _label_values(measurement: Measurement) -> dict[str, Any] | None:
    """Return the results in the label that a measurement makes, or None if it makes none."""
    bound = None
    if measurement.outcome is Outcome.OOM:
        bound = measurement.memory_detail_mib.get("capacity")
    is_ok = measurement.outcome is Outcome.OK
    if not is_ok and not (bound and 0 < bound < math.inf):
        return None
    metrics = ("step_time_ms", "memory_mib", "power_w", "energy_j")
    return {
        "outcome": measurement.outcome,
        "provenance": measurement.provenance,
        "memory_above_mib": bound,
        **{name: getattr(measurement, name) if is_ok else None for name in metrics},
    }


@cache
def _label_upsert(dialect: str) -> Insert:
    """Return an INSERT of labels that replaces an existing label of less value."""
    query = insert(dialect, LabelRow)
    offered = query.excluded
    measured_instead = and_(
        offered.provenance == Provenance.MEASURED, LabelRow.provenance != Provenance.MEASURED
    )
    value_for_bound = and_(
        offered.provenance == LabelRow.provenance,
        offered.memory_above_mib.is_(None),
        LabelRow.memory_above_mib.is_not(None),
    )
    key = ("configuration_id", "device_id", "protocol_name")
    return query.on_conflict_do_update(
        index_elements=key,
        set_={c.name: c for c in offered if c.name not in {"id", *key}},
        where=or_(measured_instead, value_for_bound),
    )


def _labels_of(session: Session, attempts: Iterable[_Attempt]) -> dict[str, int]:
    """Return the labels that attempts have made or found, by the id of their assignment."""
    keys = {
        attempt.assignment.id: tuple(attempt.label_key.values())
        for attempt in attempts
        if attempt.assignment is not None and makes_label(attempt.measurement)
    }
    row, names = LabelRow, sorted({configuration for configuration, *_ in keys.values()})
    query = select(row.id, row.configuration_id, row.device_id, row.protocol_name)
    rows = session.execute(query.where(row.configuration_id.in_(names)))
    labels = {tuple(key): id_ for id_, *key in rows}
    return {name: labels[key] for name, key in keys.items()}


class Canaries(Repository):
    """Readings of the canary, of every device and host."""

    @writing
    def save(
        self, session: Session, reading: CanaryReading, *, campaign_id: str | None = None
    ) -> None:
        """Store a reading, of a campaign's worker; the same attempt key twice changes nothing.

        Raises:
            StoreError: The store cannot be written, or the campaign does not exist.
        """
        insert_configurations(session, [reading.configuration])
        row = {field.name: getattr(reading, field.name) for field in dataclasses.fields(reading)}
        row["configuration_id"] = row.pop("configuration").id
        insert_new(session, CanaryRow, [row | {"campaign_id": campaign_id}])

    @reading
    def all(
        self, session: Session, *, device: str | None = None, campaign_id: str | None = None
    ) -> list[CanaryReading]:
        """Return the readings of a device or of a campaign, the oldest first."""
        query = _READINGS
        if device is not None:
            query = query.where(CanaryRow.device == device)
        if campaign_id is not None:
            query = query.where(CanaryRow.campaign_id == campaign_id)
        return [_reading_of(row) for row in session.execute(query)]

    @reading
    def history(self, session: Session, device: str) -> list[CanaryReading]:
        """Return what a reference and a decision need of a device's readings, the oldest first.

        These are the first and the last `SERIES_END` of each series, however long it is.
        """
        series = (CanaryRow.host, CanaryRow.stack_fingerprint, CanaryRow.configuration_id)
        first = func.row_number().over(partition_by=series, order_by=CanaryRow.id)
        last = func.row_number().over(partition_by=series, order_by=CanaryRow.id.desc())
        ranked = select(CanaryRow.id, first.label("first"), last.label("last"))
        ends = ranked.where(CanaryRow.device == device).subquery()
        query = _READINGS.join(ends, ends.c.id == CanaryRow.id)
        query = query.where(or_(ends.c.first <= SERIES_END, ends.c.last <= SERIES_END))
        return [_reading_of(row) for row in session.execute(query)]


_READINGS: Select[*tuple[Any, ...]] = (
    select(*CanaryRow.__table__.columns, *CONFIGURATION)
    .join(ConfigurationRow, ConfigurationRow.id == CanaryRow.configuration_id)
    .order_by(CanaryRow.taken_at, CanaryRow.id)
)


def _reading_of(row: Row[Any]) -> CanaryReading:
    return record_of(CanaryReading, row, configuration=configuration_of(row))
