"""Assignments as rows of the database, there and back, and the steps that they may take.

They are read as columns and written by one statement for all that a transaction changed, instead of
as mapped objects: a campaign's turn does little else, and takes half the time so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Row, bindparam, insert, select, update
from sqlalchemy.orm import Session

from trappm.profiler.errors import StoreError
from trappm.store.db.models import AssignmentLabelRow, AssignmentRow, ConfigurationRow
from trappm.store.records import Assignment, AssignmentState
from trappm.store.repositories.workloads import configuration_of

WHOLE_ASSIGNMENT = select(
    *AssignmentRow.__table__.columns,
    *(c for c in ConfigurationRow.__table__.columns if c.name not in {"id", "family"}),
).join_from(AssignmentRow, ConfigurationRow, ConfigurationRow.id == AssignmentRow.configuration_id)
"""Assignments with what `assignment_of` needs."""

AS_PLANNED = (AssignmentRow.round_number, AssignmentRow.rank, AssignmentRow.configuration_id)
"""The order of assignments and their labels for readers, whatever happened in between."""

_CHANGING = ("state", "attempts", "failures", "worker")
_LOCKED = (
    WHOLE_ASSIGNMENT.where(AssignmentRow.id.in_(bindparam("ids", expanding=True)))
    # In one order, so that two who write at once wait for each other, and never in a ring.
    .order_by(AssignmentRow.id)
    .with_for_update(of=AssignmentRow)
)
_WRITE = (
    update(AssignmentRow.__table__)  # type: ignore[arg-type]  # which is a Table
    .where(AssignmentRow.id == bindparam("of"))
    .values({name: bindparam(name) for name in _CHANGING})
)
_LABELLED = insert(AssignmentLabelRow.__table__)  # type: ignore[arg-type]


def assignment_of(row: Row[Any]) -> Assignment:
    """The assignment of a row of `WHOLE_ASSIGNMENT`."""
    return Assignment(
        id=row.id,
        campaign_id=row.campaign_id,
        round_number=row.round_number,
        configuration=configuration_of(row),
        device=row.device_key,
        role=row.role,
        rank=row.rank,
        reason=row.reason,
        state=row.state,
        attempts=row.attempts,
        failures=row.failures,
        worker=row.worker,
    )


def locked(session: Session, assignment_ids: Iterable[str]) -> dict[str, Assignment]:
    """The rows of these assignments that exist, by id, locked until the transaction ends."""
    ids = sorted(set(assignment_ids))
    if not ids:
        return {}
    rows = session.connection().execute(_LOCKED, {"ids": ids})
    return {row.id: assignment_of(row) for row in rows}


def leased(assignment: Assignment, worker: str) -> Assignment:
    """The assignment once it is given to a worker."""
    attempts = assignment.attempts + 1
    return replace(assignment, state=AssignmentState.LEASED, attempts=attempts, worker=worker)


def ended(assignment: Assignment, state: AssignmentState) -> Assignment:
    """The assignment in this state, with no worker any more."""
    return replace(assignment, state=state, worker=None)


def failed(assignment: Assignment, limit: int) -> Assignment:
    """The assignment after a failure: open again, or given up if it has failed often enough."""
    failures = assignment.failures + 1
    state = AssignmentState.OPEN if failures < limit else AssignmentState.FAILED
    return replace(ended(assignment, state), failures=failures)


def write(session: Session, changed: Iterable[Assignment]) -> None:
    """Writes what may change of these, as it stands."""
    rows = [{"of": a.id} | {name: getattr(a, name) for name in _CHANGING} for a in changed]
    if rows:
        session.connection().execute(_WRITE, rows)


def write_labels(session: Session, pairs: Iterable[tuple[str, int]]) -> None:
    """Notes which label each assignment, by its id, has led to."""
    rows = [{"assignment_id": assignment, "label_id": label} for assignment, label in pairs]
    if rows:
        session.connection().execute(_LABELLED, rows)


def lease_named(
    wanted: Sequence[tuple[str, str]], known: Mapping[str, Assignment]
) -> list[Assignment]:
    """Each of these assignments as it is once a worker has it, to be written; all or none.

    One that this worker was given before is given again as it is, so that trying this again does
    no harm.

    Args:
        wanted: ids of open assignments, and with each the worker.
        known: assignments by id, as they are now.

    Raises:
        StoreError: there is no such assignment, or somebody else has it.
    """
    leases = []
    for assignment_id, worker in wanted:
        assignment = known.get(assignment_id)
        if assignment is None:
            raise StoreError(f"there is no assignment {assignment_id!r} to lease")
        if assignment.state is AssignmentState.OPEN:
            assignment = leased(assignment, worker)
        elif (assignment.state, assignment.worker) != (AssignmentState.LEASED, worker):
            raise StoreError(
                f"assignment {assignment_id} cannot be given to {worker}: it is {assignment.state}"
                + (f" by {assignment.worker}" if assignment.worker else "")
            )
        leases.append(assignment)
    return leases
