"""Assignments: which are open, who measures which now, and which got their label.

A lease gives an assignment to a worker, so that two never measure the same:

             lease                  record: ok, oom, unsupported
    open -----------> leased -------------------------------------> done
      ^                 |
      +-----------------+  a failure (a bad outcome, a lost worker), or an interruption, which
      |                    does not count
      +--> failed          after `max_attempts` failures

A lease has no time of its own: it holds for as long as its campaign's owner does (`owners`), which
alone gives out leases (`store.measurements.record_and_lease`) and takes them back from workers that
were lost. Who takes the campaign over releases them all. A result that comes in after its lease was
lost is kept all the same.

Assignments are read as columns and written by one statement for all that a transaction changed. A
campaign's turn does little else, and mapped objects take twice the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Row, ScalarSelect, bindparam, func, insert, select, update
from sqlalchemy.orm import Session

from trappm.profiler.errors import InputError, StoreError
from trappm.profiler.records import Outcome, Provenance
from trappm.store.campaigns import add_event, event_of_call, existing
from trappm.store.records import Assignment, AssignmentState, CampaignState, Role, RoundState
from trappm.store.schema import (
    AssignmentLabelRow,
    AssignmentRow,
    ConfigurationRow,
    DeviceRow,
    LabelRow,
    MeasurementRow,
    RoundRow,
)
from trappm.store.transactions import Repository, reading, writing
from trappm.store.workloads import configuration_of

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


MAX_ATTEMPTS = 3
"""Failures after which an assignment is given up, by default."""


class Assignments(Repository):
    """What campaigns want measured, and what has become of it."""

    @reading
    def of_campaign(
        self,
        session: Session,
        campaign_id: str,
        *,
        device: str | None = None,
        state: AssignmentState | str | None = None,
        round_number: int | None = None,
    ) -> list[Assignment]:
        """The campaign's assignments in the order in which they were planned."""
        query = WHOLE_ASSIGNMENT.where(AssignmentRow.campaign_id == campaign_id)
        query = query.order_by(*AS_PLANNED, AssignmentRow.device_key)
        if device is not None:
            query = query.where(AssignmentRow.device_key == device)
        if state is not None:
            query = query.where(AssignmentRow.state == AssignmentState(state))
        if round_number is not None:
            query = query.where(AssignmentRow.round_number == round_number)
        return [assignment_of(row) for row in session.execute(query)]

    @reading
    def counts(self, session: Session, campaign_id: str) -> dict[str, dict[AssignmentState, int]]:
        """How many assignments are in each state, by device key."""
        query = (
            select(AssignmentRow.device_key, AssignmentRow.state, func.count())
            .where(AssignmentRow.campaign_id == campaign_id)
            .group_by(AssignmentRow.device_key, AssignmentRow.state)
            .order_by(AssignmentRow.device_key, AssignmentRow.state)
        )
        counts: dict[str, dict[AssignmentState, int]] = {}
        for device, state, count in session.execute(query):
            counts.setdefault(device, {})[state] = count
        return counts

    @writing
    def take_back(
        self, session: Session, assignment_id: str, reason: str, *, max_attempts: int = MAX_ATTEMPTS
    ) -> None:
        """Takes an assignment back from a worker that was lost; this counts as a failure."""
        assignment = locked(session, [assignment_id]).get(assignment_id)
        if assignment is None or assignment.state is not AssignmentState.LEASED:
            return
        lost = {"message": reason, "id": assignment.id}
        add_event(session, assignment.campaign_id, "lost", lost)
        write(session, [failed(assignment, max_attempts)])

    @writing
    def release_leases(self, session: Session, campaign_id: str) -> None:
        """Takes all leases of a campaign back, as interruptions; for a campaign that resumes."""
        release(session, campaign_id)

    @writing
    def reopen_failed(self, session: Session, campaign_id: str) -> None:
        """Gives assignments that were given up another chance, as long as their round is open."""
        unfinished = select(RoundRow.number).where(
            RoundRow.campaign_id == campaign_id, RoundRow.state == RoundState.OPEN
        )
        session.execute(
            update(AssignmentRow)
            .where(AssignmentRow.campaign_id == campaign_id)
            .where(AssignmentRow.state == AssignmentState.FAILED)
            .where(AssignmentRow.round_number.in_(unfinished))
            .values(state=AssignmentState.OPEN, failures=0)
        )

    @reading
    def given_up(
        self, session: Session, campaign_id: str, device: str, outcome: Outcome
    ) -> dict[str, int]:
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
        return {row.configuration_id: row.attempts for row in session.execute(query)}

    @reading
    def failed_by_outcome(self, session: Session, campaign_id: str) -> dict[Outcome | None, int]:
        """Return the number of failed assignments by outcome of the last attempt; None if lost."""
        query = select(_last_outcome(), AssignmentRow.id).where(
            AssignmentRow.campaign_id == campaign_id, AssignmentRow.state == AssignmentState.FAILED
        )
        return dict(Counter(outcome for outcome, _ in session.execute(query)))

    @writing
    def reopen(self, session: Session, campaign_id: str, outcome: Outcome | None) -> int:
        """Opens assignments again that ended without a label, and their rounds with them.

        The campaign is paused then, if there were any, and an event says how many.

        Args:
            campaign_id: of a campaign that nobody runs.
            outcome: of the last attempt that came to an end; None: none did.

        Returns:
            How many there were.

        Raises:
            InputError: it is running, or was cancelled.
        """
        labelled = select(AssignmentLabelRow.assignment_id)
        query = select(AssignmentRow).where(
            AssignmentRow.campaign_id == campaign_id,
            AssignmentRow.state.in_([AssignmentState.FAILED, AssignmentState.DONE]),
            AssignmentRow.id.not_in(labelled),
            _last_outcome().is_not_distinct_from(outcome),
        )
        campaign = existing(session, campaign_id)
        if campaign.state in {CampaignState.CANCELLED, CampaignState.RUNNING}:
            raise InputError(
                f"campaign {campaign_id} is {campaign.state}; pause a running one first, with: "
                f"trappm campaign pause {campaign_id}"
            )
        if (reopened := event_of_call(session, campaign_id)) is not None:
            return int(reopened["count"])
        rows = session.scalars(query.with_for_update()).all()
        if rows:
            campaign.state, campaign.finished_at = CampaignState.PAUSED, None
            how = f"whose last attempt ended as {outcome or 'lost'}"
            message = f"{len(rows)} assignments wait again {how}"
            add_event(session, campaign_id, "order", {"message": message, "count": len(rows)})
        for row in rows:
            row.state, row.failures = AssignmentState.OPEN, 0
        session.execute(
            update(RoundRow)
            .where(RoundRow.campaign_id == campaign_id)
            .where(RoundRow.number.in_({row.round_number for row in rows}))
            .values(state=RoundState.OPEN, report=None)
        )
        return len(rows)

    @writing
    def adopt_labels(
        self, session: Session, campaign_id: str, device: str, fingerprint: str, protocol_name: str
    ) -> None:
        """Closes open assignments whose configuration was measured before, by any campaign.

        Only measured labels count, of the same device key, software stack and protocol.
        """
        query = (
            WHOLE_ASSIGNMENT.add_columns(LabelRow.id.label("label_id"))
            .join(LabelRow, LabelRow.configuration_id == AssignmentRow.configuration_id)
            .join(DeviceRow, DeviceRow.id == LabelRow.device_id)
            .where(AssignmentRow.campaign_id == campaign_id)
            .where(AssignmentRow.device_key == device)
            .where(AssignmentRow.state == AssignmentState.OPEN)
            .where(DeviceRow.key == device)
            .where(DeviceRow.fingerprint == fingerprint)
            .where(LabelRow.protocol_name == protocol_name)
            .where(LabelRow.provenance == Provenance.MEASURED)
            .with_for_update(of=AssignmentRow)
        )
        rows = session.execute(query).all()
        write(session, [ended(assignment_of(row), AssignmentState.DONE) for row in rows])
        write_labels(session, [(row.id, row.label_id) for row in rows])


def release(session: Session, campaign_id: str) -> None:
    """As `Assignments.release_leases`, within a transaction."""
    session.execute(
        update(AssignmentRow)
        .where(AssignmentRow.campaign_id == campaign_id)
        .where(AssignmentRow.state == AssignmentState.LEASED)
        .values(state=AssignmentState.OPEN, worker=None)
    )


def _last_outcome() -> ScalarSelect[Outcome]:
    """Of an assignment's latest attempt that came to an end, inside of a query of assignments."""
    attempt = select(func.max(MeasurementRow.id)).where(
        MeasurementRow.assignment_id == AssignmentRow.id
    )
    last = select(MeasurementRow.outcome).where(
        MeasurementRow.id == attempt.correlate(AssignmentRow).scalar_subquery()
    )
    return last.correlate(AssignmentRow).scalar_subquery()
