"""Opens a label store to read: nothing is made, and nothing can be changed.

A SQLite database in WAL mode needs two files beside it, even to be read. Where they are not there
and cannot be made (a read-only folder, somebody else's), the database is read as a file that nobody
writes to, which then is true: whoever has it open keeps those files there.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from sqlalchemy import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError, OperationalError

from trappm.profiler.errors import InputError, StoreAccessError
from trappm.store.db.engine import make_engine, store_errors


class NoLabelStoreError(StoreAccessError):
    """No label store exists where one is to be read: no file, or an empty database."""


def engine_to_read(url: str) -> Engine:
    """An engine for the database at this SQLAlchemy URL that cannot write.

    Raises:
        NoLabelStoreError: there is no such SQLite file.
        InputError: the folder of the file cannot be looked into.
        StoreAccessError: the URL cannot be read; the file cannot either.
    """
    path = _sqlite_file(url)
    if path is None:
        return make_engine(url, read_only=True)
    try:
        is_there = path.is_file()
    except OSError as error:
        raise InputError(f"the label store {path} cannot be read: {error.strerror}") from error
    if not is_there:
        raise NoLabelStoreError(
            f"there is no label store at {path}; fill one with: trappm campaign launch, "
            "or set TRAPPM_HOME to the folder that holds one"
        )
    engine = make_engine(_read_only_url(path), read_only=True)
    try:
        with store_errors(engine, StoreAccessError):
            _try(engine, path)
    except _NeedsItsLogError:
        engine.dispose()
        engine = make_engine(_read_only_url(path, immutable="1"), read_only=True)
    return engine


class _NeedsItsLogError(Exception):
    """The files beside the database can be neither read nor made, and none has anything in it."""


def _try(engine: Engine, path: Path) -> None:
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1 FROM sqlite_schema LIMIT 1")
    except OperationalError as error:
        log = path.with_name(path.name + "-wal")
        if log.exists() and log.stat().st_size > 0:
            raise  # the latest labels are in the log, so it must be read too
        raise _NeedsItsLogError from error


def _sqlite_file(url: str) -> Path | None:
    """The file of a SQLite URL, whatever options it has; None for what is no file."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return None  # `make_engine` says what is wrong
    name = parsed.database
    if parsed.get_backend_name() != "sqlite" or not name or parsed.query.get("mode") == "memory":
        return None
    if name.startswith("file:"):
        name = unquote(urlsplit(name).path)
    return None if name == ":memory:" else Path(name).absolute()


def _read_only_url(path: Path, **options: str) -> str:
    query = {"mode": "ro", "uri": "true", **options}
    return URL.create("sqlite", database=path.as_uri(), query=query).render_as_string()
