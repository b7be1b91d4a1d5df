"""Measurements: every attempt is stored once, and an accepted one makes a label.

Readings of the canary are stored here, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
from sqlalchemy import Select, and_, bindparam, or_, select
from sqlalchemy.orm import Session

from trappm.profiler.errors import InputError, StoreError
from trappm.profiler.measuring.canary import CanaryReading
from trappm.profiler.records import Measurement, Outcome, Protocol, Provenance, StepSummary
from trappm.store.assignments import (
    MAX_ATTEMPTS,
    ended,
    failed,
    lease_named,
    locked,
    write,
    write_labels,
)
from trappm.store.engine import (
    Insert,
    StoreAwayError,
    back_end,
    insert,
    insert_new,
    new_row,
    utc_now,
)
from trappm.store.labels import LabelFilter, restricted
from trappm.store.records import Assignment, AssignmentState, Recorded, attempts_allowed, is_final
from trappm.store.rows import fingerprint_of, with_possible_metrics
from trappm.store.schema import CanaryRow, ConfigurationRow, DeviceRow, LabelRow, MeasurementRow
from trappm.store.transactions import Repository, reading, writing
from trappm.store.workloads import configuration_of, insert_configurations


def label_place(measurement: Measurement, device_id: int) -> dict[str, Any]:
    """The columns that identify a label: each combination has one label."""
    return {
        "configuration_id": measurement.configuration.id,
        "device_id": device_id,
        "protocol_name": measurement.protocol.name,
    }


def label_values(measurement: Measurement) -> dict[str, Any] | None:
    """The columns of the label that this measurement makes; None if it makes none."""
    bound = None
    if measurement.outcome is Outcome.OOM:
        bound = measurement.memory_detail_mib.get("capacity")
    if measurement.outcome is not Outcome.OK and not (bound and 0 < bound < math.inf):
        return None
    ok = measurement.outcome is Outcome.OK
    return {
        "outcome": measurement.outcome,
        "provenance": measurement.provenance,
        "step_time_ms": measurement.step_time_ms if ok else None,
        "memory_mib": measurement.memory_mib if ok else None,
        "memory_above_mib": bound,
        "power_w": measurement.power_w if ok else None,
        "energy_j": measurement.energy_j if ok else None,
        "created_at": utc_now(),
    }


def makes_label(measurement: Measurement) -> bool:
    """Whether its configuration has a label once it is recorded."""
    return label_values(measurement) is not None


def label_upsert(session: Session) -> Insert:
    """Makes a label, or replaces the one that is there if the new one is worth more."""
    return _label_upsert(back_end(session))


@cache
def _label_upsert(name: str) -> Insert:
    query = insert(name, LabelRow)
    offered = query.excluded
    measured_instead = and_(
        offered.provenance == Provenance.MEASURED, LabelRow.provenance != Provenance.MEASURED
    )
    value_for_bound = and_(
        offered.provenance == LabelRow.provenance,
        offered.memory_above_mib.is_(None),
        LabelRow.memory_above_mib.is_not(None),
    )
    place = ("configuration_id", "device_id", "protocol_name")
    return query.on_conflict_do_update(
        index_elements=place,
        set_={c.name: c for c in offered if c.name not in {"id", *place}},
        where=or_(measured_instead, value_for_bound),
    )


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


BATCH = 2000
"""So many measurements are recorded in one transaction, which takes less than a second."""

# Made once: to put a statement together takes longer than to carry it out.
_IDS_OF_KEYS = select(MeasurementRow.attempt_key, MeasurementRow.id).where(
    MeasurementRow.attempt_key.in_(bindparam("keys", expanding=True))
)
_PLACES = select(
    LabelRow.id, LabelRow.configuration_id, LabelRow.device_id, LabelRow.protocol_name
).where(LabelRow.configuration_id.in_(bindparam("names", expanding=True)))
_DEVICE = select(DeviceRow.id).where(
    DeviceRow.key == bindparam("key"), DeviceRow.fingerprint == bindparam("fingerprint")
)


class Measurements(Repository):
    """Every attempt to measure, and what is known of the devices that it ran on."""

    @writing
    def record(
        self,
        session: Session,
        measurement: Measurement,
        *,
        assignment_id: str | None = None,
    ) -> Recorded:
        """Keeps an attempt, makes its label and settles its assignment, all or nothing.

        Recording an attempt key twice changes nothing. The first label of a configuration, device
        stack and protocol stays, except that a measured one takes the place of one that is not,
        and one with values that of a censored one of its own provenance. A metric that cannot be
        (0 or less, or no number) is kept as missing, with the reason.

        Args:
            measurement: of a lease, under its `Assignment.attempt_key`: a bad outcome that comes
                in after its lease was lost is kept, but does not take the lease from another.
            assignment_id: what it was measured for.

        Raises:
            StoreError: the store cannot be written, the assignment is of something else, or the
                step times cannot be.
        """
        known = locked(session, [] if assignment_id is None else [assignment_id])
        recorded, changed = _record(session, [(measurement, assignment_id)], MAX_ATTEMPTS, known)
        write(session, changed.values())
        return recorded[0]

    @writing
    def record_and_lease(
        self,
        session: Session,
        results: Sequence[tuple[Measurement, str]],
        wanted: Sequence[tuple[str, str]],
        *,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> list[Assignment]:
        """One turn of a campaign that ranks its assignments itself, all or nothing.

        What came back is kept as `record` does, then assignments are given to workers. One
        transaction for a whole turn costs hardly more than one for each measurement. After an
        answer was lost the same call can be made again.

        Args:
            results: attempts, each with the assignment that it is of.
            wanted: ids of open assignments, and with each the worker.
            max_attempts: after so many failures an assignment is given up.

        Returns:
            The assignments wanted, with their leases.

        Raises:
            StoreError: as `record`; or there is no such assignment, or somebody else has it.
        """
        known = locked(session, [a for _, a in results] + [a for a, _ in wanted])
        _, changed = _record(session, results, max_attempts, known) if results else ([], {})
        leases = lease_named(wanted, known | changed) if wanted else []
        write(session, (changed | {lease.id: lease for lease in leases}).values())
        return leases

    def record_many(self, measurements: Iterable[Measurement]) -> int:
        """Keeps attempts of no campaign, as `record` does, a transaction for each BATCH of them.

        Returns:
            How many of them were new.

        Raises:
            StoreError: as `record`; the batches before are kept, and recording all of them again
                completes them.
        """
        count = 0
        possible = map(with_possible_metrics, measurements)
        while batch := [*itertools.islice(possible, BATCH)]:
            keys = {m.attempt_key for m in batch}
            count += len(keys) - self._known(keys)
            self._record_batch(batch)
        return count

    @reading
    def _known(self, session: Session, keys: Collection[str]) -> int:
        """Return how many of these attempts are recorded already."""
        return len(_measurement_ids(session, keys))

    @writing
    def _record_batch(self, session: Session, batch: Sequence[Measurement]) -> None:
        _insert(session, batch, _device_ids(session, batch))

    @reading
    def recorded_before(
        self, session: Session, measurements: Sequence[Measurement]
    ) -> dict[str, bool]:
        """Return the attempt keys of those that are there; with each, whether it differs."""
        return _recorded_before(session, [with_possible_metrics(m) for m in measurements])

    @reading
    def get(self, session: Session, measurement_id: int) -> Measurement:
        """An attempt with its raw samples, which are kept to float32 precision.

        Raises:
            InputError: there is none of this id.
        """
        query = WHOLE.where(MeasurementRow.id == measurement_id)
        row = session.execute(query).one_or_none()
        if row is None:
            raise InputError(f"no measurement has the id {measurement_id}")
        return measurement_of_row(*row)

    def each(self, wanted: LabelFilter) -> Iterator[Measurement]:
        """Those behind the labels that pass the filter, or the attempts if it names an outcome.

        They come in the order in which they were recorded, a few at a time, of one transaction that
        is not tried again.
        """
        query = WHOLE.order_by(MeasurementRow.id).execution_options(yield_per=BATCH)
        if wanted.outcome is None:
            query = query.join(LabelRow, LabelRow.measurement_id == MeasurementRow.id)
        with self._database.reading() as session:
            for row in session.execute(restricted(session, query, wanted)):
                yield measurement_of_row(*row)

    @reading
    def device_environments(self, session: Session, device: str) -> dict[str, Mapping[str, Any]]:
        """The environment of the first measurement under each stack of a device, by fingerprint."""
        query = select(DeviceRow.fingerprint, DeviceRow.environment).filter_by(key=device)
        return {row.fingerprint: row.environment for row in session.execute(query)}

    @reading
    def device_memory_mib(self, session: Session, device: str) -> float | None:
        """The smallest memory that any measurement on this device, under any stack, names.

        Of a CPU device it is what a process of its host may have.
        """
        environments = session.scalars(select(DeviceRow.environment).filter_by(key=device))
        known = [e.get("device_memory_mib") or e.get("memory_allowed_mib") for e in environments]
        return min(filter(None, known), default=None)


def _record(
    session: Session,
    results: Sequence[tuple[Measurement, str | None]],
    max_attempts: int,
    known: Mapping[str, Assignment],
) -> tuple[list[Recorded], dict[str, Assignment]]:
    """Keeps attempts and their labels; what became of each, and assignments to be written, by id.

    Args:
        session: that writes.
        results: attempts, each with the id of its assignment, if it has one.
        max_attempts: after so many failures an assignment is given up.
        known: the assignments by id, locked.
    """
    measurements = [with_possible_metrics(measurement) for measurement, _ in results]
    assignments = _assignments_of(measurements, [name for _, name in results], known)
    of_key = {
        m.attempt_key: assignment
        for m, assignment in zip(measurements, assignments, strict=True)
        if assignment is not None
    }
    devices = _device_ids(session, measurements)
    new = _insert(session, measurements, devices, of_key)
    earlier = [m for m in measurements if m.attempt_key not in new]
    differing = [key for key, differs in _recorded_before(session, earlier).items() if differs]
    if differing:
        raise StoreError(
            f"the attempt key {min(differing)!r} was recorded before, of another measurement; "
            "give every attempt a key of its own"
        )
    ids = new | (_measurement_ids(session, [m.attempt_key for m in earlier]) if earlier else {})
    labels = _label_ids(session, measurements, devices)
    recorded: list[Recorded] = []
    changed: dict[str, Assignment] = {}
    labelled: list[tuple[str, int]] = []
    for measurement, assignment, label_id in zip(measurements, assignments, labels, strict=True):
        if measurement.attempt_key in new and assignment is not None:
            before = changed.get(assignment.id, assignment)
            after = _settled(before, measurement, max_attempts)
            if after is not before:
                changed[after.id] = after
                if after.state is AssignmentState.DONE and label_id is not None:
                    labelled.append((after.id, label_id))
        recorded.append(Recorded(measurement_id=ids[measurement.attempt_key], label_id=label_id))
    write_labels(session, labelled)
    return recorded, changed


def _assignments_of(
    measurements: Sequence[Measurement],
    names: Sequence[str | None],
    known: Mapping[str, Assignment],
) -> list[Assignment | None]:
    """The assignment of each; None where none is named."""
    for m, name in zip(measurements, names, strict=True):
        if name is None:
            continue
        if name not in known:
            raise StoreError(f"there is no assignment {name!r} to record a measurement for")
        if (known[name].configuration, known[name].device) != (m.configuration, m.device):
            raise StoreError(
                f"a measurement of {m.configuration} on {m.device} was handed in for assignment "
                f"{name}, which is of something else"
            )
    return [None if name is None else known[name] for name in names]


def _device_ids(session: Session, measurements: Iterable[Measurement]) -> list[int]:
    """The device of each measurement; those that are not there yet are made."""
    devices = [(m.device, fingerprint_of(m.environment)) for m in measurements]
    first = {
        device: m.environment
        for device, m in zip(reversed(devices), reversed([*measurements]), strict=True)
    }
    ids = {place: device_id(session, *place, first[place]) for place in sorted(first)}
    return [ids[device] for device in devices]


def device_id(session: Session, key: str, fingerprint: str, environment: Mapping[str, Any]) -> int:
    """The row of a device under one stack, which is made if it is not there yet."""
    device = {"key": key, "fingerprint": fingerprint}
    known: int | None = session.connection().scalar(_DEVICE, device)
    if known is None:
        insert_new(session, DeviceRow, [{**device, "environment": dict(environment)}])
        known = session.connection().scalars(_DEVICE, device).one()
    return known


def _insert(
    session: Session,
    measurements: Sequence[Measurement],
    devices: Sequence[int],
    assignments: Mapping[str, Assignment] | None = None,
) -> dict[str, int]:
    """Inserts measurements that are not there yet, and their labels; ids by attempt key.

    Args:
        session: that writes.
        measurements: to insert.
        devices: of each, its id.
        assignments: by attempt key, what it was measured for.
    """
    of_key = assignments or {}
    # Those of assignments are there. Sorted, so that two who import at once wait for each other in
    # one order, and never in a ring.
    unknown = {m.configuration for m in measurements if m.attempt_key not in of_key}
    insert_configurations(session, sorted(unknown, key=_by_id))
    fresh = _not_yet_there(session, zip(measurements, devices, strict=True))
    if not fresh:
        return {}
    rows = [row_values(m, device, of_key.get(key)) for key, (m, device) in fresh.items()]
    # Without RETURNING: a statement of 2,000 rows takes longer to parse than to carry out.
    query = new_row(session, MeasurementRow).execution_options(preserve_rowcount=True)
    if session.connection().execute(query, rows).rowcount != len(rows):
        raise StoreAwayError("another process was just recording the same attempts")
    new = _measurement_ids(session, fresh)
    labels = [
        label_place(m, device_id) | result | {"measurement_id": new[key]}
        for key, (m, device_id) in fresh.items()
        if (result := label_values(m)) is not None
    ]
    if labels:
        session.connection().execute(label_upsert(session), labels)
    return new


def _not_yet_there(
    session: Session, pairs: Iterable[tuple[Measurement, int]]
) -> dict[str, tuple[Measurement, int]]:
    """Those whose attempt key was not recorded yet, by this key; the first of each."""
    by_key: dict[str, tuple[Measurement, int]] = {}
    for measurement, device_id in pairs:
        by_key.setdefault(measurement.attempt_key, (measurement, device_id))
    there = _measurement_ids(session, by_key)
    return {key: pair for key, pair in by_key.items() if key not in there}


def _measurement_ids(session: Session, attempt_keys: Iterable[str]) -> dict[str, int]:
    keys = {"keys": [*attempt_keys]}
    rows = session.connection().execute(_IDS_OF_KEYS, keys)
    return {row.attempt_key: row.id for row in rows}


def _recorded_before(session: Session, measurements: Sequence[Measurement]) -> dict[str, bool]:
    if not measurements:
        return {}
    given = {m.attempt_key: _result_of(m) for m in measurements}
    query = WHOLE.where(MeasurementRow.attempt_key.in_([*given]))
    there = (measurement_of_row(*row) for row in session.execute(query))
    return {m.attempt_key: _result_of(m) != given[m.attempt_key] for m in there}


_result_of = attrgetter(
    "configuration", "device", "protocol", "outcome", "step", "memory_mib", "power_w", "energy_j"
)
_by_id = attrgetter("id")


def _label_ids(
    session: Session, measurements: Sequence[Measurement], devices: Sequence[int]
) -> list[int | None]:
    """The label of each measurement's place; None for one whose outcome makes none."""
    places = [
        None if label_values(m) is None else tuple(label_place(m, device).values())
        for m, device in zip(measurements, devices, strict=True)
    ]
    names = {"names": sorted({place[0] for place in places if place})}
    rows = session.connection().execute(_PLACES, names)
    there = {tuple(place): label_id for label_id, *place in rows}
    return [None if place is None else there[place] for place in places]


def _settled(assignment: Assignment, measurement: Measurement, max_attempts: int) -> Assignment:
    """The assignment after an attempt at it; itself where that changes nothing."""
    if assignment.state is AssignmentState.DONE:
        return assignment
    if is_final(measurement.outcome):
        return ended(assignment, AssignmentState.DONE)
    is_of_lease = measurement.attempt_key == assignment.attempt_key
    if is_of_lease and assignment.state is AssignmentState.LEASED:
        return failed(assignment, attempts_allowed(measurement.outcome, max_attempts))
    return assignment


_PLAIN = tuple(
    field.name for field in dataclasses.fields(CanaryReading) if field.name != "configuration"
)
"""What a column of the same name holds."""


class Canaries(Repository):
    """Readings of the canary, of every device and host."""

    @writing
    def save(
        self, session: Session, reading: CanaryReading, *, campaign_id: str | None = None
    ) -> None:
        """Keeps a reading; the same attempt key twice changes nothing.

        Args:
            campaign_id: the campaign whose worker took it; must be there.

        Raises:
            StoreError: the store cannot be written, or there is no such campaign.
        """
        values = {name: getattr(reading, name) for name in _PLAIN}
        insert_configurations(session, [reading.configuration])
        row = values | {
            "configuration_id": reading.configuration.id,
            "campaign_id": campaign_id,
        }
        insert_new(session, CanaryRow, [row])

    @reading
    def all(
        self, session: Session, *, device: str | None = None, campaign_id: str | None = None
    ) -> list[CanaryReading]:
        """Readings of a device (on any host, under any stack), or of a campaign, oldest first."""
        query = (
            select(CanaryRow, ConfigurationRow)
            .join(ConfigurationRow, ConfigurationRow.id == CanaryRow.configuration_id)
            .order_by(CanaryRow.taken_at, CanaryRow.id)
        )
        if device is not None:
            query = query.where(CanaryRow.device == device)
        if campaign_id is not None:
            query = query.where(CanaryRow.campaign_id == campaign_id)
        return [
            CanaryReading(
                configuration=configuration_of(what),
                **{name: getattr(row, name) for name in _PLAIN},
            )
            for row, what in session.execute(query)
        ]
