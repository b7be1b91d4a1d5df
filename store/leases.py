"""Leases: who measures which assignment now, so that two never measure the same.

             lease                  record: ok, oom, unsupported
    open -----------> leased -------------------------------------> done
      ^                 |
      +-----------------+  a failure (a bad outcome, a lost worker, an expired lease), or an
      |                    interruption, which does not count
      +--> failed          after `max_attempts` failures

A worker that vanishes without a word loses its lease by time, and one that is still there keeps it
with a `heartbeat` now and then. The time is the database's, so that hosts whose clocks differ agree
on what has expired. A result that comes in after its lease was lost is kept all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from sqlalchemy import ScalarSelect, and_, func, or_, select, update
from sqlalchemy.orm import Session

from trappm.profiler.errors import StoreError
from trappm.profiler.records import Outcome
from trappm.store.assignment_rows import (
    WHOLE_ASSIGNMENT,
    assignment_of,
    failed,
    leased,
    locked,
    write,
)
from trappm.store.campaigns import add_event
from trappm.store.database import Database
from trappm.store.records import Assignment, AssignmentState, Role, RoundState
from trappm.store.schema import (
    AssignmentLabelRow,
    AssignmentRow,
    MeasurementRow,
    RoundRow,
)

MAX_ATTEMPTS = 3
"""Failures after which an assignment is given up, unless the caller says otherwise."""

_NEXT = (
    AssignmentRow.round_number,
    AssignmentRow.failures,
    AssignmentRow.rank,
    AssignmentRow.configuration_id,
)
"""The order in which assignments are leased: what failed waits for the rest of its round."""


class Leases(Database):
    """The part of the store that gives assignments to workers and takes them back."""

    def lease(
        self,
        campaign_id: str,
        device: str,
        worker: str,
        lease_s: float,
        *,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> Assignment | None:
        """Gives the worker the next assignment for this device, and to nobody else; None if none.

        A lease that has expired counts as a failure, and its assignment as open again.
        """
        with self._writing() as session:
            now = _time(session)
            waiting = or_(
                AssignmentRow.state == AssignmentState.OPEN,
                and_(
                    AssignmentRow.state == AssignmentState.LEASED,
                    AssignmentRow.lease_expires_at <= now.isoformat(),
                ),
            )
            query = (
                WHOLE_ASSIGNMENT.where(AssignmentRow.campaign_id == campaign_id)
                .where(AssignmentRow.device_key == device)
                .where(waiting)
                .order_by(*_NEXT)
                .limit(1)
                # Other workers step over the row that this one takes; SQLite has one writer anyway.
                .with_for_update(of=AssignmentRow, skip_locked=True)
            )
            while (found := session.execute(query).first()) is not None:
                one = assignment_of(found)
                if one.state is AssignmentState.LEASED:
                    reason = f"the lease of {one.worker} expired at {one.lease_expires_at}"
                    add_event(session, campaign_id, "lost", {"message": reason, "id": one.id})
                    write(session, [failed(one, max_attempts)])
                    continue
                one = leased(one, worker, _after(now, lease_s))
                write(session, [one])
                return one
            return None

    def heartbeat(self, lease: Assignment, lease_s: float) -> bool:
        """Prolongs a lease by so many seconds from now on.

        One that has expired is prolonged too, as long as nobody else was given the assignment.

        Args:
            lease: as it was given by `lease`: the same worker's next lease of it is another.
            lease_s: several times longer than the pause until the next heartbeat.

        Returns:
            False if the lease is lost, and the worker should stop.
        """
        with self._writing() as session:
            row = session.get(AssignmentRow, lease.id, with_for_update=True)
            if row is None or (row.worker, row.attempts) != (lease.worker, lease.attempts):
                return False
            row.lease_expires_at = _after(_time(session), lease_s)
            return True

    def give_up_lease(
        self, assignment_id: str, reason: str, *, max_attempts: int = MAX_ATTEMPTS
    ) -> None:
        """Takes an assignment back from a worker that was lost; counts as a failure of its."""
        with self._writing() as session:
            one = locked(session, [assignment_id]).get(assignment_id)
            if one is None or one.state is not AssignmentState.LEASED:
                return
            add_event(session, one.campaign_id, "lost", {"message": reason, "id": one.id})
            write(session, [failed(one, max_attempts)])

    def release_leases(self, campaign_id: str) -> int:
        """Takes all leases of a campaign back, as interruptions; for a campaign that resumes."""
        with self._writing() as session:
            released = session.scalars(
                update(AssignmentRow)
                .where(AssignmentRow.campaign_id == campaign_id)
                .where(AssignmentRow.state == AssignmentState.LEASED)
                .values(state=AssignmentState.OPEN, worker=None, lease_expires_at=None)
                .returning(AssignmentRow.id)
            )
            return len(released.all())

    def reopen_failed(self, campaign_id: str) -> int:
        """Gives assignments that were given up another chance, as long as their round is open.

        Returns:
            How many there were.
        """
        unfinished = select(RoundRow.number).where(
            RoundRow.campaign_id == campaign_id, RoundRow.state == RoundState.OPEN
        )
        query = select(AssignmentRow).where(
            AssignmentRow.campaign_id == campaign_id,
            AssignmentRow.state == AssignmentState.FAILED,
            AssignmentRow.round_number.in_(unfinished),
        )
        with self._writing() as session:
            rows = session.scalars(query.with_for_update()).all()
            for row in rows:
                row.state, row.failures = AssignmentState.OPEN, 0
            return len(rows)

    def given_up(self, campaign_id: str, device: str, outcome: Outcome) -> dict[str, int]:
        """Training configurations that were given up on a device, and how often each was tried.

        Args:
            campaign_id: of the campaign.
            device: its key.
            outcome: of the last attempt.

        Returns:
            Attempts by id of the configuration.
        """
        query = select(AssignmentRow.configuration_id, AssignmentRow.attempts).where(
            AssignmentRow.campaign_id == campaign_id,
            AssignmentRow.device_key == device,
            AssignmentRow.role == Role.TRAIN,
            AssignmentRow.state == AssignmentState.FAILED,
            _last_outcome() == outcome,
        )
        with self._reading() as session:
            return {row.configuration_id: row.attempts for row in session.execute(query)}

    def reopen(self, campaign_id: str, outcome: Outcome | None) -> int:
        """Opens assignments again that ended without a label, and their rounds with them.

        Args:
            campaign_id: of a campaign that nobody runs.
            outcome: of the last attempt that came to an end; None: none did.

        Returns:
            How many there were.
        """
        labelled = select(AssignmentLabelRow.assignment_id)
        query = select(AssignmentRow).where(
            AssignmentRow.campaign_id == campaign_id,
            AssignmentRow.state.in_([AssignmentState.FAILED, AssignmentState.DONE]),
            AssignmentRow.id.not_in(labelled),
            _last_outcome().is_not_distinct_from(outcome),
        )
        with self._writing() as session:
            rows = session.scalars(query.with_for_update()).all()
            for row in rows:
                row.state, row.failures = AssignmentState.OPEN, 0
            session.execute(
                update(RoundRow)
                .where(RoundRow.campaign_id == campaign_id)
                .where(RoundRow.number.in_({row.round_number for row in rows}))
                .values(state=RoundState.OPEN, report=None)
            )
            return len(rows)


def lease_named(
    session: Session,
    wanted: Sequence[tuple[str, str]],
    lease_s: float,
    known: Mapping[str, Assignment],
) -> list[Assignment]:
    """Each of these assignments as it is once a worker has it, to be written; all or none.

    One that this worker was given before is given again as it is, so that trying this again does
    no harm.

    Args:
        session: that will write them.
        wanted: ids of open assignments, and with each the worker.
        lease_s: for how many seconds, unless they are prolonged.
        known: assignments by id, as they are now.

    Raises:
        StoreError: there is no such assignment, or somebody else has it.
    """
    until = _after(_time(session), lease_s)
    leases = []
    for assignment_id, worker in wanted:
        one = known.get(assignment_id)
        if one is None:
            raise StoreError(f"there is no assignment {assignment_id!r} to lease")
        if one.state is AssignmentState.OPEN:
            one = leased(one, worker, until)
        elif (one.state, one.worker) != (AssignmentState.LEASED, worker):
            raise StoreError(
                f"assignment {assignment_id} cannot be given to {worker}: it is {one.state}"
                + (f" by {one.worker}" if one.worker else "")
            )
        leases.append(replace(one, lease_expires_at=until))
    return leases


def _last_outcome() -> ScalarSelect[Outcome]:
    """Of an assignment's latest attempt that came to an end, inside of a query of assignments."""
    attempt = select(func.max(MeasurementRow.id)).where(
        MeasurementRow.assignment_id == AssignmentRow.id
    )
    last = select(MeasurementRow.outcome).where(
        MeasurementRow.id == attempt.correlate(AssignmentRow).scalar_subquery()
    )
    return last.correlate(AssignmentRow).scalar_subquery()


def _time(session: Session) -> datetime:
    """Now, by the one clock that all who use this database share."""
    if session.get_bind().dialect.name == "sqlite":
        return datetime.now(UTC)  # they are all on one host
    now: datetime = session.scalars(select(func.clock_timestamp())).one()
    return now


def _after(now: datetime, seconds: float) -> str:
    return (now + timedelta(seconds=seconds)).isoformat()
