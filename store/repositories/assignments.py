"""Assignments as rows of the database, there and back, and the steps that they may take.

They are read as columns and written by one statement for all that a transaction changed, instead of
as mapped objects: a campaign's turn does little else, and takes half the time so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sqlalchemy import Row, bindparam, insert, select, update
from sqlalchemy.orm import Session

from trappm.store.db.models import AssignmentLabelRow, AssignmentRow, ConfigurationRow
from trappm.store.records import Assignment, AssignmentState
from trappm.store.repositories.workloads import configuration_of

WHOLE_ASSIGNMENT = select(
    *AssignmentRow.__table__.columns,
    *(c for c in ConfigurationRow.__table__.columns if c.name not in {"id", "family"}),
).join_from(AssignmentRow, ConfigurationRow, ConfigurationRow.id == AssignmentRow.configuration_id)
"""Assignments with what `assignment_of` needs."""

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
    """Those of these ids that there are, by id; locked until the transaction ends."""
    ids = sorted(set(assignment_ids))
    if not ids:
        return {}
    rows = session.connection().execute(_LOCKED, {"ids": ids})
    return {row.id: assignment_of(row) for row in rows}


def leased(one: Assignment, worker: str) -> Assignment:
    """Given to a worker."""
    return replace(one, state=AssignmentState.LEASED, attempts=one.attempts + 1, worker=worker)


def ended(one: Assignment, state: AssignmentState) -> Assignment:
    """With nobody any more."""
    return replace(one, state=state, worker=None)


def failed(one: Assignment, limit: int) -> Assignment:
    """Open again after a failure, or given up when it has failed often enough."""
    failures = one.failures + 1
    state = AssignmentState.OPEN if failures < limit else AssignmentState.FAILED
    return replace(ended(one, state), failures=failures)


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
