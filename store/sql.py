"""One SQL statement on a connection that can only read, with a time limit and a row limit.

A statement sees `labels` as a flat view: labels with their configurations and devices, in the
columns of `trappm labels query`. On SQLite it is a temporary view of the connection. On PostgreSQL,
where a reader cannot create one, it is a common table expression around the statement.

SQLite: The file is opened with mode=ro and `PRAGMA query_only`. An authorizer denies PRAGMA and
ATTACH. A progress handler stops the statement when its time is up. It runs between calls of SQL
functions, so values are limited in size, but a row of many slow calls can exceed the time limit.

PostgreSQL: A READ ONLY transaction with a statement timeout, as the role `pg_read_all_data` if the
connection may become it. The statement is a subquery of ours with a row limit. Functions that the
role may call are available to it, such as those that read settings.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from trappm.profiler.errors import InputError, one_line
from trappm.store.engine import engine_to_read, store_errors
from trappm.store.labels import LABEL_COLUMNS, Columns, joined
from trappm.store.schema import LabelRow

if TYPE_CHECKING:
    import pandas as pd
    from sqlalchemy import URL, Engine

TIMEOUT_S = 30.0
MAX_ROWS = 10_000
"""Default; further rows are not fetched."""
_MAX_VALUE_BYTES = 1 << 20
"""Limit of a value or a row on SQLite; `instr` takes 30 s for two such values."""
_MAX_RESULT_BYTES = 64 << 20
_INSTRUCTIONS = 1000
"""SQLite's instructions between two looks at the clock."""

FLAT_COLUMNS: Columns = {
    **LABEL_COLUMNS,
    **{
        name: getattr(LabelRow, name)
        for name in LabelRow.__table__.columns.keys()  # noqa: SIM118
        if name not in LABEL_COLUMNS
    },
}
"""Columns of `labels`: those of `trappm labels query`, then the others of the table."""

_DENIED = frozenset({sqlite3.SQLITE_PRAGMA, sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH})
"""Actions that a connection in mode=ro would still perform, such as a checkpoint."""

_Result = tuple[list[str], Sequence[Sequence[Any]]]


def query_sql(
    url: URL, statement: str, *, limit: int = MAX_ROWS, timeout_s: float = TIMEOUT_S
) -> tuple[pd.DataFrame, bool]:
    """Return the rows of one reading SQL statement, and whether there are more than the limit.

    Bytes are shown as their number, and JSON as text. A second column of one name is `name_2`.

    Raises:
        InputError: The database does not understand the statement, the statement does more than
            read, or it takes too long.
        StoreError: The database cannot be reached.
    """
    if "\0" in statement:  # SQLite and PostgreSQL would take it for the end
        raise _refused("it contains a NUL character")
    engine = engine_to_read(url.render_as_string(hide_password=False))
    query = _query_sqlite if engine.dialect.name == "sqlite" else _query_postgresql
    try:
        names, rows = query(engine, statement, limit + 1, timeout_s)
    finally:
        engine.dispose()
    return _frame(names, rows[:limit]), len(rows) > limit


def _query_sqlite(engine: Engine, statement: str, max_rows: int, timeout_s: float) -> _Result:
    (file,), _ = engine.dialect.create_connect_args(engine.url)
    deadline = time.monotonic() + timeout_s
    with closing(sqlite3.connect(file, uri=True, isolation_level=None)) as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        # A temporary view belongs to the connection, not to the file.
        connection.execute(f"CREATE TEMP VIEW labels AS {_flat_labels(engine, schema='main')}")
        connection.execute("PRAGMA query_only = ON")
        connection.set_authorizer(
            lambda action, *_: sqlite3.SQLITE_DENY if action in _DENIED else sqlite3.SQLITE_OK
        )
        connection.set_progress_handler(lambda: time.monotonic() > deadline, _INSTRUCTIONS)
        try:
            cursor = connection.execute(statement)
            if cursor.description is None:
                raise _refused("it returns no rows")
            names = [column[0] for column in cursor.description]
            return names, list(_bounded(itertools.islice(cursor, max_rows)))
        except MemoryError as error:
            raise _refused("it needs more memory than there is") from error
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorname", "") == "SQLITE_INTERRUPT":
                raise _took_too_long(timeout_s) from error
            raise _refused(one_line(error)) from error
        except (sqlite3.Warning, OverflowError, ValueError) as error:  # such as two statements
            raise _refused(one_line(error)) from error


def _bounded(rows: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """Yield rows; refuse a result whose texts and bytes exceed `_MAX_RESULT_BYTES`."""
    size = 0
    for row in rows:
        size += sum(len(value) for value in row if isinstance(value, str | bytes))
        if size > _MAX_RESULT_BYTES:
            raise _refused(f"its result exceeds {_MAX_RESULT_BYTES >> 20} MiB")
        yield row


def _query_postgresql(engine: Engine, statement: str, max_rows: int, timeout_s: float) -> _Result:
    import psycopg

    inner = statement.rstrip().rstrip(";")
    # As a subquery the statement can have a WITH of its own, and it cannot be followed by another.
    query = (
        f"WITH labels AS ({_flat_labels(engine)}) "  # noqa: S608
        f"SELECT * FROM (\n{inner}\n) AS result LIMIT {max_rows}"
    )
    with store_errors(engine), closing(engine.raw_connection()) as connection:
        driver: Any = connection.driver_connection
        try:
            driver.read_only = True
            driver.execute(f"SET LOCAL statement_timeout = {max(1, round(timeout_s * 1000))}")
            try:
                with driver.transaction():
                    driver.execute("SET LOCAL ROLE pg_read_all_data")
            except psycopg.errors.InsufficientPrivilege:
                pass  # only a superuser or a member of the role can become it
            # A server-side cursor accepts one SELECT.
            with psycopg.ServerCursor(driver, "result") as cursor:
                cursor.execute(query)
                return [column.name for column in cursor.description or ()], cursor.fetchall()
        except psycopg.errors.QueryCanceled as error:
            raise _took_too_long(timeout_s) from error
        except psycopg.errors.UndefinedColumn as error:
            raise _refused(f"no such column: {one_line(error)}") from error
        except (psycopg.DatabaseError, ValueError) as error:
            if isinstance(error, psycopg.OperationalError) and error.sqlstate is None:
                raise  # the connection is lost
            raise _refused(one_line(error)) from error
        finally:
            driver.rollback()


def _flat_labels(engine: Engine, schema: str | None = None) -> str:
    """Return the SELECT of the flat view; a schema keeps it from referring to itself."""
    query = joined(LabelRow, [column.label(name) for name, column in FLAT_COLUMNS.items()])
    options: dict[str, Any] = {}
    if schema is not None:
        options = {"schema_translate_map": {None: schema}, "render_schema_translate": True}
    return str(query.compile(engine, **options))


def _refused(reason: str) -> InputError:
    hint = "give one SELECT or VALUES that only reads"
    if reason.startswith("no such column"):
        hint = f"labels has the columns {', '.join(FLAT_COLUMNS)}"
    return InputError(f"the SQL is refused: {reason}; {hint}")


def _took_too_long(timeout_s: float) -> InputError:
    return InputError(f"the SQL was stopped after {timeout_s:g} s; ask for less")


def _frame(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> pd.DataFrame:
    import pandas as pd

    seen: Counter[str] = Counter()
    columns = []
    for name in names:
        seen[name] += 1
        columns.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    data = [[_plain(value) for value in row] for row in rows]
    return pd.DataFrame(data, columns=columns, dtype=object)


def _plain(value: Any) -> Any:
    """Return a value that can be printed: the length of bytes, JSON as text."""
    if isinstance(value, bytes | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, dict | list):
        return json.dumps(value)
    return float(value) if isinstance(value, Decimal) else value
