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
"""

from __future__ import annotations

from collections import Counter

from sqlalchemy import ScalarSelect, func, select, update
from sqlalchemy.orm import Session

from trappm.profiler.errors import InputError
from trappm.profiler.records import Outcome, Provenance
from trappm.store.db.models import (
    AssignmentLabelRow,
    AssignmentRow,
    DeviceRow,
    LabelRow,
    MeasurementRow,
    RoundRow,
)
from trappm.store.db.transactions import Repository, reading, writing
from trappm.store.records import Assignment, AssignmentState, CampaignState, Role, RoundState
from trappm.store.repositories.assignment_rows import (
    AS_PLANNED,
    WHOLE_ASSIGNMENT,
    assignment_of,
    ended,
    failed,
    locked,
    write,
    write_labels,
)
from trappm.store.repositories.campaigns import add_event, event_of_call, existing

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
