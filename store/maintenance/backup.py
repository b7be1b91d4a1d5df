"""A copy of the whole store in one SQLite file, as it was at one point in time.

SQLite is copied page by page inside one reading transaction, which in WAL mode hinders no writer
and is not disturbed by any. PostgreSQL is read row by row in one REPEATABLE READ transaction into a
new SQLite store, so that the copy needs no server and can be used like any other store. A copy is
made under another name, checked, synced to disk, and only then given its own; nothing that is there
is ever overwritten.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, func, inspect, select

from trappm.profiler.errors import InputError, StoreError
from trappm.profiler.files.whole_file import made_whole
from trappm.store.db.engine import make_engine, store_errors
from trappm.store.db.migrate import require_newest, schema_of, upgrade
from trappm.store.db.models import METADATA
from trappm.store.db.read_only import engine_to_read

_PAGES = 4096
"""So many are copied between looks at whether somebody wants it to stop."""
_ROWS = 1000


@dataclass(frozen=True, kw_only=True)
class BackUp:
    """A copy that was made and found good."""

    file: str
    schema: str
    """The schema of the copy: that of the store."""
    size_bytes: int
    rows: int
    """In all tables together."""


def back_up(url: str, file: Path) -> BackUp:
    """Copies the label store at this SQLAlchemy URL into a new SQLite file; others may write on.

    Raises:
        InputError: there is no store, or something stands where the copy is to go, or nothing can
            be written there.
        StoreError: the store cannot be read or is damaged; nothing is left of the copy.
    """
    file = file.absolute()
    engine = engine_to_read(url)
    try:
        schema = schema_of(engine)
        if schema is None or engine.dialect.name != "sqlite":
            require_newest(engine)  # an older schema on PostgreSQL has other columns than ours
        with _made_at(file) as part:
            if engine.dialect.name == "sqlite":
                _copy_pages(engine, part)
            else:
                _copy_rows(engine, part)
            rows = _verify(part, str(schema))
    finally:
        engine.dispose()
    return BackUp(file=str(file), schema=str(schema), size_bytes=file.stat().st_size, rows=rows)


@contextmanager
def _made_at(file: Path) -> Iterator[Path]:
    """A path to write to, whose file becomes this one if nothing goes wrong."""
    taken = InputError(f"{file} is there already and is not overwritten; name a new file")
    if os.path.lexists(file):
        raise taken
    try:
        with made_whole(file, mode=0o600, replace=False) as part:
            yield part
    except FileExistsError as error:
        raise taken from error
    except OSError as error:
        raise InputError(f"the backup {file} cannot be written: {error.strerror}") from error


def _copy_pages(engine: Engine, part: Path) -> None:
    with (
        store_errors(engine),
        closing(engine.raw_connection()) as connection,
        closing(sqlite3.connect(part, isolation_level=None)) as copy,
    ):
        source: Any = connection.driver_connection
        source.execute("BEGIN")
        source.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()  # now it is this moment
        source.backup(copy, pages=_PAGES)
        source.execute("ROLLBACK")
        # One file alone, without a log beside it: readable wherever it is taken.
        copy.execute("PRAGMA journal_mode = DELETE")


def _copy_rows(engine: Engine, part: Path) -> None:
    copy = make_engine(URL.create("sqlite", database=str(part)).render_as_string())
    try:
        upgrade(copy)
        with store_errors(engine), engine.connect() as source:
            source.execution_options(isolation_level="REPEATABLE READ")
            with store_errors(copy), copy.begin() as target:
                copy_tables(source, target)
    finally:
        copy.dispose()
    with closing(sqlite3.connect(part)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")


def copy_tables(source: Connection, target: Connection) -> None:
    """Copies every row of every table between two stores of the newest schema."""
    for table in METADATA.sorted_tables:
        rows = source.execute(select(table).execution_options(yield_per=_ROWS))
        for part in rows.mappings().partitions():
            target.execute(table.insert(), [dict(row) for row in part])


def _verify(part: Path, schema: str) -> int:
    """The number of rows in a copy that opens, is whole, and has this schema."""
    engine = engine_to_read(URL.create("sqlite", database=str(part)).render_as_string())
    try:
        with store_errors(engine), engine.connect() as connection:
            problems = [line for (line,) in connection.exec_driver_sql("PRAGMA integrity_check")]
            if problems != ["ok"] or schema_of(engine) != schema:
                raise StoreError(
                    f"the copy of the label store is not whole ({' '.join(problems[0].split())}); "
                    "see what is wrong with the store itself: trappm store check"
                )
            return sum(row_counts(connection).values())
    finally:
        engine.dispose()


def row_counts(connection: Connection) -> dict[str, int]:
    """Rows of each of our tables that is there."""
    present = set(inspect(connection).get_table_names())
    return {
        table.name: connection.scalar(select(func.count()).select_from(table)) or 0
        for table in METADATA.sorted_tables
        if table.name in present
    }
