"""Ownership of campaigns: one process at a time runs a campaign.

The label store records the owner with a heartbeat (`store.owners`). On the owner's own machine its
process is checked instead, so that a campaign whose process was killed continues at once; on any
other machine the heartbeat decides.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil

from trappm.profiler.errors import StoreError
from trappm.store import CampaignRecord, NotOwnerError, Owner, OwnerProcess, Store
from trappm.store import owners as in_store
from trappm.store.owners import OwnedError

WAIT_S = 20.0
"""Seconds that a process may take to end after its driver was killed or it was stopped."""

POLL_S = 0.3

_Result = TypeVar("_Result")

_BEGAN, _STATE = 19, 0
"""Indices in /proc/PID/stat after the command's name."""


def this_process() -> OwnerProcess:
    """Return the identity of this process, by which others can find it."""
    pid = os.getpid()
    return OwnerProcess(
        host=platform.node(), machine=machine(), pid=pid, began=int(_facts(pid)[_BEGAN])
    )


def machine() -> str:
    """Return the boot of this machine and its namespace of process ids; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def is_here(owner: Owner) -> bool:
    """Return whether the owner's process is, or was, on this machine, so that it can be checked."""
    if not owner.process.machine or owner.process.machine != machine():
        return False
    pid = owner.process.pid  # the process of another user may be hidden, except that it exists
    return bool(_facts(pid)) or not psutil.pid_exists(pid)


def is_gone(owner: Owner) -> bool:
    """Return whether the process of an owner on this machine has ended."""
    facts = _facts(owner.process.pid)
    return not facts or int(facts[_BEGAN]) != owner.process.began or facts[_STATE] in {"Z", "X"}


def runs(campaign: CampaignRecord) -> bool:
    """Return whether a process runs this campaign now."""
    owner = campaign.owner
    if owner is None or is_here(owner):
        return owner is not None and not is_gone(owner)
    return owner.silent_s < in_store.SILENT_S


def begin(store: Store, campaign_id: str) -> None:
    """Mark a campaign as running, unless it has an owner that is alive.

    Raises:
        OwnedError: Another process runs it.
        InputError: It has ended.
    """
    _patiently(store, campaign_id, lambda gone: store.owners.begin_campaign(campaign_id, gone=gone))


@contextlib.contextmanager
def ownership(store: Store, campaign_id: str, *, outlasts: bool = False) -> Iterator[Store | None]:
    """Own a begun campaign in the block, with a heartbeat; yield its store.

    The store is None if the campaign was stopped before. Once another process owns the campaign,
    the store raises NotOwnerError.

    Args:
        store: The label store.
        campaign_id: Id of the campaign.
        outlasts: Wait until an owner on another machine is silent, since this process replaces it.

    Raises:
        OwnedError: Another process runs it.
    """
    owner_id, process = uuid.uuid4().hex, this_process()

    def claim(gone: str | None) -> bool:
        return store.owners.claim_campaign(campaign_id, owner_id, process, gone=gone)

    if not _patiently(store, campaign_id, claim, outlasts=outlasts):
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
        with contextlib.suppress(StoreError):  # then it is found silent, or gone
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


def _patiently(
    store: Store, campaign_id: str, do: Callable[[str | None], _Result], outlasts: bool = False
) -> _Result:
    """Call `do` with the owner that is gone; wait for an owner that is about to end."""
    deadline = time.monotonic() + WAIT_S + (in_store.SILENT_S if outlasts else 0.0)
    while True:
        try:
            return do(_known_to_be_gone(store, campaign_id))
        except OwnedError as error:
            may_end = outlasts or error.is_stopping or is_here(error.owner)
            if not may_end or time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


def _known_to_be_gone(store: Store, campaign_id: str) -> str | None:
    """Return the owner if it was a process of this machine that has ended.

    Raises:
        OwnedError: Its process is alive on this machine, whatever its heartbeat says.
    """
    campaign = store.campaigns.get(campaign_id)
    owner = campaign.owner
    if owner is None or not is_here(owner):
        return None
    if not is_gone(owner):
        raise OwnedError(campaign_id, campaign.state, owner)
    return owner.id


def _facts(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if there is no process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
