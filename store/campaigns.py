"""Campaigns: spec, pool, rounds, events, and published snapshots.

Aliases of snapshots, such as `latest`, belong to the registry (`learner.snapshots.registry`).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from trappm.profiler.errors import CampaignError, InputError, SnapshotError
from trappm.profiler.records import Configuration
from trappm.store.engine import database_time
from trappm.store.records import (
    AssignmentState,
    CampaignRecord,
    CampaignState,
    EventRecord,
    Owner,
    OwnerProcess,
    PlannedAssignment,
    Purpose,
    Role,
    RoundRecord,
    RoundState,
    SnapshotRecord,
)
from trappm.store.schema import (
    AssignmentLabelRow,
    AssignmentRow,
    CampaignRow,
    ConfigurationRow,
    DeviceRow,
    EventRow,
    MeasurementRow,
    PoolRow,
    RoundRow,
    SnapshotRow,
)
from trappm.store.transactions import Repository, call_of, reading, writing
from trappm.store.workloads import configuration_of, insert_configurations

ENDED = frozenset({CampaignState.FINISHED, CampaignState.CANCELLED})
"""Nobody runs these ever again."""


class Campaigns(Repository):
    """Campaigns, what each may choose from, what happened to it and what it cost."""

    @writing
    def create(
        self, session: Session, name: str, spec: Mapping[str, Any], seed: int
    ) -> CampaignRecord:
        """A new campaign, paused until somebody runs it."""
        call = call_of(session)
        row = session.get(CampaignRow, call.id[:8])
        if row is None:
            row = CampaignRow(
                id=call.id[:8],
                name=name,
                spec=dict(spec),
                seed=seed,
                state=CampaignState.PAUSED,
                created_at=call.at,
            )
            session.add(row)
            session.flush()
        return _campaign(row, database_time(session.connection()))

    def get(self, campaign_id: str | None = None) -> CampaignRecord:
        """The campaign of this id or of its beginning, the latest one without an id.

        Raises:
            InputError: there is none.
        """
        known = self.all()
        for record in known:
            if campaign_id in {None, record.id}:
                return record
        alike = [c for c in known if campaign_id and c.id.startswith(campaign_id)]
        if len(alike) == 1:
            return alike[0]
        if campaign_id is None:
            raise InputError("there is no campaign yet; start one with: trappm campaign launch")
        there_are = ", ".join(c.id for c in known[:10]) or "none yet"
        raise InputError(f"no campaign {campaign_id!r}; there are: {there_are}")

    @reading
    def state(self, session: Session, campaign_id: str) -> CampaignState:
        """Where a campaign stands.

        Raises:
            CampaignError: there is none of this id; or another process has it now (`as_owner`).
        """
        self._database.check_guard(session)
        return existing(session, campaign_id, to_change=False).state

    @reading
    def all(self, session: Session) -> list[CampaignRecord]:
        """All campaigns, the latest first."""
        rows = session.scalars(
            select(CampaignRow).order_by(CampaignRow.created_at.desc(), CampaignRow.id)
        )
        now = database_time(session.connection())
        return [_campaign(row, now) for row in rows]

    @writing
    def set_pool(
        self, session: Session, campaign_id: str, pool: Sequence[tuple[Configuration, bool]]
    ) -> None:
        """Sets what a campaign may choose from, once; doing it again changes nothing.

        Args:
            campaign_id: of an existing campaign.
            pool: each configuration, and whether its architecture is held out for evaluation.

        Raises:
            CampaignError: no such campaign, or it has another pool already.
        """
        existing(session, campaign_id)
        known = {
            (row.configuration_id, row.held_out)
            for row in session.scalars(select(PoolRow).where(PoolRow.campaign_id == campaign_id))
        }
        if not known:
            insert_configurations(session, (configuration for configuration, _ in pool))
            session.add_all(
                PoolRow(campaign_id=campaign_id, configuration_id=c.id, held_out=held_out)
                for c, held_out in pool
            )
        elif known != {(c.id, held_out) for c, held_out in pool}:
            raise CampaignError(
                f"campaign {campaign_id} has a pool of {len(known)} configurations already, "
                "and a pool never changes; start a new campaign for another one"
            )

    @reading
    def pool(self, session: Session, campaign_id: str) -> list[tuple[Configuration, bool]]:
        """The pool of a campaign, sorted; with each configuration, whether it is held out."""
        rows = session.execute(
            select(ConfigurationRow, PoolRow.held_out)
            .join(PoolRow, PoolRow.configuration_id == ConfigurationRow.id)
            .where(PoolRow.campaign_id == campaign_id)
        )
        return sorted((configuration_of(row), held_out) for row, held_out in rows)

    @reading
    def outcome_counts(
        self, session: Session, campaign_id: str, *, since: str | None = None
    ) -> dict[str, dict[str, int]]:
        """How many attempts of this campaign ended in each outcome, by device key.

        Args:
            campaign_id: of the campaign.
            since: only those that began at this time, ISO 8601, or later.
        """
        query = (
            select(DeviceRow.key, MeasurementRow.outcome, func.count())
            .join(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
            .where(MeasurementRow.campaign_id == campaign_id)
            .group_by(DeviceRow.key, MeasurementRow.outcome)
            .order_by(DeviceRow.key, MeasurementRow.outcome)
        )
        if since is not None:
            query = query.where(MeasurementRow.started_at >= since)
        counts: dict[str, dict[str, int]] = {}
        for device, outcome, count in session.execute(query):
            counts.setdefault(device, {})[outcome.value] = count
        return counts

    @reading
    def label_counts(self, session: Session, campaign_id: str | None = None) -> dict[str, int]:
        """How many assignments have a label, by campaign; of one campaign alone if it is named."""
        query = (
            select(AssignmentRow.campaign_id, func.count().label("labels"))
            .join(AssignmentLabelRow, AssignmentLabelRow.assignment_id == AssignmentRow.id)
            .group_by(AssignmentRow.campaign_id)
        )
        if campaign_id is not None:
            query = query.where(AssignmentRow.campaign_id == campaign_id)
        return {row.campaign_id: row.labels for row in session.execute(query)}

    @reading
    def measuring_seconds_by_device(
        self,
        session: Session,
        campaign_id: str,
        *,
        since: str | None = None,
        until: str | None = None,
    ) -> dict[str, float]:
        """How long this campaign's attempts have taken, failed ones included, by device key.

        Args:
            campaign_id: which campaign.
            since: only attempts that began then or later (ISO 8601, UTC).
            until: only attempts that began before.
        """
        query = (
            select(DeviceRow.key, func.sum(MeasurementRow.duration_s))
            .join(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
            .where(MeasurementRow.campaign_id == campaign_id)
            .group_by(DeviceRow.key)
        )
        if since is not None:
            query = query.where(MeasurementRow.started_at >= since)
        if until is not None:
            query = query.where(MeasurementRow.started_at < until)
        return {device: float(seconds) for device, seconds in session.execute(query)}

    @writing
    def log_event(
        self, session: Session, campaign_id: str, kind: str, message: Mapping[str, Any]
    ) -> None:
        """Record something that happened to a campaign."""
        if event_of_call(session, campaign_id) is None:
            add_event(session, campaign_id, kind, message)

    @reading
    def events(
        self,
        session: Session,
        campaign_id: str,
        *,
        kind: str | None = None,
        last: int | None = None,
    ) -> list[EventRecord]:
        """What happened to a campaign, the earliest first.

        Args:
            campaign_id: of the campaign.
            kind: only events of this kind.
            last: only so many, the latest.
        """
        query = select(EventRow).where(EventRow.campaign_id == campaign_id)
        if kind is not None:
            query = query.where(EventRow.kind == kind)
        query = query.order_by(EventRow.id.desc()).limit(last)
        rows = session.scalars(query).all()
        return [EventRecord(at=r.at, kind=r.kind, message=r.message) for r in reversed(rows)]


class Rounds(Repository):
    """The rounds of campaigns: each an acquisition and its measurements."""

    @writing
    def plan(
        self,
        session: Session,
        campaign_id: str,
        number: int,
        purpose: Purpose | str,
        planned: Sequence[PlannedAssignment],
    ) -> None:
        """Writes a round down, or the parts of it that other devices have.

        A device's part is planned once: one that has assignments in this round is left as it is.
        A configuration that was given up before may be planned again: it is opened anew.

        Raises:
            StoreError: a configuration is not in the campaign's pool, or planned for a second time
                on the same device; nothing is written.
        """
        existing(session, campaign_id)  # one planner at a time
        if session.get(RoundRow, (campaign_id, number)) is None:
            session.add(
                RoundRow(
                    campaign_id=campaign_id,
                    number=number,
                    purpose=Purpose(purpose),
                    state=RoundState.OPEN,
                )
            )
            session.flush()
        query = select(AssignmentRow.device_key).distinct()
        query = query.filter_by(campaign_id=campaign_id, round_number=number)
        are_planned = set(session.scalars(query))
        failed = select(AssignmentRow).filter_by(
            campaign_id=campaign_id, state=AssignmentState.FAILED
        )
        given_up = {(a.configuration_id, a.device_key): a for a in session.scalars(failed)}
        for assignment in planned:
            if assignment.device in are_planned:
                continue
            place = assignment.configuration.id, assignment.device
            row = given_up.get(place) or _new_assignment(campaign_id, assignment)
            row.round_number = number
            row.rank = assignment.rank
            row.reason = dict(assignment.reason)
            row.state = AssignmentState.OPEN
            row.failures = 0
            session.add(row)

    @reading
    def all(self, session: Session, campaign_id: str) -> list[RoundRecord]:
        """The campaign's rounds by number."""
        rows = session.scalars(
            select(RoundRow).where(RoundRow.campaign_id == campaign_id).order_by(RoundRow.number)
        )
        return [
            RoundRecord(
                campaign_id=row.campaign_id,
                number=row.number,
                purpose=row.purpose,
                state=row.state,
                report=row.report,
            )
            for row in rows
        ]

    @writing
    def close(
        self, session: Session, campaign_id: str, number: int, report: Mapping[str, Any]
    ) -> None:
        """Closes a round with its report; one that is closed keeps its first report.

        Raises:
            CampaignError: there is no such round.
        """
        row = session.get(RoundRow, (campaign_id, number), with_for_update=True)
        if row is None:
            raise CampaignError(f"campaign {campaign_id!r} has no round {number} to close")
        if row.state is RoundState.OPEN:
            row.state, row.report = RoundState.CLOSED, dict(report)


def add_event(session: Session, campaign_id: str, kind: str, message: Mapping[str, Any]) -> None:
    at = call_of(session).at
    session.add(EventRow(campaign_id=campaign_id, at=at, kind=kind, message=dict(message)))


def event_of_call(session: Session, campaign_id: str) -> Mapping[str, Any] | None:
    """Return the message of the event that an earlier attempt of this call added, None without one.

    A call adds one event at most, under the time of the call, to the microsecond.
    """
    at = call_of(session).at
    return session.scalar(select(EventRow.message).filter_by(campaign_id=campaign_id, at=at))


def existing(session: Session, campaign_id: str, *, to_change: bool = True) -> CampaignRow:
    row = session.get(CampaignRow, campaign_id, with_for_update=to_change)
    if row is None:
        raise CampaignError(f"no campaign {campaign_id!r}; see: trappm campaign status")
    return row


def owner_of(row: CampaignRow, now: datetime) -> Owner | None:
    """The owner that runs a campaign, by the database's time; None if it has none."""
    if row.owner_id is None or row.owner_process is None:
        return None
    seen_at = datetime.fromisoformat(str(row.owner_seen_at))
    return Owner(
        id=row.owner_id,
        process=OwnerProcess(**row.owner_process),
        since=str(row.owned_since),
        silent_s=(now - seen_at).total_seconds(),
    )


def _campaign(row: CampaignRow, now: datetime) -> CampaignRecord:
    return CampaignRecord(
        id=row.id,
        name=row.name,
        spec=row.spec,
        seed=row.seed,
        state=row.state,
        created_at=row.created_at,
        finished_at=row.finished_at,
        owner=owner_of(row, now),
    )


def _new_assignment(campaign_id: str, assignment: PlannedAssignment) -> AssignmentRow:
    return AssignmentRow(
        id=uuid.uuid4().hex,
        campaign_id=campaign_id,
        configuration_id=assignment.configuration.id,
        device_key=assignment.device,
        role=Role(assignment.role),
    )


class Snapshots(Repository):
    """The list of published snapshots."""

    @reading
    def all(self, session: Session) -> list[SnapshotRecord]:
        """All snapshots, the latest first."""
        rows = session.scalars(
            select(SnapshotRow).order_by(SnapshotRow.created_at.desc(), SnapshotRow.id)
        )
        return [_snapshot(row) for row in rows]


def register(session: Session, snapshot: SnapshotRecord) -> None:
    """Adds a published snapshot, within a transaction; the same again changes nothing.

    Raises:
        SnapshotError: the id is taken by another one.
    """
    row = session.get(SnapshotRow, snapshot.id, with_for_update=True)
    manifest = dict(snapshot.manifest)
    if row is None:
        session.add(
            SnapshotRow(
                id=snapshot.id,
                campaign_id=snapshot.campaign_id,
                location=snapshot.location,
                manifest=manifest,
                created_at=snapshot.created_at,
            )
        )
    elif (row.location, row.manifest) != (snapshot.location, manifest):
        raise SnapshotError(
            f"snapshot {snapshot.id!r} is published already and never changes; "
            "publish under another id"
        )


def _snapshot(row: SnapshotRow) -> SnapshotRecord:
    return SnapshotRecord(
        id=row.id,
        campaign_id=row.campaign_id,
        location=row.location,
        manifest=row.manifest,
        created_at=row.created_at,
    )
