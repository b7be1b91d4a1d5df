"""Has one process at a time run a campaign, and keeps it the campaign's owner while it does.

Who that is stands in the label store (`store.owners`), with a heartbeat. On the
owner's own machine its process is looked for instead, so that a campaign whose process was killed
goes on at once; on any other machine the heartbeat decides.
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

from trappm.profiler.errors import StoreError
from trappm.store import CampaignRecord, CampaignState, NotOwnerError, Owner, OwnerProcess, Store
from trappm.store import owners as in_store
from trappm.store.owners import OwnedError

WAIT_S = 20.0
"""How long the process of a driver that was killed, or one that is stopping, may take to end."""

POLL_S = 0.3

ENDED = frozenset({CampaignState.FINISHED, CampaignState.CANCELLED})
"""States of campaigns that nobody runs any more."""

_Result = TypeVar("_Result")

_BEGAN, _STATE = 19, 0
"""Places in /proc/PID/stat after the command's name."""


def this_process() -> OwnerProcess:
    """This process, as others can look for it."""
    pid = os.getpid()
    return OwnerProcess(
        host=platform.node(), machine=machine(), pid=pid, began=int(_facts(pid)[_BEGAN])
    )


def machine() -> str:
    """This boot of this machine, and the namespace of its process ids; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def is_here(owner: Owner) -> bool:
    """Whether the owner's process can be looked for: it is, or was, one of this machine."""
    if not owner.process.machine or owner.process.machine != machine():
        return False
    pid = owner.process.pid  # that of another user may be hidden, but for its existence
    return bool(_facts(pid)) or not _exists(pid)


def is_gone(owner: Owner) -> bool:
    """Whether the process of an owner that is here has ended."""
    facts = _facts(owner.process.pid)
    return not facts or int(facts[_BEGAN]) != owner.process.began or facts[_STATE] in {"Z", "X"}


def runs(campaign: CampaignRecord) -> bool:
    """Whether some process runs this campaign now."""
    owner = campaign.owner
    if owner is None or is_here(owner):
        return owner is not None and not is_gone(owner)
    return owner.silent_s < in_store.SILENT_S


def begin(store: Store, campaign_id: str) -> None:
    """Makes this process the owner of a campaign, unless it has an owner that is alive.

    Raises:
        OwnedError: somebody does.
        InputError: it has ended.
    """
    _patiently(store, campaign_id, lambda gone: store.owners.begin_campaign(campaign_id, gone=gone))


@contextlib.contextmanager
def ownership(store: Store, campaign_id: str, *, outlasts: bool = False) -> Iterator[Store | None]:
    """Runs a campaign that was begun: its store, with a heartbeat; None if it was stopped since.

    Once another process has the campaign, that store raises NotOwnerError.

    Args:
        store: that knows the campaign.
        campaign_id: which campaign.
        outlasts: wait until an owner on another machine is silent, since this process replaces it.

    Raises:
        OwnedError: somebody else runs it.
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
            return  # the campaign hears of it from its store
        except StoreError:
            continue  # it is away: others cannot reach it either


def _patiently(
    store: Store, campaign_id: str, do: Callable[[str | None], _Result], outlasts: bool = False
) -> _Result:
    """Does it, knowing who is gone; waits for a while for an owner that is about to end."""
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
    """The owner, if it is one of this machine whose process has ended.

    Raises:
        OwnedError: its process is here and lives, whatever its heartbeat says.
    """
    campaign = store.campaigns.get(campaign_id)
    owner = campaign.owner
    if owner is None or not is_here(owner):
        return None
    if not is_gone(owner):
        raise OwnedError(campaign_id, campaign.state, owner)
    return owner.id


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _facts(pid: int) -> list[str]:
    """What the kernel tells of a process, from its state on; empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
