"""Campaigns: spec, pool, rounds and events.

Snapshots and their aliases, such as `latest`, belong to the registry
(`learner.snapshots.registry`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import BindParameter, Select, String, bindparam, case, func, select, text
from sqlalchemy.orm import Session

from trappm.profiler.errors import CampaignError, InputError
from trappm.profiler.records import Configuration
from trappm.store.engine import database_time
from trappm.store.pools import insert_configurations
from trappm.store.records import (
    Activity,
    Assignment,
    AssignmentState,
    AttemptRecord,
    CampaignRecord,
    CampaignState,
    EventRecord,
    Owner,
    OwnerProcess,
    Pending,
    Purpose,
    RoundRecord,
    Standing,
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
    EventRow,
    MeasurementRow,
    PoolRow,
    RoundRow,
)
from trappm.store.transactions import Repository, call_of, reading, writing

ENDED = frozenset({CampaignState.FINISHED, CampaignState.CANCELLED})
"""States of campaigns that never run again."""

STOP_EVENT = "enough"
"""Kind of the event that records which stop rule held."""


class Campaigns(Repository):
    """Campaigns with their pools, events and costs."""

    @writing
    def create(
        self, session: Session, name: str, spec: Mapping[str, Any], seed: int
    ) -> CampaignRecord:
        """Create a campaign, which is paused until a process runs it."""
        return _campaign(
            _get_or_create(session, name, spec, seed), database_time(session.connection())
        )

    @writing
    def start_or_continue(
        self, session: Session, name: str, spec: Mapping[str, Any], *, may_create: bool = True
    ) -> CampaignRecord | None:
        """Return the unfinished campaign of this spec, or a new one; None if it `may_create` none.

        Specs that differ in nothing but their seed are the same. A new campaign of an existing name
        gets the next seed, so that it does not repeat the first.
        """
        if session.connection().dialect.name == "postgresql":  # two launches make one campaign
            session.execute(text("LOCK TABLE campaigns IN SHARE ROW EXCLUSIVE MODE"))
        query = select(CampaignRow).filter_by(name=name)
        earlier = session.scalars(query.order_by(CampaignRow.created_at.desc())).all()
        row = next(
            (row for row in earlier
             if row.state not in ENDED and {**row.spec, "seed": 0} == {**spec, "seed": 0}), None,
        )  # fmt: skip
        if row is None and may_create:
            seed = int(spec["seed"]) + len(earlier)
            row = _get_or_create(session, name, {**spec, "seed": seed}, seed)
        return None if row is None else _campaign(row, database_time(session.connection()))

    def get(self, campaign_id: str | None = None) -> CampaignRecord:
        """Return the campaign with this id or unique beginning of an id, or else the latest.

        Raises:
            InputError: There is none.
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
        """Return the state of a campaign.

        Raises:
            CampaignError: It does not exist, or another process owns it now (`Store.as_owner`).
        """
        self._database.check_guard(session)
        return get_campaign_row(session, campaign_id, to_change=False).state

    @reading
    def standing(self, session: Session, campaign_id: str) -> Standing:
        """Return all that decides what a campaign does next.

        Raises:
            CampaignError: It does not exist, or another process owns it now (`Store.as_owner`).
        """
        self._database.check_guard(session)
        mine = {"campaign_id": campaign_id}
        state = session.scalar(_STATE, mine)
        if state is None:
            raise _unknown(campaign_id)
        rounds = session.execute(_ROUNDS, mine)
        attempts = session.execute(_ATTEMPTS, mine).all()
        return Standing(
            state=state,
            rounds=[record_of(RoundRecord, r, report={} if r.is_closed else None) for r in rounds],
            pending=[Pending(*part) for part in session.execute(_PENDING, mine)],
            attempts={device: count for device, count, _ in attempts},
            seconds={device: float(seconds) for device, _, seconds in attempts},
            measured=dict(session.execute(_MEASURED, mine).all()),
            labels=session.scalar(_LABELS, mine) or 0,
            has_pool=session.scalar(_HAS_POOL, mine) is not None,
            is_enough=session.scalar(_IS_ENOUGH, mine) is not None,
        )

    @reading
    def work(self, session: Session) -> list[tuple[CampaignRecord, Pending]]:
        """Return what the campaigns that run have to measure, by device, due in any round."""
        row = AssignmentRow
        counts = session.execute(
            select(row.campaign_id, row.device_key, func.sum(1 - _IS_LEASED), func.sum(_IS_LEASED))
            .join(CampaignRow, CampaignRow.id == row.campaign_id)
            .where(CampaignRow.state == CampaignState.RUNNING, CampaignRow.owner_id.is_not(None))
            .where(row.state.in_([AssignmentState.OPEN, AssignmentState.LEASED]))
            .group_by(row.campaign_id, row.device_key)
        ).all()
        now = database_time(session.connection())
        query = select(CampaignRow).where(CampaignRow.id.in_({name for name, *_ in counts}))
        known = {record.id: _campaign(record, now) for record in session.scalars(query)}
        return [
            (known[name], Pending(device, 0, waiting, leased))
            for name, device, waiting, leased in counts
        ]

    @reading
    def all(self, session: Session) -> list[CampaignRecord]:
        """Return all campaigns, the latest first."""
        query = select(CampaignRow).order_by(CampaignRow.created_at.desc(), CampaignRow.id)
        now = database_time(session.connection())
        return [_campaign(row, now) for row in session.scalars(query)]

    @writing
    def set_pool(
        self, session: Session, campaign_id: str, pool: Sequence[tuple[Configuration, bool]]
    ) -> None:
        """Set the pool of a campaign, which never changes afterwards.

        Each configuration comes with whether its architecture is held out for evaluation.

        Raises:
            CampaignError: The campaign does not exist, or has another pool already.
        """
        get_campaign_row(session, campaign_id)
        query = select(PoolRow.configuration_id, PoolRow.held_out)
        known = {
            (name, held) for name, held in session.execute(query.filter_by(campaign_id=campaign_id))
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
        """Return the pool of a campaign, sorted; each configuration with whether it is held out."""
        rows = session.execute(
            select(*CONFIGURATION, PoolRow.held_out)
            .join_from(PoolRow, ConfigurationRow, ConfigurationRow.id == PoolRow.configuration_id)
            .where(PoolRow.campaign_id == campaign_id)
        )
        return sorted((configuration_of(row), row.held_out) for row in rows)

    @reading
    def outcome_counts(
        self, session: Session, campaign_id: str, *, since: str | None = None
    ) -> dict[str, dict[str, int]]:
        """Return the number of attempts of a campaign by device key and outcome.

        Attempts that began before `since`, a time in ISO 8601, are left out.
        """
        place = (DeviceRow.key, MeasurementRow.outcome)
        query = _attempts(select(*place, func.count()), campaign_id)
        if since is not None:
            query = query.where(MeasurementRow.started_at >= since)
        counts: dict[str, dict[str, int]] = {}
        for device, outcome, count in session.execute(query.group_by(*place).order_by(*place)):
            counts.setdefault(device, {})[outcome.value] = count
        return counts

    @reading
    def label_counts(self, session: Session, campaign_id: str | None = None) -> dict[str, int]:
        """Return the number of assignments with a label, by campaign, of all or one of them."""
        query = (
            select(AssignmentRow.campaign_id, func.count().label("labels"))
            .join(AssignmentLabelRow, AssignmentLabelRow.assignment_id == AssignmentRow.id)
            .group_by(AssignmentRow.campaign_id)
        )
        if campaign_id is not None:
            query = query.where(AssignmentRow.campaign_id == campaign_id)
        return {row.campaign_id: row.labels for row in session.execute(query)}

    @reading
    def attempts(
        self, session: Session, campaign_id: str, *, after: int = 0
    ) -> list[AttemptRecord]:
        """Return the attempts of a campaign whose ids are beyond `after`, the earliest first."""
        row = MeasurementRow
        query = _attempts(
            select(
                row.id, row.started_at.label("at"), DeviceRow.key.label("device"), row.outcome,
                row.message, row.step_median_ms.label("step_time_ms"), row.memory_mib,
                *CONFIGURATION,
            ),
            campaign_id,
        )  # fmt: skip
        query = query.join(ConfigurationRow, ConfigurationRow.id == row.configuration_id)
        rows = session.execute(query.where(row.id > after).order_by(row.id))
        return [record_of(AttemptRecord, x, configuration=configuration_of(x)) for x in rows]

    @writing
    def log_event(
        self, session: Session, campaign_id: str, kind: str, message: Mapping[str, Any]
    ) -> None:
        """Record an event of a campaign."""
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
        after: int = 0,
    ) -> list[EventRecord]:
        """Return the `last` events of a campaign, of all kinds or of one, the earliest first.

        Those whose id is not beyond `after` are left out.
        """
        query = select(EventRow).filter_by(campaign_id=campaign_id).where(EventRow.id > after)
        if kind is not None:
            query = query.filter_by(kind=kind)
        rows = session.scalars(query.order_by(EventRow.id.desc()).limit(last)).all()
        return [record_of(EventRecord, row) for row in reversed(rows)]


class CampaignRounds(Repository):
    """Rounds of campaigns: an acquisition and its measurements each."""

    @writing
    def plan(
        self,
        session: Session,
        campaign_id: str,
        number: int,
        purpose: Purpose | str,
        device: str,
        planned: Sequence[Assignment],
    ) -> None:
        """Store a device's part of a round, which may be empty, and is planned once.

        An assignment that was abandoned before is opened again.

        Raises:
            StoreError: A configuration is not in the campaign's pool, or was planned before on the
                same device; nothing is stored.
        """
        get_campaign_row(session, campaign_id)  # one planner at a time
        part = session.get(RoundRow, (campaign_id, number))
        if part is None:
            part = RoundRow(
                campaign_id=campaign_id, number=number, purpose=Purpose(purpose), planned={}
            )
            session.add(part)
            session.flush()
        if device in part.planned:
            return
        part.planned = {**part.planned, device: len(planned)}
        failed = select(AssignmentRow).filter_by(
            campaign_id=campaign_id, state=AssignmentState.FAILED
        )
        given_up = {(a.configuration_id, a.device_key): a for a in session.scalars(failed)}
        for assignment in planned:
            place = assignment.configuration.id, device
            row = given_up.get(place) or AssignmentRow(
                id=assignment.id,
                campaign_id=campaign_id,
                configuration_id=assignment.configuration.id,
                device_key=device,
                role=assignment.role,
            )
            row.round_number = number
            row.rank = assignment.rank
            row.reason = dict(assignment.reason)
            row.state = AssignmentState.OPEN
            row.failures = row.losses = 0
            session.add(row)

    @reading
    def all(self, session: Session, campaign_id: str) -> list[RoundRecord]:
        """Return the campaign's rounds by number."""
        query = select(RoundRow).filter_by(campaign_id=campaign_id).order_by(RoundRow.number)
        return [record_of(RoundRecord, row) for row in session.scalars(query)]

    @writing
    def close(
        self, session: Session, campaign_id: str, number: int, report: Mapping[str, Any]
    ) -> None:
        """Close a round with its report; a closed round keeps its first report.

        Raises:
            CampaignError: The round does not exist.
        """
        row = session.get(RoundRow, (campaign_id, number), with_for_update=True)
        if row is None:
            raise CampaignError(f"campaign {campaign_id!r} has no round {number} to close")
        if row.report is None:
            row.report = dict(report)


def _get_or_create(session: Session, name: str, spec: Mapping[str, Any], seed: int) -> CampaignRow:
    """Return the row of a new campaign, or of the one that an earlier attempt of the call made."""
    call = call_of(session)
    ids = [call.id[at : at + 8] for at in range(0, len(call.id), 8)]
    for campaign_id in ids:
        row = session.get(CampaignRow, campaign_id)
        if row is None:
            row = CampaignRow(
                id=campaign_id,
                name=name,
                spec=dict(spec),
                seed=seed,
                state=CampaignState.PAUSED,
                created_at=call.at,
            )
            session.add(row)
            session.flush()
            return row
        if (row.name, row.created_at) == (name, call.at):
            return row
    raise CampaignError(f"the ids {', '.join(ids)} are all taken; try again")


def add_event(session: Session, campaign_id: str, kind: str, message: Mapping[str, Any]) -> None:
    """Add an event of the call within a transaction."""
    call = call_of(session)
    session.add(
        EventRow(
            campaign_id=campaign_id, at=call.at, kind=kind, message=dict(message), call_id=call.id
        )
    )


def event_of_call(session: Session, campaign_id: str) -> Mapping[str, Any] | None:
    """Return the message of the event that an earlier attempt of this call added, or None."""
    call_id = call_of(session).id
    query = select(EventRow.message).filter_by(campaign_id=campaign_id, call_id=call_id)
    return session.scalar(query.limit(1))


def get_campaign_row(session: Session, campaign_id: str, *, to_change: bool = True) -> CampaignRow:
    """Return the row of a campaign, locked if it is to change.

    Raises:
        CampaignError: It does not exist.
    """
    row = session.get(CampaignRow, campaign_id, with_for_update=to_change)
    if row is None:
        raise _unknown(campaign_id)
    return row


def _unknown(campaign_id: str) -> CampaignError:
    return CampaignError(f"no campaign {campaign_id!r}; see: trappm campaign status")


def owner_of(row: CampaignRow, now: datetime) -> Owner | None:
    """Return the owner of a campaign at a time of the database, or None."""
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
    activity = Activity(**(row.activity or {}))
    return record_of(CampaignRecord, row, owner=owner_of(row, now), activity=activity)


def _attempts(
    query: Select[*tuple[Any, ...]], campaign_id: str | BindParameter[str]
) -> Select[*tuple[Any, ...]]:
    """Return a query of devices and attempts, restricted to a campaign."""
    joined = query.join_from(MeasurementRow, DeviceRow, DeviceRow.id == MeasurementRow.device_id)
    return joined.where(MeasurementRow.campaign_id == campaign_id)


# What `Campaigns.standing` reads after each event of a campaign. The statements are built once, as
# SQLAlchemy takes longer to build them than SQLite to answer.

_ID = bindparam("campaign_id", type_=String)
_DUE = AssignmentRow.round_number + AssignmentRow.failures
_IS_LEASED = case((AssignmentRow.state == AssignmentState.LEASED, 1), else_=0)

_STATE = select(CampaignRow.state).where(CampaignRow.id == _ID)
_PENDING = (
    select(AssignmentRow.device_key, _DUE, func.sum(1 - _IS_LEASED), func.sum(_IS_LEASED))
    .where(AssignmentRow.campaign_id == _ID)
    .where(AssignmentRow.state.in_([AssignmentState.OPEN, AssignmentState.LEASED]))
    .group_by(AssignmentRow.device_key, _DUE)
    .order_by(_DUE)
)
_ROUNDS = (
    select(
        RoundRow.campaign_id, RoundRow.number, RoundRow.purpose, RoundRow.planned,
        RoundRow.report.is_not(None).label("is_closed"),
    )
    .where(RoundRow.campaign_id == _ID)
    .order_by(RoundRow.number)
)  # fmt: skip
_ATTEMPTS = _attempts(
    select(DeviceRow.key, func.count(), func.sum(MeasurementRow.duration_s)), _ID
).group_by(DeviceRow.key)
_MEASURED = (  # from assignments: joining attempts to them would be slow
    select(AssignmentRow.device_key, func.count())
    .where(AssignmentRow.campaign_id == _ID, AssignmentRow.attempts > AssignmentRow.losses)
    .where(AssignmentRow.state.in_([AssignmentState.DONE, AssignmentState.FAILED]))
    .group_by(AssignmentRow.device_key)
)
_LABELS = (
    select(func.count(AssignmentLabelRow.assignment_id))
    .join(AssignmentRow, AssignmentRow.id == AssignmentLabelRow.assignment_id)
    .where(AssignmentRow.campaign_id == _ID)
)
_IS_ENOUGH = (
    select(EventRow.id).where(EventRow.campaign_id == _ID, EventRow.kind == STOP_EVENT).limit(1)
)
_HAS_POOL = select(PoolRow.campaign_id).where(PoolRow.campaign_id == _ID).limit(1)
