"""What a transaction of the store is: all or nothing, and tried again while the database is away.

A part of the store (`store.campaigns`, `store.labels` ...) is a `Repository`. Each of its methods
that carries `@reading` or `@writing` is one transaction, and gets its session from there. On SQLite
a writing one takes the write lock when it begins (BEGIN IMMEDIATE), so that it waits its turn at
the start and never fails half-way for having read before another wrote.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from trappm.store.db.engine import store_errors, utc_now, writer_of
from trappm.store.db.retry import Patience

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Part = TypeVar("_Part", bound="Repository")

Guard = Callable[[Session], None]
"""Raises once its holder may not write any more."""


@dataclass(frozen=True)
class Call:
    """One call of a method, the same in each of its attempts.

    What an attempt writes under new ids or times takes them from here. So an attempt that follows a
    lost reply finds what the one before has written, and does not write it twice.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    at: str = field(default_factory=utc_now)
    """Time of the call, in UTC."""


def call_of(session: Session) -> Call:
    """Return the call that this session's transaction is an attempt of."""
    call: Call = session.info["call"]
    return call


class Database:
    """An opened database, and how its transactions begin."""

    def __init__(self, engine: Engine, patience: Patience, guard: Guard | None = None) -> None:
        self.engine = engine
        self.patience = patience
        self.guard = guard
        self._writer = writer_of(engine)

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A transaction that only reads, tried once."""
        with store_errors(self.engine), Session(self.engine) as session:
            yield session

    @contextmanager
    def writing(self, call: Call | None = None) -> Iterator[Session]:
        """A transaction, tried once, that the guard lets begin; it commits at the end."""
        info = {"call": call or Call()}
        with (
            store_errors(self.engine),
            Session(self._writer, info=info) as session,
            session.begin(),
        ):
            self.check_guard(session)
            yield session

    def check_guard(self, session: Session) -> None:
        """Raises what the guard raises; nothing without one."""
        if self.guard is not None:
            self.guard(session)


class Repository:
    """A part of the store: what it keeps of one subject."""

    def __init__(self, database: Database) -> None:
        self._database = database


_Method = Callable[Concatenate[_Part, Session, _Parameters], _Result]
_Transaction = Callable[Concatenate[_Part, _Parameters], _Result]


def reading(
    method: _Method[_Part, _Parameters, _Result],
) -> _Transaction[_Part, _Parameters, _Result]:
    """Makes a method of a repository one reading transaction, whose session it is given.

    It is tried again, from its beginning, while the database is away: no argument may be an
    iterator, which could be read only once.
    """
    return _transaction(method, lambda database, _: database.reading())


def writing(
    method: _Method[_Part, _Parameters, _Result],
) -> _Transaction[_Part, _Parameters, _Result]:
    """Like `reading`, for a transaction that writes: all of it is kept, or nothing.

    If the reply to its commit is lost, it is repeated although it was done. So a second attempt of
    the same call must change nothing more, and give the same answer.
    """
    return _transaction(method, Database.writing)


def _transaction(
    method: _Method[_Part, _Parameters, _Result],
    begin: Callable[[Database, Call], AbstractContextManager[Session]],
) -> _Transaction[_Part, _Parameters, _Result]:
    @functools.wraps(method)
    def transaction(
        self: _Part, /, *arguments: _Parameters.args, **keywords: _Parameters.kwargs
    ) -> _Result:
        if any(isinstance(value, Iterator) for value in (*arguments, *keywords.values())):
            raise TypeError(f"{method.__qualname__} may be tried again; give it no iterator")

        call = Call()

        def attempt() -> _Result:
            with begin(self._database, call) as session:
                return method(self, session, *arguments, **keywords)

        return self._database.patience(attempt)

    return transaction
