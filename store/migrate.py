"""The version of a database's schema: making a store, upgrading it, and refusing others.

A new store has the tables of `store.schema`. An older one is upgraded by Alembic, which runs the
revisions in `store/migrations/versions`. The version is in Alembic's table in both cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, inspect, select, text

from trappm.profiler.errors import StoreAccessError
from trappm.store.engine import address, database_time, store_errors, writer_of
from trappm.store.schema import METADATA, SCHEMA, VERSION_TABLE, CampaignRow

if TYPE_CHECKING:
    from alembic.config import Config

ALIVE_S = 120.0
"""Age of a campaign's last heartbeat, in seconds, below which its process may be alive."""

_POSTGRESQL_LOCK = 5_784_113_902
"""An arbitrary number: the advisory lock of the process that makes or upgrades a store."""


def has_tables(engine: Engine) -> bool:
    """Return whether a database is a label store of this version, and not empty.

    Raises:
        StoreAccessError: It is not a database or not a label store, or has another schema.
    """
    schema = schema_of(engine)
    if schema in {None, SCHEMA}:
        return schema is not None
    raise StoreAccessError(
        f"{address(engine)} has schema {schema}, while this version of TraPPM has {SCHEMA}; "
        "upgrade it with: trappm store upgrade"
    )


def schema_of(engine: Engine) -> str | None:
    """Return the schema of a label store that is current or can be upgraded; None if it is empty.

    Raises:
        StoreAccessError: It is not a database or not a label store, or has another schema.
    """
    with store_errors(engine, opening=True), engine.connect() as connection:
        return _schema(connection)


def upgrade(engine: Engine) -> str | None:
    """Make an empty database a label store, or upgrade an older one, in one transaction.

    Returns:
        The schema before; None if the database was empty.

    Raises:
        StoreAccessError: It is not a database or not a label store that can be upgraded, or cannot
            be written; or a campaign runs. It is unchanged.
    """
    if schema_of(engine) == SCHEMA:
        return SCHEMA
    with (
        store_errors(engine, opening=True),
        writer_of(engine).connect() as connection,
        _without_foreign_keys(connection),
        connection.begin(),
    ):
        if engine.dialect.name == "postgresql":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_POSTGRESQL_LOCK})"))
        schema = _schema(connection)  # another process may have been first
        if schema is None:
            METADATA.create_all(connection)
            connection.execute(VERSION_TABLE.insert().values(version_num=SCHEMA))
        elif schema != SCHEMA:
            _refuse_while_campaigns_run(connection)
            run_revisions(connection)
    return schema


def run_revisions(connection: Connection) -> None:
    """Run the revisions after that of the database within the connection's transaction.

    Raises:
        StoreAccessError: A row of SQLite refers to a row that does not exist.
    """
    from alembic import command

    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    if connection.dialect.name == "sqlite":
        orphan = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
        if orphan is not None:
            raise StoreAccessError(
                f"{address(connection.engine)} is damaged: a row of {orphan[0]} refers to a row of "
                f"{orphan[2]} that does not exist. It was not upgraded; restore a backup"
            )


def _refuse_while_campaigns_run(connection: Connection) -> None:
    """Raise StoreAccessError if a process writes for a campaign: it has the earlier version."""
    now = database_time(connection)
    query = select(CampaignRow.id, CampaignRow.owner_seen_at)
    for campaign_id, seen_at in connection.execute(query.where(CampaignRow.owner_id.is_not(None))):
        if (now - datetime.fromisoformat(str(seen_at))).total_seconds() < ALIVE_S:
            raise StoreAccessError(
                f"campaign {campaign_id} runs with the version of TraPPM that wrote "
                f"{address(connection.engine)}; pause it there, with: "
                f"trappm campaign pause {campaign_id}"
            )


@contextmanager
def _without_foreign_keys(connection: Connection) -> Iterator[None]:
    """Let SQLite replace a table that others refer to, which is how it changes constraints.

    The setting is of the connection, and has no effect within a transaction.
    """
    driver = connection.connection.driver_connection
    if connection.dialect.name != "sqlite" or driver is None:
        yield
        return
    driver.execute("PRAGMA foreign_keys = OFF")
    try:
        yield
    finally:
        driver.execute("PRAGMA foreign_keys = ON")


def _schema(connection: Connection) -> str | None:
    tables = inspect(connection).get_table_names()
    if not tables:
        return None
    schema: str | None = None
    if VERSION_TABLE.name in tables:
        schema = connection.scalar(select(VERSION_TABLE.c.version_num))
    if schema == SCHEMA:
        return schema
    where = address(connection.engine)
    if schema is None:
        raise StoreAccessError(
            f"{where} is a database of something else (it has a table {tables[0]!r}); give the "
            "label store one of its own"
        )
    from alembic.script import ScriptDirectory

    revisions = [each.revision for each in ScriptDirectory.from_config(_config()).walk_revisions()]
    if schema > SCHEMA:
        raise StoreAccessError(
            f"{where} was written by a newer version of TraPPM (schema {schema}, while this one "
            f"has {SCHEMA}); update TraPPM"
        )
    if schema not in revisions:
        raise StoreAccessError(
            f"{where} has schema {schema}, which is too old to be upgraded (from {revisions[-1]} "
            "on). Export the store with the version that wrote it (trappm labels export all.jsonl "
            "--outcome any), and import the file into a new one (trappm labels import all.jsonl)"
        )
    return schema


def _config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "trappm.store:migrations")
    config.set_main_option("path_separator", "os")
    return config
