"""One SQL statement on a connection that the database makes read-only, with two limits.

A statement sees `labels` as a flat view: labels with their configurations and devices, in the
columns of `trappm labels query`. On SQLite it is a temporary view of the connection. On PostgreSQL,
where a reader cannot create one, it is a common table expression around the statement.

SQLite opens the file with mode=ro and `PRAGMA query_only`. PostgreSQL runs the statement in a READ
ONLY transaction. This prevents accidents only: the user has the file or the password anyway.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from trappm.profiler.errors import InputError, one_line
from trappm.store.engine import engine_to_read, error_code, store_errors
from trappm.store.labels import LABEL_COLUMNS, Columns, join_labels
from trappm.store.schema import LabelRow

if TYPE_CHECKING:
    import pandas as pd
    from sqlalchemy import URL, Engine

TIMEOUT_S = 30.0
MAX_ROWS = 10_000
"""Default; further rows are not fetched."""
_INSTRUCTIONS = 1000
"""SQLite's instructions between two looks at the clock."""
_TIMED_OUT = ("SQLITE_INTERRUPT", "57014")
_NO_COLUMN = "42703"

FLAT_COLUMNS: Columns = {
    **LABEL_COLUMNS,
    **{
        name: getattr(LabelRow, name)
        for name in LabelRow.__table__.columns.keys()  # noqa: SIM118
        if name not in LABEL_COLUMNS
    },
}
"""Columns of `labels`: those of `trappm labels query`, then the others of the table."""


def query_sql(
    url: URL, statement: str, *, limit: int = MAX_ROWS, timeout_s: float = TIMEOUT_S
) -> tuple[pd.DataFrame, bool]:
    """Return the rows of one reading SQL statement, and whether there are more than the limit.

    Bytes are shown as their number, and JSON as text. A second column of one name is `name_2`.

    Raises:
        InputError: The database refuses the statement, or it takes too long.
        StoreError: The database cannot be reached.
    """
    engine = engine_to_read(url.render_as_string(hide_password=False))
    dbapi = engine.dialect.loaded_dbapi
    begin = _begin_sqlite if engine.dialect.name == "sqlite" else _begin_postgresql
    try:
        with store_errors(engine), closing(engine.raw_connection()) as connection:
            try:
                cursor = begin(engine, connection.driver_connection, statement, limit, timeout_s)
                if cursor.description is None:
                    raise InputError("the SQL returns no rows; give one SELECT or VALUES")
                names = [column[0] for column in cursor.description]
                rows = cursor.fetchmany(limit + 1)
            except (dbapi.Error, dbapi.Warning, ValueError, OverflowError, MemoryError) as error:
                if isinstance(error, dbapi.OperationalError) and not error_code(error):
                    raise  # the connection is lost
                raise _refusal(error, timeout_s) from error
    finally:
        engine.dispose()
    return _frame(names, rows[:limit]), len(rows) > limit


def _begin_sqlite(engine: Engine, driver: Any, statement: str, _: int, timeout_s: float) -> Any:
    """Execute a statement that reads; rows are fetched from the cursor within the time."""
    # A temporary view belongs to the connection, not to the file.
    driver.execute("PRAGMA query_only = OFF")
    driver.execute(f"CREATE TEMP VIEW labels AS {_flat_labels(engine, schema='main')}")
    driver.execute("PRAGMA query_only = ON")
    deadline = time.monotonic() + timeout_s
    driver.set_progress_handler(lambda: time.monotonic() > deadline, _INSTRUCTIONS)
    return driver.execute(statement)


def _begin_postgresql(
    engine: Engine, driver: Any, statement: str, limit: int, timeout_s: float
) -> Any:
    """Execute a statement that reads, as a subquery of at most one more row than the limit."""
    driver.read_only = True
    driver.execute(f"SET LOCAL statement_timeout = {max(1, round(timeout_s * 1000))}")
    inner = statement.rstrip().rstrip(";")
    query = (
        f"WITH labels AS ({_flat_labels(engine)}) "  # noqa: S608
        f"SELECT * FROM (\n{inner}\n) AS result LIMIT {limit + 1}"
    )
    return driver.execute(query, prepare=True)  # PostgreSQL prepares one statement only


def _flat_labels(engine: Engine, schema: str | None = None) -> str:
    """Return the SELECT of the flat view; a schema keeps it from referring to itself."""
    query = join_labels(LabelRow, [column.label(name) for name, column in FLAT_COLUMNS.items()])
    options: dict[str, Any] = {}
    if schema is not None:
        options = {"schema_translate_map": {None: schema}, "render_schema_translate": True}
    return str(query.compile(engine, **options))


def _refusal(error: BaseException, timeout_s: float) -> InputError:
    reason, code = one_line(error), error_code(error)
    if code in _TIMED_OUT:
        return InputError(f"the SQL was stopped after {timeout_s:g} s; ask for less")
    hint = "give one SELECT or VALUES that only reads"
    if code == _NO_COLUMN or reason.startswith("no such column"):
        hint = f"labels has the columns {', '.join(FLAT_COLUMNS)}"
    return InputError(f"the SQL is refused: {reason}; {hint}")


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
