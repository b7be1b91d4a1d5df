"""The version of the schema: creating, upgrading, checking and refusing a database.

There is one schema, that of `store.schema`. A database notes its version in a table of the name
that Alembic uses, so that Alembic can take over when a later version changes the schema.
"""

from __future__ import annotations

from sqlalchemy import Connection, Engine, inspect, select, text
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
from trappm.store.schema import METADATA, SCHEMA, VERSION_TABLE

_POSTGRESQL_LOCK = 5_784_113_902
"""An arbitrary number: the advisory lock of the process that creates a store in PostgreSQL."""


def upgrade_store(url: str) -> str | None:
    """Bring the label store at an SQLAlchemy URL to this version's schema, in one transaction.

    Returns:
        The schema before; None if the database was empty.

    Raises:
        InputError: There is no such SQLite file, or it is not a label store of this version.
        StoreError: The database refused; it is unchanged.
    """
    engine_to_read(url).dispose()  # which creates no file
    engine = make_engine(url)
    try:
        before = schema_of(engine)
        if before is None:
            create_tables(engine)
    finally:
        engine.dispose()
    return before


def create_tables(engine: Engine) -> None:
    """Make an empty database a label store, in one transaction.

    Raises:
        StoreAccessError: It is not a database or not a label store, or cannot be written.
    """
    with store_errors(engine, StoreAccessError), writer_of(engine).begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_POSTGRESQL_LOCK})"))
        if _schema(connection) is None:  # another process may have been first
            METADATA.create_all(connection)
            connection.execute(VERSION_TABLE.insert().values(version_num=SCHEMA))


def schema_of(engine: Engine) -> str | None:
    """Return the schema of a database, which is this version's, or None if it is empty.

    Raises:
        StoreAccessError: It is not a database or not a label store, or has another schema.
    """
    with store_errors(engine, StoreAccessError), engine.connect() as connection:
        return _schema(connection)


def require_tables(engine: Engine) -> None:
    """Refuse a database that is not a label store of this version.

    Raises:
        NoLabelStoreError: The database is empty.
        StoreAccessError: It is not a database or not a label store, or has another schema.
    """
    if schema_of(engine) is None:
        raise NoLabelStoreError(
            f"{address(engine)} is an empty database, not yet a label store; make it one with: "
            "trappm store upgrade"
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


def _schema(connection: Connection) -> str | None:
    tables = inspect(connection).get_table_names()
    if not tables:
        return None
    schema: str | None = None
    if VERSION_TABLE.name in tables:
        schema = connection.scalar(select(VERSION_TABLE.c.version_num))
    where = address(connection.engine)
    if schema is None:
        raise StoreAccessError(
            f"{where} is a database of something else (it has a table {tables[0]!r}); give the "
            "label store one of its own"
        )
    if schema < SCHEMA:
        raise StoreAccessError(
            f"{where} was written by TraPPM 0.2.0 or earlier (schema {schema}). Export it with "
            "that version (trappm labels export all.jsonl --outcome any), then import the file "
            "into a new store (trappm labels import all.jsonl)"
        )
    if schema > SCHEMA:
        raise StoreAccessError(
            f"{where} was written by a newer TraPPM (schema {schema}, while this version knows "
            f"{SCHEMA}); update TraPPM"
        )
    return schema
