"""Loads a backup into an empty database: the way back, and from SQLite to PostgreSQL.

All rows are copied in one transaction, with their ids, so that whatever names a label or a campaign
by its id still means the same. Nothing is ever merged: what holds rows already is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, Integer, func, select, text

from trappm.profiler.errors import InputError
from trappm.store.db.engine import address, make_engine, store_errors
from trappm.store.db.migrate import require_newest, schema_of, upgrade
from trappm.store.db.models import METADATA
from trappm.store.db.read_only import engine_to_read
from trappm.store.maintenance.backup import copy_tables, row_counts


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Where a backup was loaded into."""

    address: str
    """Without a password."""
    schema: str
    rows: int
    """In all tables together."""


def restore(file: Path, url: str) -> Restored:
    """Loads a backup, or any SQLite label store, into the empty database at this SQLAlchemy URL.

    Raises:
        InputError: there is no such file, or the database holds a store with rows in it.
        StoreError: either cannot be read or has another schema than this version's, or the database
            refused; no row was written then.
    """
    if not file.is_file():
        raise InputError(f"there is no backup {file}; make one with: trappm store backup")
    source = engine_to_read(URL.create("sqlite", database=str(file)).render_as_string())
    target = make_engine(url)
    try:
        require_newest(source)
        _require_empty(target)
        upgrade(target)
        with (
            store_errors(source),
            source.connect() as reading,
            store_errors(target),
            target.begin() as writing,
        ):
            copy_tables(reading, writing)
            if target.dialect.name == "postgresql":
                _go_on_numbering(writing)
            rows = sum(row_counts(writing).values())
        return Restored(address=address(target), schema=str(schema_of(target)), rows=rows)
    finally:
        source.dispose()
        target.dispose()


def _require_empty(engine: Engine) -> None:
    if schema_of(engine) is None:
        return
    require_newest(engine)
    with store_errors(engine), engine.connect() as connection:
        rows = sum(row_counts(connection).values())
    if rows:
        raise InputError(
            f"{address(engine)} holds a label store with {rows:,} rows, and nothing is merged into "
            "it; name an empty database, or bring labels over with: trappm labels export, import"
        )


def _go_on_numbering(connection: Connection) -> None:
    """PostgreSQL counts ids by itself, and does not see those that rows came with."""
    for table in METADATA.sorted_tables:
        (*others, key) = table.primary_key
        if others or not isinstance(key.type, Integer):
            continue
        highest = connection.scalar(select(func.max(key)))
        sequence = connection.scalar(select(func.pg_get_serial_sequence(table.name, key.name)))
        if highest is not None:
            connection.execute(text("SELECT setval(:sequence, :highest)"), {
                "sequence": sequence, "highest": highest,
            })  # fmt: skip
