"""The process that runs a campaign: its ownership of it, and how others follow its progress.

One process at a time owns a campaign, and shows a heartbeat. The label store records the owner
(`store.owners`), and the heartbeat alone decides whether it is alive, wherever it is: an owner that
was killed is replaced once it has been silent for `SILENT_S`.

    a command                     the campaign's process
    mark_running: it may run  --> ownership: claim it, and show heartbeats
    follow: read the store    <-- write activity, events and attempts into the store

`trappm campaign launch` starts a campaign and follows it; `trappm campaign status --follow` only
follows. Neither contacts the process itself, so it does not matter where it runs.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from trappm.profiler.errors import CampaignError, StoreError
from trappm.profiler.records import Outcome
from trappm.store import (
    CampaignRecord,
    CampaignState,
    NotOwnerError,
    OwnerProcess,
    Store,
)
from trappm.store import owners as in_store
from trappm.store.owners import OwnedError
from trappm.store.records import Activity, AttemptRecord

STOP_S = 60.0
"""Seconds that an owner may take to stop."""

POLL_S = 0.3

FOLLOW_POLL_S = 0.5
"""Seconds between two reads of the store by a command that follows."""

_Result = TypeVar("_Result")


def this_process(cluster: str | None = None) -> OwnerProcess:
    """Return host, id and Ray cluster of this process."""
    return OwnerProcess(host=platform.node(), pid=os.getpid(), cluster=cluster)


def has_live_owner(campaign: CampaignRecord) -> bool:
    """Return whether a process runs this campaign now."""
    return campaign.owner is not None and campaign.owner.silent_s < in_store.SILENT_S


def cluster_of(campaign: CampaignRecord) -> str | None:
    """Return the Ray cluster that a campaign runs on; None if it does not run."""
    return None if campaign.owner is None else campaign.owner.process.cluster


def mark_running(
    store: Store, campaign_id: str, tell: Callable[[str], None] = lambda stage: None
) -> None:
    """Mark a campaign as running, unless it has an owner that is alive.

    An owner that was killed is waited for until it counts as silent. `tell` is called with
    messages about the wait.

    Raises:
        OwnedError: Another process runs it.
        InputError: It has ended.
    """
    _call_patiently(lambda: store.owners.begin_campaign(campaign_id), tell)


@contextlib.contextmanager
def ownership(store: Store, campaign_id: str, cluster: str | None = None) -> Iterator[Store | None]:
    """Own a begun campaign in the block, with a heartbeat; yield its store.

    The store is None if the campaign was stopped before. Once another process owns the campaign,
    the store raises NotOwnerError.

    Args:
        store, campaign_id: The campaign, and where it is stored.
        cluster: Ray cluster of this process; campaigns on the same one share its GPUs.

    Raises:
        OwnedError: Another process runs it.
    """
    owner_id, process = uuid.uuid4().hex, this_process(cluster)
    claim = lambda: store.owners.claim_campaign(campaign_id, owner_id, process)  # noqa: E731
    if not _call_patiently(claim, lambda stage: None):
        yield None
        return
    over = threading.Event()
    beat = threading.Thread(
        target=_beat, args=(store, campaign_id, owner_id, over), name="heartbeat", daemon=True
    )
    beat.start()
    try:
        yield store.as_owner(campaign_id, owner_id)
    finally:
        over.set()
        beat.join(in_store.BEAT_S)
        with contextlib.suppress(StoreError):  # then it is found silent
            store.impatient().owners.release(campaign_id, owner_id)


def _beat(store: Store, campaign_id: str, owner_id: str, over: threading.Event) -> None:
    impatient = store.impatient()
    while not over.wait(in_store.BEAT_S):
        try:
            impatient.owners.renew(campaign_id, owner_id)
        except NotOwnerError:
            return  # the campaign's store raises the same error
        except StoreError:
            continue  # it is unavailable, also to others


def _call_patiently(do: Callable[[], _Result], tell: Callable[[str], None]) -> _Result:
    """Call `do`; wait for an owner that is about to stop, or that was killed.

    Raises:
        OwnedError: The owner has shown another heartbeat, so it is alive.
    """
    silent_s, deadline = 0.0, time.monotonic() + STOP_S
    while True:
        try:
            return do()
        except OwnedError as error:
            has_beaten = error.owner.silent_s < silent_s
            if has_beaten and (not error.is_stopping or time.monotonic() > deadline):
                raise
            silent_s = error.owner.silent_s
            tell(f"waiting for its earlier process, silent for {silent_s:.0f} s")
        time.sleep(POLL_S)


# Progress, for others who follow it.


@dataclass(frozen=True)
class Progress:
    """Activity of a campaign and its latest events, for display."""

    activity: Activity
    lines: tuple[str, ...] = ()
    """Events and attempts since the last read, one per line."""


class Follower:
    """Reads new events and attempts of a campaign from its label store; skips all earlier ones."""

    def __init__(self, store: Store, campaign_id: str) -> None:
        self.id = campaign_id
        self._store = store
        self._event = self._attempt = 0
        self.news()

    def look(self) -> tuple[CampaignRecord, Progress]:
        """Return the campaign and its progress."""
        campaign = self._store.campaigns.get(self.id)  # first, so that no event of its end is lost
        has_ended = campaign.owner is None and campaign.state is not CampaignState.RUNNING
        activity = Activity(stage=str(campaign.state)) if has_ended else campaign.activity
        return campaign, Progress(activity, self.news())

    def news(self) -> tuple[str, ...]:
        """Return the events and attempts since the last read, one per line."""
        events = self._store.campaigns.events(self.id, after=self._event)
        attempts = self._store.campaigns.attempts(self.id, after=self._attempt)
        self._event = max((event.id for event in events), default=self._event)
        self._attempt = max((attempt.id for attempt in attempts), default=self._attempt)
        news = [(event.at, str(event.message.get("message", event.kind))) for event in events]
        news += [(attempt.at, attempt_line(attempt)) for attempt in attempts]
        return tuple(line for _, line in sorted(news, key=lambda each: each[0]))


def follow(
    follower: Follower,
    watch: Callable[[Progress], None],
    *,
    silent_s: float = 0.0,
    check: Callable[[], None] = lambda: None,
    until_begun: bool = False,
) -> CampaignRecord:
    """Follow a campaign until its process has ended, and return it.

    Args:
        follower: Reads the label store.
        watch: Called with the progress.
        silent_s: Seconds for which a process may be missing, as it starts or is started again.
        check: Called after each read; raises an error if the process is known to have failed.
        until_begun: Return once a process runs the campaign.

    Raises:
        CampaignError: No process runs it, although it is to run.
    """
    heard_at = time.monotonic()
    while True:
        campaign, progress = follower.look()
        watch(progress)
        if campaign.state is CampaignState.RUNNING and has_live_owner(campaign):
            heard_at = time.monotonic()
            if until_begun:
                return campaign
        elif campaign.state is not CampaignState.RUNNING and campaign.owner is None:
            return campaign
        elif time.monotonic() - heard_at > silent_s:
            raise CampaignError(
                f"no process has run campaign {follower.id} for {silent_s:.0f} s; nothing recorded "
                f"is lost, continue with: trappm campaign resume {follower.id}"
            )
        check()
        time.sleep(FOLLOW_POLL_S)


def attempt_line(attempt: AttemptRecord) -> str:
    """Return one line for an attempt."""
    if attempt.step_time_ms is None:
        result = f"{attempt.outcome}: {attempt.message}"
    else:
        memory = attempt.memory_mib
        result = f"{attempt.step_time_ms:,.1f} ms"
        result += "" if memory is None else f", {memory:,.0f} MiB"
        result += "" if attempt.outcome is Outcome.OK else f"  {attempt.outcome}"
    return f"{attempt.device}  {attempt.configuration}  {result}"
