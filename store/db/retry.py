"""Waiting for a database that has gone away, so that a campaign outlives its restart.

Each method of the store is one transaction. If it fails, it leaves nothing behind and is tried
again, with pauses that grow and differ between workers. Its arguments, such as a measurement, wait
in memory. When the reply to a commit is lost, the commit may have succeeded. So every writing
method can be repeated: by ids and times made before its first attempt (`transactions.Call`), it
recognizes what an earlier attempt has written.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from trappm.profiler.errors import StoreAccessError, StoreError

WAIT_S = 600.0
"""How long a database may be away: time to restart it, or the machine that it runs on."""

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 15.0

_Result = TypeVar("_Result")


class StoreAwayError(StoreError):
    """The database cannot be reached now, or is busy; the same may succeed later."""


class RefusedRowError(StoreError):
    """A row that a constraint or the type of a column refuses; the same is refused again."""


class StoreUnreachableError(StoreAwayError, StoreAccessError):
    """The same of a store that is being opened: its address may as well be wrong."""


class StoreNotUpError(StoreUnreachableError):
    """No server takes connections at its address yet: it may be up soon."""


@dataclass(frozen=True)
class Patience:
    """How long a store waits for its database, in seconds, and where it reports that."""

    wait_s: float = WAIT_S
    tell: Callable[[str], None] = logging.getLogger("trappm.store").warning
    of: type[StoreAwayError] = StoreAwayError
    """What is waited for."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __call__(self, attempt: Callable[[], _Result]) -> _Result:
        """Make the attempt, and repeat it while the database is away.

        Raises:
            StoreError: The database did not come back in time.
        """
        began, longest_s, attempts = self.clock(), _FIRST_PAUSE_S, 0
        while True:
            attempts += 1
            try:
                result = attempt()
            except self.of as error:
                pause_s = random.uniform(0.0, longest_s)  # noqa: S311
                waited_s = self.clock() - began
                if waited_s + pause_s >= self.wait_s:
                    if attempts == 1:
                        raise  # no time to wait was given
                    raise StoreError(
                        f"{error}; waited {waited_s:.0f} s for it in vain. What was recorded is "
                        "safe: see that the database runs, can be reached and has room, then go on "
                        "(a campaign with: trappm campaign resume)"
                    ) from error
                if attempts == 1:
                    self.tell(f"{error}; trying again for up to {self.wait_s:.0f} s")
            else:
                if attempts > 1:
                    waited_s = self.clock() - began
                    self.tell(f"the label store answers again, after {waited_s:.0f} s")
                return result
            self.sleep(pause_s)
            longest_s = min(2 * longest_s, _LONGEST_PAUSE_S)


IMPATIENT = Patience(wait_s=0.0)
"""For readers: they get the error at once, and can try again."""
