"""Schema versions: creating, upgrading, checking and refusing a database.

Alembic runs the revisions in `store/migrations/versions`. It is imported only when there is
something to do, so that opening an up-to-date store is quick. A new revision changes
`store.schema`, adds a file there, and adds its name to REVISIONS.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.exc import DatabaseError

from trappm.profiler.errors import StoreAccessError
from trappm.store.engine import (
    NoLabelStoreError,
    address,
    engine_to_read,
    make_engine,
    store_errors,
    writer_of,
)

REVISIONS = ("0013",)
"""Schemas that this version can read or upgrade, the newest last."""

_OLD_REVISIONS = tuple(f"{number:04}" for number in range(1, 13))
"""Schemas of TraPPM 0.2.0 and earlier; such a store is exported and imported instead."""

_VERSION_TABLE = "alembic_version"
_POSTGRESQL_LOCK = 5_784_113_902
"""An arbitrary number: the advisory lock of the process that upgrades a PostgreSQL database."""


@dataclass(frozen=True, kw_only=True)
class Upgrade:
    """The result of an upgrade."""

    address: str
    """Address of the database, without a password."""
    before: str | None
    """Schema before the upgrade; None if the database was empty."""
    after: str
    """Schema after it; the same if there was nothing to do."""


def upgrade_store(url: str) -> Upgrade:
    """Upgrade the label store at an SQLAlchemy URL to the newest schema, in one transaction.

    Raises:
        InputError: There is no such SQLite file, or it is not a label store that this version
            can upgrade.
        StoreError: The database refused; it is unchanged.
    """
    reader = engine_to_read(url)  # which creates no file
    try:
        before, where = schema_of(reader), address(reader)
    finally:
        reader.dispose()
    if before != REVISIONS[-1]:
        engine = make_engine(url)
        try:
            upgrade(engine)
        finally:
            engine.dispose()
    return Upgrade(address=where, before=before, after=REVISIONS[-1])


def upgrade(engine: Engine) -> None:
    """Upgrade a database to the newest schema, in one transaction.

    Raises:
        StoreAccessError: It is not a database or not a label store, has a newer schema, or cannot
            be written.
    """
    with store_errors(engine, StoreAccessError):
        with engine.connect() as connection:
            if _revision(connection) == REVISIONS[-1]:
                return
        with writer_of(engine).begin() as connection:
            if engine.dialect.name == "postgresql":
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_POSTGRESQL_LOCK})"))
            if _revision(connection) != REVISIONS[-1]:  # another process may have upgraded it
                _run_alembic(connection)


def schema_of(engine: Engine) -> str | None:
    """Return the schema of a database, or None if it is empty.

    Raises:
        StoreAccessError: It is not a database or not a label store, or has a newer schema.
    """
    with store_errors(engine, StoreAccessError), engine.connect() as connection:
        return _revision(connection)


def require_newest(engine: Engine) -> None:
    """Refuse a database of another schema than this version's.

    Raises:
        NoLabelStoreError: The database is empty.
        StoreAccessError: It is not a database or not a label store, or has another schema.
    """
    schema = schema_of(engine)
    if schema is None:
        raise NoLabelStoreError(
            f"{address(engine)} is an empty database, not yet a label store; make it one with: "
            "trappm store upgrade"
        )
    if schema != REVISIONS[-1]:
        raise StoreAccessError(
            f"{address(engine)} was written by an older TraPPM (schema {schema}, while this "
            f"version reads {REVISIONS[-1]}); bring it up to date with: trappm store upgrade"
        )


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
            if getattr(error.orig, "sqlite_errorname", "") != "SQLITE_CORRUPT":
                raise
            return [str(error.orig)]
    damage = [" ".join(line.split()) for line in lines if line != "ok"]
    return damage + [
        f"row {row} of {table} refers to a row of {parent} that does not exist"
        for table, row, parent, _ in orphans
    ]


def _revision(connection: Connection) -> str | None:
    """Return the schema of the database, or None if it is empty."""
    tables = inspect(connection).get_table_names()
    if not tables:
        return None
    revision: str | None = None
    if _VERSION_TABLE in tables:
        revision = connection.scalar(text(f"SELECT version_num FROM {_VERSION_TABLE}"))  # noqa: S608
    where = address(connection.engine)
    if revision is None:
        raise StoreAccessError(
            f"{where} is a database of something else (it has a table {tables[0]!r}); give the "
            "label store one of its own"
        )
    if revision in _OLD_REVISIONS:
        raise StoreAccessError(
            f"{where} was written by TraPPM 0.2.0 or earlier (schema {revision}). Export it with "
            "that version (trappm labels export all.jsonl --outcome any), then import the file "
            "into a new store (trappm labels import all.jsonl)"
        )
    if revision not in REVISIONS:
        raise StoreAccessError(
            f"{where} was written by a newer TraPPM (schema {revision}, while this version knows "
            f"{REVISIONS[-1]}); update TraPPM"
        )
    return revision


def _run_alembic(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "trappm.store:migrations")
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, REVISIONS[-1])
