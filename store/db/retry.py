"""Waiting for a database that has gone away, so that a campaign outlives its restart.

Each method of the store is one transaction: one that failed has left nothing behind, and is tried
again, with pauses that grow and differ from worker to worker. Its
arguments, a measurement too, wait in memory. Whether a commit that got no answer was done, nobody
can know; recording sees by the attempt key that it was. Nothing else does harm when done twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_random_exponential
from tenacity.stop import stop_before_delay

from trappm.profiler.errors import StoreAccessError, StoreError

WAIT_S = 600.0
"""How long a database may be away: time to restart it, or the machine that it runs on."""

_LONGEST_PAUSE_S = 15.0

_Result = TypeVar("_Result")


class StoreAwayError(StoreError):
    """The database cannot be reached now, or is busy; the same may succeed later."""


class StoreUnreachableError(StoreAwayError, StoreAccessError):
    """The same of a store that is being opened: its address may as well be wrong."""


class StoreNotUpError(StoreUnreachableError):
    """Nothing listens at its address, or what does is about to: it may well be up soon."""


@dataclass(frozen=True)
class Patience:
    """How long a store waits for its database, in seconds, and where it reports that."""

    wait_s: float = WAIT_S
    tell: Callable[[str], None] = logging.getLogger("trappm.store").warning
    of: type[StoreAwayError] = StoreAwayError
    """What is waited for."""

    def __call__(self, attempt: Callable[[], _Result]) -> _Result:
        """Makes the attempt, again and again while the database is away.

        Raises:
            StoreError: it did not come back in time.
        """
        retrying = Retrying(
            retry=retry_if_exception_type(self.of),
            wait=wait_random_exponential(multiplier=0.2, max=_LONGEST_PAUSE_S),
            stop=stop_before_delay(self.wait_s),
            before_sleep=self._tell_once,
            retry_error_callback=_give_up,
        )
        result = retrying(attempt)
        if retrying.statistics["attempt_number"] > 1:
            waited_s = retrying.statistics["delay_since_first_attempt"]
            self.tell(f"the label store answers again, after {waited_s:.0f} s")
        return result

    def _tell_once(self, state: RetryCallState) -> None:
        if state.attempt_number == 1:
            self.tell(f"{_error_of(state)}; trying again for up to {self.wait_s:.0f} s")


IMPATIENT = Patience(wait_s=0.0)
"""For readers: they get the error at once, and can try again."""


def _give_up(state: RetryCallState) -> Any:
    error = _error_of(state)
    if state.attempt_number == 1:
        raise error  # no time to wait was given
    raise StoreError(
        f"{error}; waited {state.seconds_since_start or 0:.0f} s for it in vain. What was recorded "
        "is safe: see that the database runs, can be reached and has room, then go on (a campaign "
        "with: trappm campaign resume)"
    ) from error


def _error_of(state: RetryCallState) -> BaseException:
    error = state.outcome.exception() if state.outcome else None
    assert error is not None  # noqa: S101  (only a failure is tried again)
    return error
