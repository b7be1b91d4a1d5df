"""What a transaction of the store is: all or nothing, and tried again while the database is away.

A part of the store (`store.campaigns`, `store.labels` ...) is a `Repository`. Each of its methods
that carries `@reading` or `@writing` is one transaction, and gets its session from there. On SQLite
a writing one takes the write lock when it begins (BEGIN IMMEDIATE), so that it waits its turn at
the start and never fails half-way for having read before another wrote.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from trappm.store.db.engine import store_errors, writer_of
from trappm.store.db.retry import Patience

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Part = TypeVar("_Part", bound="Repository")

Guard = Callable[[Session], None]
"""Raises once its holder may not write any more."""


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
    def writing(self) -> Iterator[Session]:
        """A transaction, tried once, that the guard lets begin; it commits at the end."""
        with store_errors(self.engine), Session(self._writer) as session, session.begin():
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
    return _transaction(method, Database.reading)


def writing(
    method: _Method[_Part, _Parameters, _Result],
) -> _Transaction[_Part, _Parameters, _Result]:
    """As `reading`, of a transaction that writes: all of it is kept, or nothing."""
    return _transaction(method, Database.writing)


def _transaction(
    method: _Method[_Part, _Parameters, _Result],
    begin: Callable[[Database], AbstractContextManager[Session]],
) -> _Transaction[_Part, _Parameters, _Result]:
    @functools.wraps(method)
    def transaction(
        self: _Part, /, *arguments: _Parameters.args, **keywords: _Parameters.kwargs
    ) -> _Result:
        if any(isinstance(value, Iterator) for value in (*arguments, *keywords.values())):
            raise TypeError(f"{method.__qualname__} may be tried again; give it no iterator")

        def attempt() -> _Result:
            with begin(self._database) as session:
                return method(self, session, *arguments, **keywords)

        return self._database.patience(attempt)

    return transaction
