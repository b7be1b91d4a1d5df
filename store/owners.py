"""The owner of a campaign: the one process that runs it; and changes of the campaign's state.

    no owner --claim--> an owner, with a heartbeat --release--> no owner
                           |
                           +-- silent for SILENT_S: the next claim takes over

Times are the database's, so that hosts with different clocks agree. The owner's leases last as long
as it runs the campaign. An owner that lost its campaign cannot write, because its store
(`Store.as_owner`) compares the owner in each transaction. Every change of state reads the current
state in its own transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from trappm.profiler.errors import CampaignError, InputError
from trappm.store.assignments import release
from trappm.store.campaigns import ENDED, add_event, event_of_call, get_campaign_row, owner_of
from trappm.store.engine import database_time
from trappm.store.records import Activity, CampaignState, Owner, OwnerProcess
from trappm.store.schema import CampaignRow
from trappm.store.transactions import Repository, call_of, writing

BEAT_S = 5.0
"""Seconds between two heartbeats of an owner."""

SILENT_S = 30.0
"""Age of the last heartbeat, in seconds, after which an owner counts as gone."""


class OwnedError(CampaignError):
    """Another process runs this campaign."""

    def __init__(self, campaign_id: str, state: CampaignState, owner: Owner) -> None:
        super().__init__(campaign_id, state, owner)  # so that Ray can pickle the error
        self.campaign_id, self.owner = campaign_id, owner
        self.is_stopping = state is not CampaignState.RUNNING

    def __str__(self) -> str:
        owner, campaign_id = self.owner, self.campaign_id
        return (
            f"campaign {campaign_id} {'is stopping' if self.is_stopping else 'runs'} on host "
            f"{owner.process.host} (process {owner.process.pid}) since "
            f"{owner.since[:16].replace('T', ' ')} UTC, last heard of "
            f"{max(owner.silent_s, 0.0):.0f} s ago; follow it with: trappm campaign status "
            f"{campaign_id} --follow; stop it with: trappm campaign pause {campaign_id}; if that "
            f"host is gone, try again once it was silent for {SILENT_S:.0f} s"
        )


class NotOwnerError(CampaignError):
    """Another process has taken over the campaign of this process, which may no longer write."""


class Owners(Repository):
    """Owners of campaigns, and changes of their states."""

    @writing
    def begin_campaign(self, session: Session, campaign_id: str) -> None:
        """Set a campaign running; the first process that claims it becomes its owner.

        Raises:
            OwnedError: Another process runs it.
            InputError: It has ended.
        """
        row = get_campaign_row(session, campaign_id)
        if row.state in ENDED:
            raise InputError(f"campaign {campaign_id} is {row.state} already")
        _refuse_if_owned(session, row)
        row.state = CampaignState.RUNNING

    @writing
    def claim_campaign(
        self, session: Session, campaign_id: str, owner_id: str, process: OwnerProcess
    ) -> bool:
        """Make a process the owner of a campaign; the same owner again changes nothing.

        Returns:
            False if the campaign was stopped since it was begun.

        Raises:
            OwnedError: Another process runs it.
        """
        row = get_campaign_row(session, campaign_id)
        if row.state is not CampaignState.RUNNING:
            return False
        if row.owner_id != owner_id:
            _refuse_if_owned(session, row)
            row.owned_since = row.owner_seen_at = database_time(session.connection()).isoformat()
            row.owner_id, row.owner_process = owner_id, asdict(process)
        return True

    @writing
    def renew(self, session: Session, campaign_id: str, owner_id: str) -> None:
        """Record a heartbeat of the owner.

        Raises:
            NotOwnerError: It has lost the campaign.
        """
        owner_guard(campaign_id, owner_id)(session)
        seen = {"owner_seen_at": database_time(session.connection()).isoformat()}
        session.execute(update(CampaignRow).filter_by(id=campaign_id).values(seen))

    @writing
    def report(self, session: Session, campaign_id: str, activity: Activity) -> None:
        """Record what the owner of a campaign does."""
        query = update(CampaignRow).filter_by(id=campaign_id)
        session.execute(query.values(activity=asdict(activity)))

    @writing
    def release(self, session: Session, campaign_id: str, owner_id: str) -> None:
        """End the ownership of a campaign, if this is its owner."""
        names = ("owner_id", "owner_process", "owned_since", "owner_seen_at", "activity")
        nobody = dict.fromkeys(names)
        query = update(CampaignRow).filter_by(id=campaign_id, owner_id=owner_id)
        session.execute(query.values(nobody))

    @writing
    def stop_campaign(self, session: Session, campaign_id: str, state: CampaignState) -> None:
        """Pause or cancel a campaign, which its owner notices, and take its leases back.

        Raises:
            InputError: It has ended.
        """
        row = get_campaign_row(session, campaign_id)
        if event_of_call(session, campaign_id) is not None:
            return
        if row.state in ENDED:
            raise InputError(f"campaign {campaign_id} is {row.state} already")
        _move(session, row, state)
        add_event(session, campaign_id, "order", {"message": f"asked to be {state}"})
        release(session, campaign_id)

    @writing
    def end_campaign(
        self, session: Session, campaign_id: str, state: CampaignState, message: str
    ) -> CampaignState:
        """End a run: set the state unless an order changed it, release leases, add an event.

        Returns:
            The state of the campaign.
        """
        row = get_campaign_row(session, campaign_id)
        if event_of_call(session, campaign_id) is not None:
            return row.state
        if row.state is CampaignState.RUNNING:
            _move(session, row, state)
        add_event(session, campaign_id, row.state, {"message": message})
        release(session, campaign_id)
        return row.state

    @writing
    def finish_campaign(
        self, session: Session, campaign_id: str, message: str, snapshot: str | None
    ) -> bool:
        """Finish a running campaign and record the id of its snapshot, all or nothing.

        Returns:
            False if an order to stop came first; the campaign publishes again when it is resumed.
        """
        row = get_campaign_row(session, campaign_id)
        if row.state is CampaignState.FINISHED:
            return True  # by an attempt whose reply was lost
        if row.state is not CampaignState.RUNNING:
            return False
        row.snapshot = snapshot
        _move(session, row, CampaignState.FINISHED)
        add_event(session, campaign_id, row.state, {"message": message})
        return True


def _move(session: Session, row: CampaignRow, state: CampaignState) -> None:
    row.state = state
    row.finished_at = call_of(session).at if state in ENDED else None


def _refuse_if_owned(session: Session, row: CampaignRow) -> None:
    owner = owner_of(row, database_time(session.connection()))
    if owner is not None and owner.silent_s < SILENT_S:
        raise OwnedError(row.id, row.state, owner)


def owner_guard(campaign_id: str, owner_id: str) -> Callable[[Session], None]:
    """Return a check at the beginning of transactions, which raises NotOwnerError if it fails."""

    owned = select(CampaignRow.id).filter_by(id=campaign_id, owner_id=owner_id)
    owned = owned.with_for_update(key_share=True)

    def check(session: Session) -> None:
        if session.execute(owned).first() is None:
            campaign = get_campaign_row(session, campaign_id, to_change=False)
            owner = owner_of(campaign, database_time(session.connection()))
            by = "" if owner is None else f" by host {owner.process.host}"
            raise NotOwnerError(
                f"campaign {campaign_id} was taken over{by} while this process did not answer; "
                "what it had recorded is safe, and what it was measuring is measured again there"
            )

    return check
