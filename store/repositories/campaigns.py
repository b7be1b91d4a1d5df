"""Campaigns: what each was asked to do, its pool, its rounds, and what happened to it."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from trappm.profiler.errors import CampaignError, InputError
from trappm.profiler.records import Configuration
from trappm.store.db.engine import Database, database_time, utc_now
from trappm.store.db.models import (
    AssignmentLabelRow,
    AssignmentRow,
    CampaignRow,
    ConfigurationRow,
    DeviceRow,
    EventRow,
    MeasurementRow,
    PoolRow,
    RoundRow,
)
from trappm.store.records import (
    Assignment,
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
)
from trappm.store.repositories.assignments import WHOLE_ASSIGNMENT, assignment_of
from trappm.store.repositories.workloads import configuration_of, insert_configurations

ENDED = frozenset({CampaignState.FINISHED, CampaignState.CANCELLED})
"""Nobody runs these ever again."""


class Campaigns(Database):
    """The part of the store that keeps campaigns, rounds and events."""

    def create_campaign(self, name: str, spec: Mapping[str, Any], seed: int) -> CampaignRecord:
        """A new campaign, paused until somebody runs it."""
        row = CampaignRow(
            id=secrets.token_hex(4),
            name=name,
            spec=dict(spec),
            seed=seed,
            state=CampaignState.PAUSED,
            created_at=utc_now(),
        )
        with self._writing() as session:
            session.add(row)
            session.flush()
            return _campaign(row, database_time(session.connection()))

    def campaign(self, campaign_id: str | None = None) -> CampaignRecord:
        """The campaign of this id, the latest one without an id.

        Raises:
            InputError: there is none.
        """
        known = self.campaigns()
        for record in known:
            if campaign_id in {None, record.id}:
                return record
        if campaign_id is None:
            raise InputError("there is no campaign yet; start one with: trappm campaign launch")
        there_are = ", ".join(c.id for c in known[:10]) or "none yet"
        raise InputError(f"no campaign {campaign_id!r}; there are: {there_are}")

    def campaign_state(self, campaign_id: str) -> CampaignState:
        """Where a campaign stands.

        Raises:
            CampaignError: there is none of this id; or another process has it now (`as_owner`).
        """
        with self._reading() as session:
            if self._guard is not None:
                self._guard(session)
            return existing(session, campaign_id, to_change=False).state

    def campaigns(self) -> list[CampaignRecord]:
        """All campaigns, the latest first."""
        with self._reading() as session:
            rows = session.scalars(
                select(CampaignRow).order_by(CampaignRow.created_at.desc(), CampaignRow.id)
            )
            now = database_time(session.connection())
            return [_campaign(row, now) for row in rows]

    def set_campaign_pool(
        self, campaign_id: str, pool: Sequence[tuple[Configuration, bool]]
    ) -> None:
        """Sets what a campaign may choose from, once; doing it again changes nothing.

        Args:
            campaign_id: of an existing campaign.
            pool: each configuration, and whether its architecture is held out for evaluation.

        Raises:
            CampaignError: no such campaign, or it has another pool already.
        """
        with self._writing() as session:
            existing(session, campaign_id)
            known = {
                (row.configuration_id, row.held_out)
                for row in session.scalars(
                    select(PoolRow).where(PoolRow.campaign_id == campaign_id)
                )
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

    def campaign_pool(self, campaign_id: str) -> list[tuple[Configuration, bool]]:
        """What a campaign may choose from, sorted; with each, whether it is held out."""
        with self._reading() as session:
            rows = session.execute(
                select(ConfigurationRow, PoolRow.held_out)
                .join(PoolRow, PoolRow.configuration_id == ConfigurationRow.id)
                .where(PoolRow.campaign_id == campaign_id)
            )
            return sorted((configuration_of(row), held_out) for row, held_out in rows)

    def plan_round(
        self,
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
        with self._writing() as session:
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
            for one in planned:
                if one.device in are_planned:
                    continue
                row = given_up.get((one.configuration.id, one.device)) or AssignmentRow(
                    id=uuid.uuid4().hex,
                    campaign_id=campaign_id,
                    configuration_id=one.configuration.id,
                    device_key=one.device,
                    role=Role(one.role),
                )
                row.round_number, row.rank, row.reason = number, one.rank, dict(one.reason)
                row.state, row.failures = AssignmentState.OPEN, 0
                session.add(row)

    def rounds(self, campaign_id: str) -> list[RoundRecord]:
        """The campaign's rounds by number."""
        with self._reading() as session:
            rows = session.scalars(
                select(RoundRow)
                .where(RoundRow.campaign_id == campaign_id)
                .order_by(RoundRow.number)
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

    def close_round(self, campaign_id: str, number: int, report: Mapping[str, Any]) -> None:
        """Closes a round with its report; one that is closed keeps its first report.

        Raises:
            CampaignError: there is no such round.
        """
        with self._writing() as session:
            row = session.get(RoundRow, (campaign_id, number), with_for_update=True)
            if row is None:
                raise CampaignError(f"campaign {campaign_id!r} has no round {number} to close")
            if row.state is RoundState.OPEN:
                row.state, row.report = RoundState.CLOSED, dict(report)

    def assignments(
        self,
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
        with self._reading() as session:
            return [assignment_of(row) for row in session.execute(query)]

    def assignment_counts(self, campaign_id: str) -> dict[str, dict[AssignmentState, int]]:
        """How many assignments are in each state, by device key."""
        query = (
            select(AssignmentRow.device_key, AssignmentRow.state, func.count())
            .where(AssignmentRow.campaign_id == campaign_id)
            .group_by(AssignmentRow.device_key, AssignmentRow.state)
            .order_by(AssignmentRow.device_key, AssignmentRow.state)
        )
        counts: dict[str, dict[AssignmentState, int]] = {}
        with self._reading() as session:
            for device, state, count in session.execute(query):
                counts.setdefault(device, {})[state] = count
        return counts

    def outcome_counts(
        self, campaign_id: str, *, since: str | None = None
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
        with self._reading() as session:
            for device, outcome, count in session.execute(query):
                counts.setdefault(device, {})[outcome.value] = count
        return counts

    def label_counts(self, campaign_id: str | None = None) -> dict[str, int]:
        """How many assignments have a label, by campaign; of one campaign alone if it is named."""
        query = (
            select(AssignmentRow.campaign_id, func.count().label("labels"))
            .join(AssignmentLabelRow, AssignmentLabelRow.assignment_id == AssignmentRow.id)
            .group_by(AssignmentRow.campaign_id)
        )
        if campaign_id is not None:
            query = query.where(AssignmentRow.campaign_id == campaign_id)
        with self._reading() as session:
            return {row.campaign_id: row.labels for row in session.execute(query)}

    def device_environments(self, device: str) -> dict[str, Mapping[str, Any]]:
        """What the first measurement of each stack of a device told of it, by fingerprint."""
        query = select(DeviceRow.fingerprint, DeviceRow.environment).filter_by(key=device)
        with self._reading() as session:
            return {row.fingerprint: row.environment for row in session.execute(query)}

    def device_memory_mib(self, device: str) -> float | None:
        """The least memory that measurements on this device, on any stack, have told of it.

        Of cores, that is what a process of their host may have.
        """
        with self._reading() as session:
            told = session.scalars(select(DeviceRow.environment).filter_by(key=device))
            known = [e.get("device_memory_mib") or e.get("memory_allowed_mib") for e in told]
        return min(filter(None, known), default=None)

    def measuring_seconds(self, campaign_id: str) -> float:
        """How long this campaign's attempts have taken in all, failed ones included."""
        return sum(self.measuring_seconds_by_device(campaign_id).values())

    def measuring_seconds_by_device(
        self, campaign_id: str, *, since: str | None = None, until: str | None = None
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
        with self._reading() as session:
            return {device: float(seconds) for device, seconds in session.execute(query)}

    def log_event(self, campaign_id: str, kind: str, message: Mapping[str, Any]) -> None:
        with self._writing() as session:
            add_event(session, campaign_id, kind, message)

    def events(
        self, campaign_id: str, *, kind: str | None = None, last: int | None = None
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
        with self._reading() as session:
            rows = session.scalars(query).all()
            return [EventRecord(at=r.at, kind=r.kind, message=r.message) for r in reversed(rows)]


AS_PLANNED = (AssignmentRow.round_number, AssignmentRow.rank, AssignmentRow.configuration_id)
"""The order of assignments and their labels for readers, whatever happened in between."""


def add_event(session: Session, campaign_id: str, kind: str, message: Mapping[str, Any]) -> None:
    session.add(EventRow(campaign_id=campaign_id, at=utc_now(), kind=kind, message=dict(message)))


def existing(session: Session, campaign_id: str, *, to_change: bool = True) -> CampaignRow:
    row = session.get(CampaignRow, campaign_id, with_for_update=to_change)
    if row is None:
        raise CampaignError(f"no campaign {campaign_id!r}; see: trappm campaign list")
    return row


def owner_of(row: CampaignRow, now: datetime) -> Owner | None:
    """Who runs a campaign, by the database's time; None: nobody."""
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
