"""Who runs a campaign: one process at a time, on whichever host; and how its state changes.

    nobody --claim--> an owner, with a heartbeat --release--> nobody
                         |
                         +-- silent for SILENT_S, or known to be gone: the next claim takes over

The time is the database's, so that hosts whose clocks differ agree on who is silent. What the owner
leased to workers is theirs for as long as it runs the campaign. One that was taken over cannot
write any more, and stops itself: its store (`as_owner`) compares the owner in each transaction.
Every change of state looks, in its own transaction, at the state that it changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Self

from sqlalchemy import bindparam, select, update
from sqlalchemy.orm import Session

from trappm.profiler.errors import CampaignError, InputError
from trappm.store.assignments import release
from trappm.store.campaigns import ENDED, add_event, event_of_call, existing, owner_of, register
from trappm.store.engine import database_time
from trappm.store.records import CampaignState, Owner, OwnerProcess, SnapshotRecord
from trappm.store.schema import CampaignRow
from trappm.store.transactions import Repository, call_of, writing

BEAT_S = 10.0
"""Between two heartbeats of an owner."""

SILENT_S = 60.0
"""Whose last heartbeat is older counts as dead, on whichever host it was."""

_OWNED = (
    select(CampaignRow.id)
    .where(CampaignRow.id == bindparam("campaign"), CampaignRow.owner_id == bindparam("owner"))
    .with_for_update(key_share=True)
)


class OwnedError(CampaignError):
    """Another process runs this campaign."""

    def __init__(self, campaign_id: str, state: CampaignState, owner: Owner) -> None:
        self._arguments = campaign_id, state, owner
        self.owner = owner
        self.is_stopping = state is not CampaignState.RUNNING
        verb = "is stopping" if self.is_stopping else "runs"
        super().__init__(
            f"campaign {campaign_id} {verb} on host {owner.process.host} (process "
            f"{owner.process.pid}) since {owner.since[:16].replace('T', ' ')} UTC, last heard of "
            f"{max(owner.silent_s, 0.0):.0f} s ago; follow it with: trappm campaign status "
            f"{campaign_id} --follow; stop it with: trappm campaign pause {campaign_id}; if that "
            f"host is gone, try again once it was silent for {SILENT_S:.0f} s"
        )

    def __reduce__(self) -> tuple[type[Self], tuple[str, CampaignState, Owner]]:
        """So that it travels from the campaign's process to the one that launched it."""
        return type(self), self._arguments


class NotOwnerError(CampaignError):
    """This process ran a campaign, and another one does now: it may not write for it any more."""


class Owners(Repository):
    """Who runs which campaign, and the moves of a campaign from state to state."""

    @writing
    def begin_campaign(
        self, session: Session, campaign_id: str, *, gone: str | None = None
    ) -> None:
        """Sets a campaign running; the first process that claims it becomes its owner.

        Args:
            campaign_id: of a campaign that has not ended.
            gone: an owner whose process was looked for in vain, on its own host.

        Raises:
            OwnedError: somebody runs it.
            InputError: it has ended.
        """
        row = existing(session, campaign_id)
        if row.state in ENDED:
            raise InputError(f"campaign {campaign_id} is {row.state} already")
        _refuse_if_owned(session, row, gone)
        row.state = CampaignState.RUNNING

    @writing
    def claim_campaign(
        self,
        session: Session,
        campaign_id: str,
        owner_id: str,
        process: OwnerProcess,
        *,
        gone: str | None = None,
    ) -> bool:
        """Makes this process the one that runs a campaign; by the same id again: nothing new.

        Returns:
            False if it is not to run any more: it was stopped since it was begun.

        Raises:
            OwnedError: somebody else runs it.
        """
        row = existing(session, campaign_id)
        if row.state is not CampaignState.RUNNING:
            return False
        if row.owner_id != owner_id:
            _refuse_if_owned(session, row, gone)
            row.owned_since = row.owner_seen_at = database_time(session.connection()).isoformat()
            row.owner_id, row.owner_process = owner_id, asdict(process)
        return True

    @writing
    def renew(self, session: Session, campaign_id: str, owner_id: str) -> None:
        """A heartbeat of the owner; raises NotOwnerError if it has lost the campaign."""
        owner_guard(campaign_id, owner_id)(session)
        seen = {"owner_seen_at": database_time(session.connection()).isoformat()}
        session.execute(update(CampaignRow).filter_by(id=campaign_id).values(seen))

    @writing
    def release(self, session: Session, campaign_id: str, owner_id: str) -> None:
        """Gives up ownership of a campaign; does nothing where this process is not its owner."""
        nobody = dict.fromkeys(("owner_id", "owner_process", "owned_since", "owner_seen_at"))
        query = update(CampaignRow).filter_by(id=campaign_id, owner_id=owner_id)
        session.execute(query.values(nobody))

    @writing
    def stop_campaign(self, session: Session, campaign_id: str, state: CampaignState) -> None:
        """Orders a campaign's owner to pause or cancel it, and takes its leases back.

        Raises:
            InputError: it has ended.
        """
        row = existing(session, campaign_id)
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
        """Ends the owner's part: the state, unless an order has changed it; leases; an event.

        Returns:
            The state that it is in now.
        """
        row = existing(session, campaign_id)
        if event_of_call(session, campaign_id) is not None:
            return row.state
        if row.state is CampaignState.RUNNING:
            _move(session, row, state)
        add_event(session, campaign_id, row.state, {"message": message})
        release(session, campaign_id)
        return row.state

    @writing
    def finish_campaign(
        self, session: Session, campaign_id: str, message: str, snapshot: SnapshotRecord | None
    ) -> bool:
        """The end of a campaign that runs, together with what it publishes, all or nothing.

        Returns:
            False if an order to stop came first: nothing is published then.

        Raises:
            SnapshotError: its id is taken by another one.
        """
        row = existing(session, campaign_id)
        if row.state is CampaignState.FINISHED:
            return True  # by an attempt whose answer was lost
        if row.state is not CampaignState.RUNNING:
            return False
        if snapshot is not None:
            register(session, snapshot)
        _move(session, row, CampaignState.FINISHED)
        add_event(session, campaign_id, row.state, {"message": message})
        return True


def _move(session: Session, row: CampaignRow, state: CampaignState) -> None:
    row.state = state
    row.finished_at = call_of(session).at if state in ENDED else None


def _refuse_if_owned(session: Session, row: CampaignRow, gone: str | None) -> None:
    owner = owner_of(row, database_time(session.connection()))
    if owner is not None and owner.id != gone and owner.silent_s < SILENT_S:
        raise OwnedError(row.id, row.state, owner)


def owner_guard(campaign_id: str, owner_id: str) -> Callable[[Session], None]:
    """What raises NotOwnerError at the beginning of a transaction once another is the owner."""

    def check(session: Session) -> None:
        values = {"campaign": campaign_id, "owner": owner_id}
        if session.connection().execute(_OWNED, values).first() is None:
            owner = owner_of(
                existing(session, campaign_id, to_change=False), database_time(session.connection())
            )
            by = "" if owner is None else f" by host {owner.process.host}"
            raise NotOwnerError(
                f"campaign {campaign_id} was taken over{by} while this process did not answer; "
                "what it had recorded is safe, and what it was measuring is measured again there"
            )

    return check
