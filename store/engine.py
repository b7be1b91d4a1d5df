"""Opening SQLite or PostgreSQL, and errors of the database.

Commits are synced to disk (synchronous=FULL), because a label takes seconds to measure and must
survive a power cut.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    create_engine,
    event,
    func,
    make_url,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DatabaseError, SQLAlchemyError, StatementError
from sqlalchemy.orm import Session
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from trappm.profiler.errors import InputError, StoreAccessError, StoreError, from_extra, one_line
from trappm.store.schema import Base

BUSY_TIMEOUT_S = 60.0
"""Seconds that a writer waits for other writers; a transaction takes milliseconds."""

_BEGIN = "sqlite_begin"
"""Execution option of an engine: the statement that begins a transaction on SQLite."""

_AWAY = (
    "SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_CANTOPEN", "SQLITE_FULL", "SQLITE_IOERR",
    "08", "40", "53", "57P01", "57P02", "57P03",
)  # fmt: skip
"""Names of SQLite's errors, and SQLSTATEs or their classes, after which the same may succeed later.

The database is locked, its disk is missing or full, or a quota used up; the connection is lost, the
transaction rolled back, no resources left, the server shut down, crashed or starting.
"""

_POSTGRESQL_OPTIONS = {
    "connect_timeout": 10,
    # A server that vanished with its network is noticed within about a minute.
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 4,
    "tcp_user_timeout": 60_000,
}

_JSON_ENCODER = json.JSONEncoder(allow_nan=False)

_UNFIT = ValueError | TypeError | LookupError | OverflowError
"""Errors of values that cannot be converted for the database."""

Insert = sqlite.Insert | postgresql.Insert


class NoLabelStoreError(StoreAccessError):
    """There is no label store to read: no file, or an empty database."""


class StoreAwayError(StoreError):
    """The database cannot be reached now, or is busy; the same may succeed later."""


class StoreNotUpError(StoreAwayError, StoreAccessError):
    """No server accepts connections at the address, which may be wrong; it may start soon."""


class RefusedRowError(StoreError):
    """A constraint or a column's type refuses a row; it would be refused again."""


def make_engine(url: str, *, read_only: bool = False) -> Engine:
    """Return an engine for an SQLAlchemy URL, without connecting.

    Args:
        url: URL of the database.
        read_only: Whether the database refuses every write.

    Raises:
        StoreAccessError: The URL is malformed, or its database system is not supported.
        InputError: The driver of the database is missing.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # the error would repeat the URL, with its password
        raise StoreAccessError(
            "the database's address is not an SQLAlchemy URL, such as sqlite:////data/labels.db or "
            "postgresql+psycopg://user@host:5432/labels"
        ) from None
    if parsed.drivername == "postgres":  # as libpq and hosting services write it
        parsed = parsed.set(drivername="postgresql")
    system = parsed.get_backend_name()
    if system != "sqlite" and "@" in f"{parsed.host} {parsed.database}":
        raise StoreAccessError(  # the rest of a password would be taken for host and database
            "the database's address has more than one @; write one in a password as %40"
        )
    if parsed.drivername not in {
        "sqlite", "sqlite+pysqlite", "postgresql", "postgresql+psycopg"
    }:  # fmt: skip
        raise StoreAccessError(
            f"the label store runs on sqlite:// or postgresql://, not on {parsed.drivername!r}"
        )
    if system == "sqlite":
        connect_args: dict[str, Any] = {"timeout": BUSY_TIMEOUT_S}
    else:
        connect_args = {k: v for k, v in _POSTGRESQL_OPTIONS.items() if k not in parsed.query}
    with from_extra("postgresql", f"the database {_hide_password(parsed)}"):
        engine = create_engine(parsed, json_serializer=_to_json, connect_args=connect_args)
    if system == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite_to_read if read_only else _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    elif read_only:
        engine = engine.execution_options(postgresql_readonly=True)
    return engine


def engine_to_read(url: str) -> Engine:
    """Return an engine that cannot write, and creates nothing.

    A SQLite database in WAL mode needs two files next to it, even for reading. If they are missing
    in a folder that this user cannot write, it is read as an immutable file.

    Raises:
        NoLabelStoreError: There is no such SQLite file.
        InputError: The folder of the file cannot be accessed.
        StoreAccessError: The URL is malformed.
    """
    path = _sqlite_file(url)
    if path is None:
        return make_engine(url, read_only=True)
    try:
        is_there = path.is_file()
        has_log = path.with_name(f"{path.name}-wal").exists()
    except OSError as error:
        raise InputError(f"the label store {path} cannot be read: {error.strerror}") from error
    if not is_there:
        raise NoLabelStoreError(
            f"there is no label store at {path}; fill one with: trappm campaign launch, "
            "or set TRAPPM_HOME to the folder that holds one, or TRAPPM_DATABASE to its address"
        )
    query = {"mode": "ro", "uri": "true"}
    if not has_log and not os.access(path.parent, os.W_OK):
        query["immutable"] = "1"
    address = URL.create("sqlite", database=path.as_uri(), query=query)
    return make_engine(address.render_as_string(), read_only=True)


def writer_of(engine: Engine) -> Engine:
    """Return the same engine, whose transactions take SQLite's write lock when they begin."""
    return engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})


def find_damage(engine: Engine) -> list[str]:
    """Return what SQLite reports of its file and its foreign keys; empty if nothing is wrong.

    PostgreSQL enforces its constraints at all times. Its files are checked by `pg_amcheck`.
    """
    if engine.dialect.name != "sqlite":
        return []
    with store_errors(engine), engine.connect() as connection:
        try:
            lines = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
            orphans = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
        except DatabaseError as error:  # the damage stops the check itself
            if error_code(error.orig) != "SQLITE_CORRUPT":
                raise
            return [str(error.orig)]
    damage = [" ".join(line.split()) for line in lines if line != "ok"]
    return damage + [
        f"row {row} of {table} refers to a row of {parent} that does not exist"
        for table, row, parent, _ in orphans
    ]


@contextmanager
def store_errors(engine: Engine, *, opening: bool = False) -> Iterator[None]:
    """Turn errors of the database into a StoreError of one line without SQL, values or passwords.

    Args:
        engine: Engine of the database.
        opening: Whether the database is opened: what it refuses is a StoreAccessError then.
    """
    try:
        yield
    except SQLAlchemyError as error:
        cause = error.orig if isinstance(error, StatementError) else None
        raise _store_error(engine, cause or error, opening) from error
    except (engine.dialect.loaded_dbapi.Error, UnicodeEncodeError, OverflowError) as error:
        # From the driver itself, when it connects or converts a value.
        raise _store_error(engine, error, opening) from error


def dialect_of(session: Session) -> str:
    """Return the name of the session's database system."""
    return session.get_bind().dialect.name


def insert(dialect: str, table: type[Base]) -> Insert:
    """Return an INSERT of a database system that supports ON CONFLICT."""
    return sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)


def insert_new(session: Session, table: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert the rows whose unique values are new; leave the others as they are."""
    if rows:
        query = insert(dialect_of(session), table).on_conflict_do_nothing()
        session.connection().execute(query, list(rows))


def database_time(connection: Connection) -> datetime:
    """Return the time in UTC by the clock that all users of this database share."""
    if connection.dialect.name == "sqlite":
        return datetime.now(UTC)  # its users are on one host
    now: datetime = connection.execute(select(func.clock_timestamp())).scalar_one()
    return now.astimezone(UTC)


def address(engine: Engine) -> str:
    """Return the address of the database for messages, without a password."""
    url = engine.url
    if url.get_backend_name() == "sqlite" and (url.database or "").startswith("file:"):
        url = url.set(database=str(unquote(urlsplit(url.database).path)))
    return _hide_password(url)


def _hide_password(url: URL) -> str:
    """Return a URL without its password and its query, which may hold one, too."""
    return url.set(query={}).render_as_string(hide_password=True)


def _sqlite_file(url: str) -> Path | None:
    """Return the file of a SQLite URL; None for another database or one in memory."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return None  # `make_engine` reports what is wrong
    name = parsed.database
    if parsed.get_backend_name() != "sqlite" or not name or parsed.query.get("mode") == "memory":
        return None
    if name.startswith("file:"):
        name = unquote(urlsplit(name).path)
    return None if name == ":memory:" else Path(name).absolute()


def _store_error(engine: Engine, cause: BaseException, opening: bool) -> StoreError:
    """Return the error to raise for an error of the driver, by its SQLSTATE or SQLite name.

    libpq gives an SQLSTATE to the results of statements only. A connection that cannot be made, or
    that breaks, has none.
    """
    driver, code = engine.dialect.loaded_dbapi, error_code(cause)
    is_connection = (
        engine.dialect.name == "postgresql"
        and not code
        and isinstance(cause, driver.OperationalError | driver.InterfaceError)
    )
    kind: type[StoreError] = StoreAccessError if opening else StoreError
    if code.startswith("SQLITE_READONLY"):
        kind = StoreAccessError
    elif opening and code.startswith("SQLITE_CANTOPEN"):
        kind = StoreNotUpError  # its folder is missing, as before a file system is mounted
    elif code.startswith(_AWAY) or (is_connection and not opening):
        kind = StoreAwayError
    elif is_connection and _is_not_up(engine):
        kind = StoreNotUpError
    elif not opening and isinstance(cause, driver.IntegrityError | driver.DataError | _UNFIT):
        kind = RefusedRowError
    return kind(f"the label store {address(engine)} refused: {one_line(cause)}")


def _is_not_up(engine: Engine) -> bool:
    """Return whether no PostgreSQL server accepted connections at the engine's address.

    A failed connection gives its reason in the server's language only. So libpq's ping decides: a
    server that is up refuses the user, the password or the database, and would do so again.
    """
    from psycopg.conninfo import make_conninfo
    from psycopg.pq import PGconn, Ping

    _, options = engine.dialect.create_connect_args(engine.url)
    # A server with other settings for encryption is up, too.
    options = {name: value for name, value in options.items() if name != "context"}
    server = make_conninfo(**(options | {"sslmode": "prefer"}))
    try:
        if engine.url.host is not None:
            socket.getaddrinfo(engine.url.host, None)
    except OSError:
        return False  # there is no such host
    if PGconn.ping(server.encode()) in {Ping.REJECT, Ping.NO_RESPONSE}:
        return True
    try:
        engine.connect().close()
    except SQLAlchemyError:
        return False
    return True  # it has come up since the failure


def _to_json(value: object) -> str:
    # NaN is not JSON: PostgreSQL refuses it, and SQLite would store it.
    try:
        return _JSON_ENCODER.encode(value)
    except ValueError as error:
        raise StoreError(f"the label store cannot keep this as JSON: {error}") from error


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # `_begin_sqlite` begins transactions
    cursor = connection.cursor()
    if cursor.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        # SQLite does not wait here if two processes create the same file.
        Retrying(
            retry=retry_if_exception(lambda error: error_code(error).startswith("SQLITE_BUSY")),
            wait=wait_random_exponential(0.01, max=1.0),
            stop=stop_after_delay(BUSY_TIMEOUT_S),
            reraise=True,
        )(cursor.execute, "PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _set_up_sqlite_to_read(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA query_only = ON").close()


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))


def error_code(error: BaseException | None) -> str:
    """Return the SQLSTATE of an error, or its name in SQLite; empty if it has neither."""
    return getattr(error, "sqlite_errorname", None) or getattr(error, "sqlstate", None) or ""
