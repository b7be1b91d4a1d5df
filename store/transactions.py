"""Transactions of the store: all or nothing, and repeated while the database is away.

A part of the store (`store.campaigns`, `store.labels` ...) is a `Repository`. Each of its methods
with `@reading` or `@writing` is one transaction and gets its session. A transaction that fails
leaves nothing behind and is repeated with growing, random pauses. A commit whose reply is lost may
have succeeded, so every writing method can be repeated: it takes new ids and times from
`WriteCall`, and recognizes what an earlier attempt has written.

On SQLite a writing transaction takes the write lock when it begins, so that it waits at the start
and never fails because another process wrote after it had read.
"""

from __future__ import annotations

import functools
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Engine
from sqlalchemy.orm import Session
from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_random_exponential

from trappm.profiler.errors import StoreError
from trappm.profiler.host.environment import utc_now
from trappm.store.engine import StoreAwayError, store_errors, writer_of

WAIT_S = 600.0
"""Seconds to wait for a database: time to restart it, or its machine."""

_PAUSE_S = wait_random_exponential(multiplier=0.2, max=15.0)

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Part = TypeVar("_Part", bound="Repository")

Guard = Callable[[Session], None]
"""Raises an error once the store's holder may no longer write."""


@dataclass(frozen=True)
class Patience:
    """Time that a store waits for its database, and a callback that reports it."""

    wait_s: float = WAIT_S
    tell: Callable[[str], None] = logging.getLogger("trappm.store").warning
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __call__(self, attempt: Callable[[], _Result]) -> _Result:
        """Make the attempt, and repeat it while the database is away.

        Raises:
            StoreError: The database did not come back in time.
        """
        began = self.clock()

        def waited_s() -> float:
            return self.clock() - began

        def report(state: RetryCallState) -> None:
            if state.attempt_number == 1 and state.outcome is not None:
                away = state.outcome.exception()
                self.tell(f"{away}; trying again for up to {self.wait_s:.0f} s")

        retrying = Retrying(
            sleep=self.sleep,
            retry=retry_if_exception_type(StoreAwayError),
            wait=lambda state: min(_PAUSE_S(state), max(self.wait_s - waited_s(), 0.0)),
            stop=lambda _: waited_s() >= self.wait_s,
            before_sleep=report,
            reraise=True,
        )
        try:
            result = retrying(attempt)
        except StoreAwayError as error:
            if self.wait_s == 0.0:
                raise
            raise StoreError(
                f"{error}; waited {waited_s():.0f} s for it in vain. What was recorded is "
                "safe. Check that the database runs, can be reached and has free space; "
                "continue a campaign with: trappm campaign resume"
            ) from error
        if retrying.statistics["attempt_number"] > 1:
            self.tell(f"the label store answers again, after {waited_s():.0f} s")
        return result


IMPATIENT = Patience(wait_s=0.0)
"""Does not wait; for readers, who can repeat a command."""


@dataclass(frozen=True)
class WriteCall:
    """One call of a writing method; all of its attempts share the id and the time."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    at: str = field(default_factory=utc_now)
    """Time of the call, in UTC."""


def call_of(session: Session) -> WriteCall:
    """Return the call that this session's transaction belongs to."""
    call: WriteCall = session.info["call"]
    return call


class Database:
    """An opened database and how its transactions begin."""

    def __init__(self, engine: Engine, patience: Patience, guard: Guard | None = None) -> None:
        self.engine = engine
        self.patience = patience
        self.guard = guard
        self._writer = writer_of(engine)

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Provide a transaction that only reads, without a retry."""
        with store_errors(self.engine), Session(self.engine) as session:
            yield session

    @contextmanager
    def writing(self, call: WriteCall | None = None) -> Iterator[Session]:
        """Provide a transaction that commits at the end, without a retry; the guard comes first."""
        info = {"call": call or WriteCall()}
        with (
            store_errors(self.engine),
            Session(self._writer, info=info) as session,
            session.begin(),
        ):
            self.check_guard(session)
            yield session

    def check_guard(self, session: Session) -> None:
        """Call the guard, if there is one."""
        if self.guard is not None:
            self.guard(session)


class Repository:
    """A part of the store, for one subject."""

    def __init__(self, database: Database) -> None:
        self._database = database


_Method = Callable[Concatenate[_Part, Session, _Parameters], _Result]
_Transaction = Callable[Concatenate[_Part, _Parameters], _Result]


def reading(
    method: _Method[_Part, _Parameters, _Result],
) -> _Transaction[_Part, _Parameters, _Result]:
    """Make a method one reading transaction, which is repeated while the database is away."""
    return _transaction(method, lambda database, _: database.reading())


def writing(
    method: _Method[_Part, _Parameters, _Result],
) -> _Transaction[_Part, _Parameters, _Result]:
    """Make a method one writing transaction, which is repeated while the database is away.

    A second attempt after a lost reply must change nothing more, and return the same.
    """
    return _transaction(method, Database.writing)


def _transaction(
    method: _Method[_Part, _Parameters, _Result],
    begin: Callable[[Database, WriteCall], AbstractContextManager[Session]],
) -> _Transaction[_Part, _Parameters, _Result]:
    @functools.wraps(method)
    def transaction(
        self: _Part, /, *arguments: _Parameters.args, **keywords: _Parameters.kwargs
    ) -> _Result:
        call = WriteCall()

        def attempt() -> _Result:
            with begin(self._database, call) as session:
                return method(self, session, *arguments, **keywords)

        return self._database.patience(attempt)

    return transaction
