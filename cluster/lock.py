"""One process at a time runs a campaign: whoever runs its loop holds a lock in its folder.

The kernel releases the lock when that process dies: a campaign that says `running` without a lock
was interrupted.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator

from filelock import FileLock, Timeout

from trappm.profiler.errors import CampaignError, InputError
from trappm.store import Home

WAIT_S = 20.0
"""How long the loop of a driver that was killed may take to end after it."""


@contextlib.contextmanager
def campaign_lock(home: Home, campaign_id: str) -> Iterator[None]:
    """Held while a campaign runs.

    Raises:
        CampaignError: another process runs it.
        InputError: its folder cannot be written.
    """
    try:
        with _lock(home, campaign_id, WAIT_S):
            yield
    except Timeout as error:
        raise CampaignError(
            f"campaign {campaign_id} is running in another process; "
            f"see it with: trappm campaign status {campaign_id}"
        ) from error


def is_running(home: Home, campaign_id: str) -> bool:
    """Whether some process runs this campaign now; the data folder need not be writable."""
    try:
        file = (home.campaigns / campaign_id / "lock").open("rb")
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as FileLock holds it
        except BlockingIOError:
            return True
    return False


def _lock(home: Home, campaign_id: str, wait_s: float) -> FileLock:
    folder = home.campaigns / campaign_id
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
    except OSError as error:
        raise InputError(
            f"the campaign's folder {folder} cannot be written ({error.strerror}); "
            "mend its permissions, or name another data folder with TRAPPM_HOME"
        ) from error
    return FileLock(folder / "lock", timeout=wait_s)
