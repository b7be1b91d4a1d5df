"""Leases: who measures which assignment now, so that two never measure the same.

             lease                  record: ok, oom, unsupported
    open -----------> leased -------------------------------------> done
      ^                 |
      +-----------------+  a failure (a bad outcome, a lost worker), or an interruption, which
      |                    does not count
      +--> failed          after `max_attempts` failures

A lease has no time of its own: it holds for as long as its campaign's owner does (`owners`), which
alone gives out leases (`record_and_lease`) and takes them back from workers that were lost. Who
takes the campaign over releases them all. A result that comes in after its lease was lost is kept
all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import ScalarSelect, func, select, update
from sqlalchemy.orm import Session

from trappm.profiler.errors import InputError, StoreError
from trappm.profiler.records import Outcome
from trappm.store.db.engine import Database
from trappm.store.db.models import AssignmentLabelRow, AssignmentRow, MeasurementRow, RoundRow
from trappm.store.records import Assignment, AssignmentState, CampaignState, Role, RoundState
from trappm.store.repositories.assignments import failed, leased, locked, write
from trappm.store.repositories.campaigns import add_event, existing

MAX_ATTEMPTS = 3
"""Failures after which an assignment is given up, unless the caller says otherwise."""


class Leases(Database):
    """The part of the store that gives assignments to workers and takes them back."""

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
            return release(session, campaign_id)

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

        The campaign is paused then, if there were any.

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
        with self._writing() as session:
            campaign = existing(session, campaign_id)
            if campaign.state in {CampaignState.CANCELLED, CampaignState.RUNNING}:
                raise InputError(
                    f"campaign {campaign_id} is {campaign.state}; pause a running one first, with: "
                    f"trappm campaign pause {campaign_id}"
                )
            rows = session.scalars(query.with_for_update()).all()
            if rows:
                campaign.state, campaign.finished_at = CampaignState.PAUSED, None
            for row in rows:
                row.state, row.failures = AssignmentState.OPEN, 0
            session.execute(
                update(RoundRow)
                .where(RoundRow.campaign_id == campaign_id)
                .where(RoundRow.number.in_({row.round_number for row in rows}))
                .values(state=RoundState.OPEN, report=None)
            )
            return len(rows)


def release(session: Session, campaign_id: str) -> int:
    """As `Leases.release_leases`, within a transaction."""
    released = session.scalars(
        update(AssignmentRow)
        .where(AssignmentRow.campaign_id == campaign_id)
        .where(AssignmentRow.state == AssignmentState.LEASED)
        .values(state=AssignmentState.OPEN, worker=None)
        .returning(AssignmentRow.id)
    )
    return len(released.all())


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
        one = known.get(assignment_id)
        if one is None:
            raise StoreError(f"there is no assignment {assignment_id!r} to lease")
        if one.state is AssignmentState.OPEN:
            one = leased(one, worker)
        elif (one.state, one.worker) != (AssignmentState.LEASED, worker):
            raise StoreError(
                f"assignment {assignment_id} cannot be given to {worker}: it is {one.state}"
                + (f" by {one.worker}" if one.worker else "")
            )
        leases.append(one)
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
