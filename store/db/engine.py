"""The connection to SQLite or PostgreSQL: how it is opened, and what its errors become.

Commits are synced to disk (synchronous=FULL): a label cost seconds to measure, so it survives even
a power cut.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote, urlsplit

from sqlalchemy import URL, Connection, Engine, create_engine, event, func, make_url, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError, StatementError
from sqlalchemy.orm import Session
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from trappm.profiler.errors import InputError, StoreAccessError, StoreError, from_extra, one_line
from trappm.store.db.column_types import Base
from trappm.store.db.retry import (
    RefusedRowError,
    StoreAwayError,
    StoreNotUpError,
    StoreUnreachableError,
)

BUSY_TIMEOUT_S = 60.0
"""How long a writer waits for others before it gives up; a transaction takes milliseconds."""

_BEGIN = "sqlite_begin"
"""The execution option of an engine that says how its transactions begin on SQLite."""

_AWAY = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_CANTOPEN", "SQLITE_FULL")
"""SQLite's errors while others hold the database, its disk is away, or there is no room."""

_JSON_ENCODER = json.JSONEncoder(allow_nan=False)

_TRANSIENT = ("08", "40", "53", "57P01", "57P02", "57P03")
"""PostgreSQL's SQLSTATEs, or their classes, after which the same may succeed later: connection
lost, transaction rolled back, no resources left, server shut down, crashed or starting."""

_POSTGRESQL_OPTIONS = {
    "connect_timeout": 10,
    # A server that vanished with its network is noticed within about a minute.
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 4,
    "tcp_user_timeout": 60_000,
}

_UNFIT = ValueError | TypeError | LookupError | OverflowError
"""Raised for values that are turned into none that the database can store."""

Insert = sqlite.Insert | postgresql.Insert


def make_engine(url: str, *, read_only: bool = False) -> Engine:
    """An engine for this SQLAlchemy URL; nothing is connected yet.

    Args:
        url: of the database.
        read_only: the database refuses every write.

    Raises:
        StoreAccessError: the URL cannot be read, is of another database system, or its driver is
            missing.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # no trace of it: parts of a password may stand in there
        raise StoreAccessError(
            "the database's address is not an SQLAlchemy URL, such as sqlite:////data/labels.db or "
            "postgresql+psycopg://user@host:5432/labels"
        ) from None
    system = parsed.get_backend_name()
    if system != "sqlite" and "@" in f"{parsed.host} {parsed.database}":
        raise StoreAccessError(  # the rest of a password would be taken for host and database
            "the database's address has more than one @; write one in a password as %40"
        )
    if system not in {"sqlite", "postgresql"}:
        raise StoreAccessError(f"the label store runs on sqlite or postgresql, not on {system!r}")
    if parsed.drivername not in {system, "postgresql+psycopg", "sqlite+pysqlite"}:
        raise StoreAccessError(
            f"the label store knows no driver {parsed.drivername!r}; write {system}:// alone"
        )
    options: dict[str, Any] = {"json_serializer": _to_json}
    if system == "sqlite":
        options["connect_args"] = {"timeout": BUSY_TIMEOUT_S}
    else:
        named = parsed.query
        options["connect_args"] = {k: v for k, v in _POSTGRESQL_OPTIONS.items() if k not in named}
    try:
        with from_extra("postgresql", f"the database {_without_password(parsed)}"):
            engine = create_engine(parsed, **options)
    except InputError as error:
        raise StoreAccessError(str(error)) from error
    except SQLAlchemyError as error:
        raise StoreAccessError(
            f"cannot use the database {_without_password(parsed)}: {one_line(error)}"
        ) from error
    if system == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite_to_read if read_only else _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    elif read_only:
        engine = engine.execution_options(postgresql_readonly=True)
    return engine


def writer_of(engine: Engine) -> Engine:
    """The same engine, whose transactions on SQLite take the write lock when they begin."""
    return engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})


@contextmanager
def store_errors(engine: Engine, kind: type[StoreError] = StoreError) -> Iterator[None]:
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
    return insert(back_end(session), table).on_conflict_do_nothing()


def back_end(session: Session) -> str:
    """The name of the database system: sqlite or postgresql."""
    return session.get_bind().dialect.name


def insert(name: str, table: type[Base]) -> Insert:
    """An INSERT of the back end of this name, which can say what to do where a value is there."""
    return sqlite.insert(table) if name == "sqlite" else postgresql.insert(table)


def database_time(connection: Connection) -> datetime:
    """Now in UTC, by the one clock that all who use this database share."""
    if connection.dialect.name == "sqlite":
        return datetime.now(UTC)  # they are all on one host
    now: datetime = connection.execute(select(func.clock_timestamp())).scalar_one()
    return now.astimezone(UTC)


def utc_now() -> str:
    return datetime.now(UTC).isoformat()


def address(engine: Engine) -> str:
    """Where the database is, for a message: without a password, a SQLite file by its path."""
    url = engine.url
    if url.get_backend_name() == "sqlite" and (url.database or "").startswith("file:"):
        url = url.set(database=str(unquote(urlsplit(url.database).path)))
    return _without_password(url)


def _without_password(url: URL) -> str:
    """A URL without what nobody else is to know: a password, which may stand in its query too."""
    return url.set(query={}).render_as_string(hide_password=True)


def _store_error(engine: Engine, cause: BaseException, kind: type[StoreError]) -> StoreError:
    driver, name = engine.dialect.loaded_dbapi, _sqlite_name(cause)
    if name.startswith("SQLITE_READONLY"):
        kind = StoreAccessError
    elif _is_away(engine, cause) and (kind is StoreError or name.startswith(_AWAY[:2])):
        kind = StoreAwayError
    elif _is_away(engine, cause) and kind is StoreAccessError:
        if name or _sqlstate(cause):
            kind = StoreUnreachableError
        elif _is_not_up(engine):
            kind = StoreNotUpError
    elif kind is StoreError and isinstance(
        cause, driver.IntegrityError | driver.DataError | _UNFIT
    ):
        kind = RefusedRowError
    return kind(f"the label store {address(engine)} refused: {one_line(cause)}")


def _is_away(engine: Engine, cause: BaseException) -> bool:
    """Return whether the same may succeed later: the database is busy or cannot be reached.

    A connection that cannot be made, or that breaks, has no SQLSTATE: libpq gives it to the results
    of statements only.
    """
    if engine.dialect.name == "sqlite":
        return _sqlite_name(cause).startswith(_AWAY)
    if code := _sqlstate(cause):
        return code.startswith(_TRANSIENT)
    driver = engine.dialect.loaded_dbapi
    return isinstance(cause, driver.OperationalError | driver.InterfaceError)


def _is_not_up(engine: Engine) -> bool:
    """Return whether no PostgreSQL server takes connections at the engine's address yet.

    A failed connection states its reason only in the server's language. So libpq is asked whether a
    server is up there: if it is, it refuses our user, password or database, and would do so again.
    """
    from psycopg.conninfo import make_conninfo
    from psycopg.pq import PGconn, Ping

    _, options = engine.dialect.create_connect_args(engine.url)
    # A server that encrypts otherwise than we ask is up, so the ping does without.
    options = {name: value for name, value in options.items() if name != "context"}
    server = make_conninfo(**(options | {"sslmode": "prefer"}))
    try:
        if engine.url.host is not None:
            socket.getaddrinfo(engine.url.host, None)
        if PGconn.ping(server.encode()) in {Ping.REJECT, Ping.NO_RESPONSE}:
            return True
        engine.connect().close()  # it may have come up just now
    except (OSError, SQLAlchemyError):
        return False
    return True


def _to_json(value: object) -> str:
    # NaN is no JSON: PostgreSQL refuses it, and SQLite would hand it on to readers that do.
    try:
        return _JSON_ENCODER.encode(value)
    except ValueError as error:  # which the driver of PostgreSQL would pass on as it is
        raise StoreError(f"the label store keeps JSON, and this is none: {error}") from error


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself; `_begin_sqlite` does
    cursor = connection.cursor()
    if cursor.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        # Of two that make the same file at once, SQLite refuses one here without any wait.
        _while_busy(lambda: cursor.execute("PRAGMA journal_mode = WAL"))
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _while_busy(do: Callable[[], object]) -> None:
    busy = retry_if_exception(lambda error: _sqlite_name(error).startswith("SQLITE_BUSY"))
    pause, stop = wait_random_exponential(0.01, max=1.0), stop_after_delay(BUSY_TIMEOUT_S)
    Retrying(retry=busy, wait=pause, stop=stop, reraise=True)(do)


def _sqlite_name(error: BaseException) -> str:
    return getattr(error, "sqlite_errorname", "")


def _sqlstate(error: BaseException) -> str:
    return getattr(error, "sqlstate", None) or ""


def _set_up_sqlite_to_read(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA query_only = ON").close()


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))
