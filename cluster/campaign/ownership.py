"""Ownership of campaigns: one process at a time runs a campaign, and shows a heartbeat.

The label store records the owner (`store.owners`), and the heartbeat alone decides whether it is
alive, wherever it is: an owner that was killed is replaced once it has been silent for `SILENT_S`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TypeVar

from trappm.profiler.errors import StoreError
from trappm.store import CampaignRecord, NotOwnerError, OwnerProcess, Store
from trappm.store import owners as in_store
from trappm.store.owners import OwnedError

STOP_S = 60.0
"""Seconds that an owner may take to stop."""

POLL_S = 0.3

_Result = TypeVar("_Result")


def this_process() -> OwnerProcess:
    """Return host and id of this process, for people who look for it."""
    return OwnerProcess(host=platform.node(), pid=os.getpid())


def runs(campaign: CampaignRecord) -> bool:
    """Return whether a process runs this campaign now."""
    return campaign.owner is not None and campaign.owner.silent_s < in_store.SILENT_S


def begin(store: Store, campaign_id: str, tell: Callable[[str], None] = lambda stage: None) -> None:
    """Mark a campaign as running, unless it has an owner that is alive.

    An owner that was killed is waited for until it counts as silent. `tell` gets lines about it.

    Raises:
        OwnedError: Another process runs it.
        InputError: It has ended.
    """
    _call_patiently(lambda: store.owners.begin_campaign(campaign_id), tell)


@contextlib.contextmanager
def ownership(store: Store, campaign_id: str) -> Iterator[Store | None]:
    """Own a begun campaign in the block, with a heartbeat; yield its store.

    The store is None if the campaign was stopped before. Once another process owns the campaign,
    the store raises NotOwnerError.

    Raises:
        OwnedError: Another process runs it.
    """
    owner_id, process = uuid.uuid4().hex, this_process()
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
