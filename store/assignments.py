"""Assignments: what is open, which worker measures what, and which label each led to.

A lease gives an assignment to one worker, so that no two measure the same:

           lease_next               record: ok, oom, unsupported
    open -----------> leased -------------------------------------> done
      ^                 |
      +-----------------+  a failure (what the step itself did), a loss (its worker is gone or
      |                    cannot measure), or an interruption, which does not count
      +--> failed          after `max_attempts` failures or `MAX_LOSSES` losses

Assignments are handed out by the round in which they are due, then by failures, then by rank. One
that failed is due a round later, when a busy host may be quieter, and on another host first: a
faulty host must not use up an assignment's attempts.

A lease does not expire. It lasts as long as its campaign has the same owner (`owners`), which alone
leases assignments and takes them back from lost workers. The next owner releases all leases. A
result that arrives after its lease was lost is recorded, too.

Assignments are read as columns and written by one statement per transaction, because mapped objects
take twice the time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import (
    Integer,
    Row,
    ScalarSelect,
    Select,
    String,
    bindparam,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import ReturningUpdate

from trappm.profiler.errors import InputError
from trappm.profiler.records import Outcome, Provenance
from trappm.store.campaigns import add_event, event_of_call, get_campaign_row
from trappm.store.records import (
    Assignment,
    AssignmentState,
    CampaignState,
    Loss,
    configuration_of,
    record_of,
)
from trappm.store.schema import (
    CONFIGURATION,
    AssignmentLabelRow,
    AssignmentRow,
    CampaignRow,
    ConfigurationRow,
    DeviceRow,
    FailedHostRow,
    LabelRow,
    MeasurementRow,
    RoundRow,
)
from trappm.store.transactions import Repository, reading, writing

MAX_ATTEMPTS = 3
"""Failures after which an assignment is abandoned, by default."""

_NO_ROUND = 2**31 - 1
"""Number that no round reaches."""

AS_PLANNED = (
    AssignmentRow.round_number,
    AssignmentRow.rank,
    AssignmentRow.configuration_id,
    AssignmentRow.device_key,
)
"""Order of assignments and their labels for readers, independent of their course."""

_WHOLE: Select[*tuple[Any, ...]] = select(
    *AssignmentRow.__table__.columns, AssignmentRow.device_key.label("device"), *CONFIGURATION
).join_from(AssignmentRow, ConfigurationRow, ConfigurationRow.id == AssignmentRow.configuration_id)
"""Assignments with the columns that `_assignment_of` needs."""


_BY_ID = _WHOLE.where(AssignmentRow.id == bindparam("assignment_id", type_=String))


def _lease_statements() -> tuple[Select[str], ReturningUpdate[Any]]:
    """Return the statements of the lease that a worker has, and of its next one.

    They are built once, as SQLAlchemy takes longer to build them than SQLite to answer.
    """
    row = AssignmentRow
    campaign = bindparam("campaign", type_=String)
    worker, host = bindparam("to_worker", type_=String), bindparam("to_host", type_=String)
    nodes = bindparam("nodes", type_=String, expanding=True)
    mine = row.campaign_id == campaign, row.device_key == bindparam("device", type_=String)
    failed_on = select(func.count()).where(FailedHostRow.assignment_id == row.id)
    here = failed_on.where(FailedHostRow.host == host).scalar_subquery()
    everywhere = failed_on.where(FailedHostRow.host.in_(nodes)).scalar_subquery()
    due = row.round_number + row.failures
    running = exists().where(CampaignRow.id == campaign)
    following = (
        select(row.id)
        .where(*mine, row.state == AssignmentState.OPEN)
        .where(running.where(CampaignRow.state == CampaignState.RUNNING))
        .where(or_(here == 0, everywhere == bindparam("count", type_=Integer)))
        .where(due < bindparam("before", type_=Integer))
        .order_by(due, row.failures, row.rank, row.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    leased = {"state": AssignmentState.LEASED, "worker": worker, "host": host}
    query = update(row).where(row.id == following.scalar_subquery())
    query = query.values(leased | {"attempts": row.attempts + 1})
    query = query.execution_options(synchronize_session=False)
    return select(row.id).where(*mine, row.worker == worker), query.returning(row.id)


_HELD, _LEASE_NEXT = _lease_statements()


def lock_rows(session: Session, assignment_ids: Iterable[str]) -> dict[str, Assignment]:
    """Return the existing assignments of these ids, locked until the transaction ends."""
    ids = sorted(set(assignment_ids))
    if not ids:
        return {}
    # In one order, so that two concurrent writers cannot deadlock.
    query = _WHOLE.where(AssignmentRow.id.in_(ids)).order_by(AssignmentRow.id)
    rows = session.execute(query.with_for_update(of=AssignmentRow))
    return {row.id: _assignment_of(row) for row in rows}


def write(session: Session, changed: Iterable[Assignment]) -> None:
    """Write the columns of assignments that may change."""
    names = ("id", "state", "failures", "losses", "worker", "host")
    rows = [{name: getattr(assignment, name) for name in names} for assignment in changed]
    if rows:
        session.execute(update(AssignmentRow), rows)


def write_labels(session: Session, labels: Mapping[str, int]) -> None:
    """Write which label each assignment, by its id, has led to."""
    if labels:
        rows = [{"assignment_id": name, "label_id": label} for name, label in labels.items()]
        session.execute(insert(AssignmentLabelRow), rows)


class Assignments(Repository):
    """Planned measurements of campaigns, and their state."""

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
        """Return a campaign's assignments in the order in which they were planned."""
        query = _WHOLE.where(AssignmentRow.campaign_id == campaign_id).order_by(*AS_PLANNED)
        if device is not None:
            query = query.where(AssignmentRow.device_key == device)
        if state is not None:
            query = query.where(AssignmentRow.state == AssignmentState(state))
        if round_number is not None:
            query = query.where(AssignmentRow.round_number == round_number)
        return [_assignment_of(row) for row in session.execute(query)]

    @reading
    def counts(self, session: Session, campaign_id: str) -> dict[str, dict[AssignmentState, int]]:
        """Return the number of assignments by device key and state."""
        place = (AssignmentRow.device_key, AssignmentRow.state)
        query = select(*place, func.count()).filter_by(campaign_id=campaign_id)
        counts: dict[str, dict[AssignmentState, int]] = {}
        for device, state, count in session.execute(query.group_by(*place).order_by(*place)):
            counts.setdefault(device, {})[state] = count
        return counts

    @writing
    def lease_next(
        self,
        session: Session,
        campaign_id: str,
        device: str,
        worker: str,
        *,
        host: str = "",
        hosts: Collection[str] = (),
        before: int | None = None,
    ) -> Assignment | None:
        """Lease the next open assignment of a campaign to a worker; None if there is none.

        A worker that has a lease gets the same one again, so that a repeated call changes nothing.
        A campaign that was stopped leases nothing: what it had leased is open again, and may still
        be measured by the worker that had it.

        Args:
            campaign_id: Id of the campaign.
            device: Device key of the worker.
            worker: Name of the worker.
            host: Its node. Assignments that failed there are for other nodes.
            hosts: All nodes with this device: what failed on all of them may be repeated anywhere.
            before: Round from which on nothing is due yet; None: everything is.
        """
        nodes = {host, *hosts}
        lease = {"campaign": campaign_id, "device": device, "to_worker": worker, "to_host": host}
        limits = {"nodes": [*nodes], "count": len(nodes)}
        limits["before"] = _NO_ROUND if before is None else before
        held = session.scalar(_HELD, lease) or session.scalar(_LEASE_NEXT, lease | limits)
        if held is None:
            return None
        return _assignment_of(session.execute(_BY_ID, {"assignment_id": held}).one())

    @writing
    def lose(self, session: Session, assignment_id: str, reason: str) -> Assignment:
        """Take an assignment back from a worker that was lost, if it is leased, and return it."""
        assignment = lock_rows(session, [assignment_id])[assignment_id]
        if assignment.state is not AssignmentState.LEASED:
            return assignment
        lost = {"message": f"{assignment.configuration}: {reason}", "id": assignment.id}
        add_event(session, assignment.campaign_id, "lost", lost)
        after = assignment.with_loss()
        write(session, [after])
        return after

    @writing
    def release_leases(self, session: Session, campaign_id: str) -> None:
        """Take all leases of a campaign back, as interruptions."""
        release(session, campaign_id)

    @reading
    def list_failed(
        self, session: Session, campaign_id: str
    ) -> list[tuple[Assignment, Outcome | None]]:
        """Return abandoned assignments with the outcome of their last attempt; None if lost."""
        query = _WHOLE.add_columns(_last_outcome().label("last_outcome")).where(
            AssignmentRow.campaign_id == campaign_id, AssignmentRow.state == AssignmentState.FAILED
        )
        return [(_assignment_of(row), row.last_outcome) for row in session.execute(query)]

    @reading
    def losses(self, session: Session, campaign_id: str) -> list[Loss]:
        """Return the abandoned assignments by device and outcome of their last attempt."""
        row = MeasurementRow
        query = (
            select(
                AssignmentRow.device_key.label("device"),
                row.outcome,
                func.count().label("count"),
                func.min(row.message).label("message"),
            )
            .outerjoin(row, row.id == _last_attempt())
            .where(
                AssignmentRow.campaign_id == campaign_id,
                AssignmentRow.state == AssignmentState.FAILED,
            )
            .group_by(AssignmentRow.device_key, row.outcome)
            .order_by(AssignmentRow.device_key, row.outcome)
        )
        return [record_of(Loss, each) for each in session.execute(query)]

    @writing
    def reopen(self, session: Session, campaign_id: str, outcome: Outcome | None) -> int:
        """Open assignments that ended without a label again, and their rounds.

        If there are any, the campaign becomes paused, and an event reports their number, which is
        returned.

        Args:
            campaign_id: Campaign that no process runs.
            outcome: Outcome of their last attempt; None if all their workers were lost.

        Raises:
            InputError: The campaign is running, or was cancelled.
        """
        campaign = get_campaign_row(session, campaign_id)
        if campaign.state in {CampaignState.CANCELLED, CampaignState.RUNNING}:
            raise InputError(
                f"campaign {campaign_id} is {campaign.state}; pause a running one first, with: "
                f"trappm campaign pause {campaign_id}"
            )
        if (reopened := event_of_call(session, campaign_id)) is not None:
            return int(reopened["count"])
        query = select(AssignmentRow).where(
            AssignmentRow.campaign_id == campaign_id,
            AssignmentRow.state.in_([AssignmentState.FAILED, AssignmentState.DONE]),
            AssignmentRow.id.not_in(select(AssignmentLabelRow.assignment_id)),
            _last_outcome().is_not_distinct_from(outcome),
        )
        rows = session.scalars(query.with_for_update()).all()
        if rows:
            campaign.state, campaign.finished_at = CampaignState.PAUSED, None
            how = f"whose last attempt ended as {outcome or 'lost'}"
            message = f"{len(rows)} assignments wait again {how}"
            add_event(session, campaign_id, "order", {"message": message, "count": len(rows)})
        for row in rows:
            row.state, row.failures, row.losses = AssignmentState.OPEN, 0, 0
        reopened_ids = [row.id for row in rows]
        session.execute(delete(FailedHostRow).where(FailedHostRow.assignment_id.in_(reopened_ids)))
        session.execute(
            update(RoundRow)
            .where(RoundRow.campaign_id == campaign_id)
            .where(RoundRow.number.in_({row.round_number for row in rows}))
            .values(report=None)
        )
        return len(rows)

    @writing
    def adopt_labels(
        self, session: Session, campaign_id: str, device: str, fingerprint: str, protocol_name: str
    ) -> None:
        """Close open assignments whose configuration any campaign has measured before.

        Only measured labels count, of the same device key, software stack and protocol.
        """
        query = (
            _WHOLE.add_columns(LabelRow.id.label("label_id"))
            .join(LabelRow, LabelRow.configuration_id == AssignmentRow.configuration_id)
            .join(DeviceRow, DeviceRow.id == LabelRow.device_id)
            .where(AssignmentRow.campaign_id == campaign_id)
            .where(AssignmentRow.device_key == device)
            .where(AssignmentRow.state == AssignmentState.OPEN)
            .where(DeviceRow.key == device, DeviceRow.fingerprint == fingerprint)
            .where(LabelRow.protocol_name == protocol_name)
            .where(LabelRow.provenance == Provenance.MEASURED)
            .with_for_update(of=AssignmentRow)
        )
        rows = session.execute(query).all()
        write(session, [_assignment_of(row).with_state(AssignmentState.DONE) for row in rows])
        write_labels(session, {row.id: row.label_id for row in rows})


def release(session: Session, campaign_id: str) -> None:
    """Take all leases of a campaign back within a transaction, as interruptions."""
    query = update(AssignmentRow).filter_by(campaign_id=campaign_id, state=AssignmentState.LEASED)
    session.execute(query.values(state=AssignmentState.OPEN, worker=None, host=None))


def _assignment_of(row: Row[Any]) -> Assignment:
    return record_of(Assignment, row, configuration=configuration_of(row))


def _last_attempt() -> ScalarSelect[int]:
    """Return the subquery of the id of an assignment's last recorded attempt."""
    attempt = select(func.max(MeasurementRow.id)).where(
        MeasurementRow.assignment_id == AssignmentRow.id
    )
    return attempt.correlate(AssignmentRow).scalar_subquery()


def _last_outcome() -> ScalarSelect[Outcome]:
    """Return the subquery of an assignment's last recorded outcome."""
    last = select(MeasurementRow.outcome).where(MeasurementRow.id == _last_attempt())
    return last.correlate(AssignmentRow).scalar_subquery()
