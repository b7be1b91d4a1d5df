"""Recording measurements: every attempt once, and the label that an accepted one makes.

A configuration that ran out of memory makes a label too, a censored one: its memory is missing, and
what it needs at least, the device's capacity, stands in `memory_above_mib`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from sqlalchemy import Select, and_, or_, select
from sqlalchemy.orm import Session

from profiler.errors import InputError, StoreError
from profiler.measuring.environment import stack_fingerprint
from profiler.records import Measurement, Outcome, Protocol, Provenance, StepSummary
from store.asking import LabelFilter, restricted
from store.database import Database, Insert, insert, insert_new, new_row, utc_now
from store.leases import MAX_ATTEMPTS, count_failure, end_lease
from store.possible import with_possible_metrics
from store.records import AssignmentState, Recorded, attempts_allowed, is_final
from store.schema import (
    AssignmentLabelRow,
    AssignmentRow,
    ConfigurationRow,
    DeviceRow,
    LabelRow,
    MeasurementRow,
)
from store.waiting import StoreAwayError, in_parts
from store.workloads import configuration_of, insert_configurations

BATCH = 2000
"""So many measurements are recorded in one transaction, which takes less than a second."""

_SAMPLES = np.dtype("<f4")
_NO_STEP = dict.fromkeys((f.name for f in fields(StepSummary)), None)


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
        stack and protocol stays, except that a measured one takes the place of one that is not,
        and one with values that of a censored one of its own provenance. A metric that cannot be
        (0 or less, or no number) is kept as missing, with the reason.

        Args:
            measurement: of a lease, under its `Assignment.attempt_key`: a bad outcome that comes
                in after its lease was lost is kept, but does not take the lease from another.
            assignment_id: what it was measured for.
            max_attempts: after so many failures the assignment is given up.

        Raises:
            StoreError: the store cannot be written, the assignment is of something else, or the
                step times cannot be.
        """
        with self._writing() as session:
            return _record(session, [(measurement, assignment_id)], max_attempts)[0]

    def record_results(
        self,
        results: Sequence[tuple[Measurement, str]],
        *,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> list[Recorded]:
        """Keeps attempts, each with the assignment that it is of, as `record` does: all or nothing.

        One transaction for all that came back together costs hardly more than one for each.

        Raises:
            StoreError: as `record`; none of them is kept.
        """
        with self._writing() as session:
            return _record(session, results, max_attempts)

    @in_parts
    def record_many(self, measurements: Iterable[Measurement]) -> int:
        """Keeps attempts of no campaign, as `record` does, a transaction for each BATCH of them.

        Returns:
            How many of them were new.

        Raises:
            StoreError: as `record`; the batches before are kept, and recording all of them again
                completes them.
        """
        count = 0
        left = map(with_possible_metrics, measurements)
        while batch := [*itertools.islice(left, BATCH)]:
            count += self._patience(partial(self._record_batch, batch))
        return count

    def _record_batch(self, batch: Sequence[Measurement]) -> int:
        with self._writing() as session:
            return len(_insert(session, batch, _device_ids(session, batch)))

    def conflicts(self, measurements: Sequence[Measurement]) -> set[str]:
        """The attempt keys of those that are recorded already, and of which something else is."""
        with self._reading() as session:
            return _conflicts(session, [with_possible_metrics(m) for m in measurements])

    def measurement(self, measurement_id: int) -> Measurement:
        """An attempt with its raw samples, which are kept to float32 precision.

        Raises:
            InputError: there is none of this id.
        """
        query = _WHOLE.where(MeasurementRow.id == measurement_id)
        with self._reading() as session:
            found = session.execute(query).one_or_none()
            if found is None:
                raise InputError(f"no measurement has the id {measurement_id}")
            return measurement_of_row(*found)

    def each_measurement(self, wanted: LabelFilter) -> Iterator[Measurement]:
        """Those behind the labels that pass the filter, or the attempts if it names an outcome.

        They come in the order in which they were recorded, a few at a time.
        """
        query = _WHOLE.order_by(MeasurementRow.id).execution_options(yield_per=BATCH)
        if wanted.outcome is None:
            query = query.join(LabelRow, LabelRow.measurement_id == MeasurementRow.id)
        with self._reading() as session:
            for row in session.execute(restricted(session, query, wanted)):
                yield measurement_of_row(*row)


def _record(
    session: Session, results: Sequence[tuple[Measurement, str | None]], max_attempts: int
) -> list[Recorded]:
    measurements = [with_possible_metrics(measurement) for measurement, _ in results]
    assignment_ids = [assignment_id for _, assignment_id in results]
    assignments = _assignments_of(session, measurements, assignment_ids)
    of_key = {
        m.attempt_key: assignment
        for m, assignment in zip(measurements, assignments, strict=True)
        if assignment is not None
    }
    devices = _device_ids(session, measurements)
    new = _insert(session, measurements, devices, of_key)
    known = [m for m in measurements if m.attempt_key not in new]
    if known and (conflicts := _conflicts(session, known)):
        raise StoreError(
            f"the attempt key {min(conflicts)!r} was recorded before, of another measurement; "
            "give every attempt a key of its own"
        )
    ids = new | (_measurement_ids(session, [m.attempt_key for m in known]) if known else {})
    labels = _label_ids(session, measurements, devices)
    recorded = []
    for measurement, assignment, label_id in zip(measurements, assignments, labels, strict=True):
        is_new = measurement.attempt_key in new
        if is_new and assignment is not None:
            _settle(session, assignment, measurement, label_id, max_attempts)
        recorded.append(
            Recorded(measurement_id=ids[measurement.attempt_key], label_id=label_id, is_new=is_new)
        )
    return recorded


def _assignments_of(
    session: Session, measurements: Sequence[Measurement], assignment_ids: Sequence[str | None]
) -> list[AssignmentRow | None]:
    """The assignment of each, locked until the transaction ends; None where none is named."""
    named = sorted({name for name in assignment_ids if name is not None})
    rows: dict[str, AssignmentRow] = {}
    if named:
        # In one order, so that two who record at once wait for each other, and never in a ring.
        query = select(AssignmentRow).where(AssignmentRow.id.in_(named)).order_by(AssignmentRow.id)
        rows = {row.id: row for row in session.scalars(query.with_for_update())}
    for m, name in zip(measurements, assignment_ids, strict=True):
        if name is None:
            continue
        if name not in rows:
            raise StoreError(f"there is no assignment {name!r} to record a measurement for")
        if (rows[name].configuration_id, rows[name].device_key) != (m.configuration.id, m.device):
            raise StoreError(
                f"a measurement of {m.configuration} on {m.device} was handed in for assignment "
                f"{name}, which is of something else"
            )
    return [None if name is None else rows[name] for name in assignment_ids]


def _device_ids(session: Session, measurements: Iterable[Measurement]) -> list[int]:
    """The device of each measurement; those that are not there yet are made."""
    devices = [(m.device, fingerprint_of(m.environment)) for m in measurements]
    first = {
        device: m.environment
        for device, m in zip(reversed(devices), reversed([*measurements]), strict=True)
    }
    ids = {}
    for key, fingerprint in sorted(first):
        device = {"key": key, "fingerprint": fingerprint}
        query = select(DeviceRow.id).filter_by(**device)
        known = session.scalars(query).one_or_none()
        if known is None:
            environment = dict(first[key, fingerprint])
            insert_new(session, DeviceRow, [{**device, "environment": environment}])
            known = session.scalars(query).one()
        ids[key, fingerprint] = known
    return [ids[device] for device in devices]


def fingerprint_of(environment: Mapping[str, Any]) -> str:
    """The stack that a measurement belongs to: the one that it names, or else its facts'."""
    return str(environment.get("stack_fingerprint") or stack_fingerprint(environment))


def _insert(
    session: Session,
    measurements: Sequence[Measurement],
    devices: Sequence[int],
    assignments: Mapping[str, AssignmentRow] | None = None,
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
    rows = [_row_values(m, device, of_key.get(key)) for key, (m, device) in fresh.items()]
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
    row = MeasurementRow
    query = select(row.attempt_key, row.id).where(row.attempt_key.in_([*attempt_keys]))
    return dict(session.execute(query).all())


def _conflicts(session: Session, measurements: Sequence[Measurement]) -> set[str]:
    given = {m.attempt_key: _result_of(m) for m in measurements}
    query = _WHOLE.where(MeasurementRow.attempt_key.in_([*given]))
    there = (measurement_of_row(*found) for found in session.execute(query))
    return {m.attempt_key for m in there if _result_of(m) != given[m.attempt_key]}


_WHOLE: Select[*tuple[Any, ...]] = (
    select(MeasurementRow, ConfigurationRow, DeviceRow.key)
    .join(ConfigurationRow, ConfigurationRow.id == MeasurementRow.configuration_id)
    .join(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
)
_result_of = attrgetter(
    "configuration", "device", "protocol", "outcome", "step", "memory_mib", "power_w", "energy_j"
)
_by_id = attrgetter("id")


def label_place(measurement: Measurement, device_id: int) -> dict[str, Any]:
    """What there is one label for."""
    return {
        "configuration_id": measurement.configuration.id,
        "device_id": device_id,
        "protocol_name": measurement.protocol.name,
    }


def label_values(measurement: Measurement) -> dict[str, Any] | None:
    """What a label says after this measurement; None if it makes none."""
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


def label_upsert(session: Session) -> Insert:
    """Makes a label, or replaces the one that is there if the new one is worth more."""
    query = insert(session, LabelRow)
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


def _label_ids(
    session: Session, measurements: Sequence[Measurement], devices: Sequence[int]
) -> list[int | None]:
    """The label of each measurement's place; None for one whose outcome makes none."""
    places = [
        None if label_values(m) is None else tuple(label_place(m, device).values())
        for m, device in zip(measurements, devices, strict=True)
    ]
    row = LabelRow
    query = select(row.id, row.configuration_id, row.device_id, row.protocol_name).where(
        row.configuration_id.in_({place[0] for place in places if place})
    )
    there = {tuple(place): label_id for label_id, *place in session.execute(query)}
    return [None if place is None else there[place] for place in places]


def _settle(
    session: Session,
    assignment: AssignmentRow,
    measurement: Measurement,
    label_id: int | None,
    max_attempts: int,
) -> None:
    if assignment.state is AssignmentState.DONE:
        return
    if is_final(measurement.outcome):
        end_lease(assignment, AssignmentState.DONE)
        if label_id is not None:
            session.add(AssignmentLabelRow(assignment_id=assignment.id, label_id=label_id))
    elif measurement.attempt_key == f"{assignment.id}-{assignment.attempts}" and (
        assignment.state is AssignmentState.LEASED
    ):
        count_failure(assignment, attempts_allowed(measurement.outcome, max_attempts))


def _row_values(
    measurement: Measurement, device_id: int, assignment: AssignmentRow | None
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
