"""The connection to SQLite or PostgreSQL: how it is opened, and what a transaction is.

Every method of the store is one transaction, for reading or for writing. On SQLite a writing one
takes the write lock when it begins (BEGIN IMMEDIATE), so that it waits its turn at the start and
never fails half-way for having read before another wrote. Commits are synced to disk
(synchronous=FULL): a label cost seconds to measure, so it survives even a power cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote, urlsplit

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError, StatementError
from sqlalchemy.orm import Session

from profiler.errors import StoreAccessError, StoreError, one_line
from store.schema import Base

BUSY_TIMEOUT_S = 60.0
"""How long a writer waits for others before it gives up; a transaction takes milliseconds."""

_BEGIN = "sqlite_begin"

Insert = sqlite.Insert | postgresql.Insert


class Database:
    """An opened database; what the store does with it stands in the classes derived from this."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._writer = engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        with told_as_store_error(self._engine), Session(self._engine) as session:
            yield session

    @contextmanager
    def _writing(self) -> Iterator[Session]:
        """Commits at the end, all or nothing."""
        with told_as_store_error(self._engine), Session(self._writer) as session, session.begin():
            yield session


def make_engine(url: str, *, read_only: bool = False) -> Engine:
    """An engine for this SQLAlchemy URL; nothing is connected yet.

    Args:
        url: of the database.
        read_only: the database shall refuse to write, whatever it is asked.

    Raises:
        StoreAccessError: the URL cannot be read, is of another database system, or its driver is
            missing.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreAccessError(
            "the database's address is not an SQLAlchemy URL, such as sqlite:////data/labels.db"
        ) from error
    system = parsed.get_backend_name()
    if system not in {"sqlite", "postgresql"}:
        raise StoreAccessError(f"the label store runs on sqlite or postgresql, not on {system!r}")
    # NaN is no JSON: PostgreSQL refuses it, and SQLite would hand it on to readers that do.
    options: dict[str, Any] = {"json_serializer": json.JSONEncoder(allow_nan=False).encode}
    if system == "sqlite":
        options["connect_args"] = {"timeout": BUSY_TIMEOUT_S}
    try:
        engine = create_engine(parsed, **options)
    except (SQLAlchemyError, ImportError) as error:
        raise StoreAccessError(f"cannot use the database {parsed}: {one_line(error)}") from error
    if system == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite_to_read if read_only else _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    elif read_only:
        engine = engine.execution_options(postgresql_readonly=True)
    return engine


@contextmanager
def told_as_store_error(engine: Engine, kind: type[StoreError] = StoreError) -> Iterator[None]:
    """Errors of the database become ours, of this kind: without SQL, values or passwords in them.

    Whatever the kind, a database that is busy is nobody's mistake, and one that cannot be written
    is the user's to mend.
    """
    try:
        yield
    except SQLAlchemyError as error:
        cause: BaseException = error
        if isinstance(error, DBAPIError | StatementError) and error.orig is not None:
            cause = error.orig
        raise _store_error(engine, cause, kind) from error
    except (engine.dialect.loaded_dbapi.Error, UnicodeEncodeError, OverflowError) as error:
        # From the driver itself, when it connects or turns a value into what it can store.
        raise _store_error(engine, error, kind) from error


def insert_new(session: Session, table: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Inserts the rows whose unique values are not there yet; leaves the others as they are."""
    if rows:
        session.connection().execute(new_row(session, table), list(rows))


def new_row(session: Session, table: type[Base]) -> Insert:
    """An INSERT that does nothing where a unique value is there already."""
    return insert(session, table).on_conflict_do_nothing()


def insert(session: Session, table: type[Base]) -> Insert:
    """An INSERT of this back end, which can say what to do where a unique value is there."""
    is_sqlite = session.get_bind().dialect.name == "sqlite"
    return sqlite.insert(table) if is_sqlite else postgresql.insert(table)


def utc_now() -> str:
    return datetime.now(UTC).isoformat()


def address(engine: Engine) -> str:
    """Where the database is, for a message: without a password, a SQLite file by its path."""
    url = engine.url
    if url.get_backend_name() == "sqlite" and (url.database or "").startswith("file:"):
        path = unquote(urlsplit(url.database).path)
        url = url.set(database=str(path), query={})
    return str(url)


def _store_error(engine: Engine, cause: BaseException, kind: type[StoreError]) -> StoreError:
    name = getattr(cause, "sqlite_errorname", "")
    if name.startswith("SQLITE_READONLY"):
        kind = StoreAccessError
    elif name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        kind = StoreError
    return kind(f"the label store {address(engine)} refused: {one_line(cause)}")


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself; `_begin_sqlite` does
    cursor = connection.cursor()
    if cursor.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _set_up_sqlite_to_read(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA query_only = ON").close()


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))
