"""One reading SQL statement: in a transaction that only reads, with limits of time, rows and bytes.

A statement sees as `labels` a flat view of the labels, with their configurations and devices, in
the columns of `trappm labels query`. On SQLite it is a temporary view of the connection, on
PostgreSQL, where a reader may make none, a common table expression around the statement.

SQLite: the file is opened for reading (mode=ro), `PRAGMA query_only`, one statement, and an
authorizer that allows only reading, so that ATTACH, PRAGMA and VACUUM INTO do not exist. It runs
in a process of its own, with limits, that is killed when time is up (`store.query.sqlite_reader`).

PostgreSQL (14 or later): a READ ONLY transaction, as the role `pg_read_all_data` where the
connection may become it, and one statement, which has to be a SELECT or VALUES since a cursor is
declared for it. The driver takes a row whole, however large, so the server weighs rows before they
are fetched. Whoever runs it holds the credentials, so functions that reach around a transaction are
theirs to call.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from trappm.profiler.errors import InputError, one_line
from trappm.store.db.engine import store_errors
from trappm.store.db.models import LabelRow
from trappm.store.db.read_only import engine_to_read
from trappm.store.query import sqlite_reader
from trappm.store.query.filters import LABEL_COLUMNS, Columns, joined
from trappm.store.query.sqlite_reader import MAX_ANSWER_BYTES

if TYPE_CHECKING:
    import pandas as pd
    from psycopg import Connection
    from sqlalchemy import URL, Engine

TIMEOUT_S = 30.0
MAX_ROWS = 10_000
"""By default; what a statement gives beyond is not fetched."""

_PORTION = 200
"""Rows fetched at once at most; one after another where they are large."""
_LARGE_BYTES = 1 << 20

_UNKNOWN_COLUMN = "no such column"
"""Begins SQLite's refusals of unknown columns, and ours of PostgreSQL's."""

_CURSOR = "answer"
_WEIGH = f"""
DO $$
DECLARE {_CURSOR} refcursor := '{_CURSOR}'; following record; size bigint; weight bigint := 0;
BEGIN
  FOR i IN 1..{{rows}} LOOP
    FETCH {_CURSOR} INTO following;
    EXIT WHEN NOT FOUND;
    size := pg_column_size(following);
    IF weight + size <= {MAX_ANSWER_BYTES} THEN  -- it may be compressed
      size := greatest(size, octet_length(following::text));
    END IF;
    weight := weight + size;
    IF weight > {MAX_ANSWER_BYTES} THEN
      RAISE EXCEPTION 'it gives more than {MAX_ANSWER_BYTES >> 20} MiB';
    END IF;
  END LOOP;
  MOVE ABSOLUTE {{begin}} FROM {_CURSOR};
END $$
"""
"""Refuses the next rows if they are too large together, else goes back to before them."""

FLAT_COLUMNS: Columns = {
    **LABEL_COLUMNS,
    **{
        name: getattr(LabelRow, name)
        for name in LabelRow.__table__.columns.keys()  # noqa: SIM118
        if name not in LABEL_COLUMNS
    },
}
"""The columns of `labels`: those that `trappm labels query` shows, then the others of the table."""

_Answer = tuple[list[str], Sequence[Sequence[Any]]]


def query_sql(
    url: URL, statement: str, *, limit: int = MAX_ROWS, timeout_s: float = TIMEOUT_S
) -> tuple[pd.DataFrame, bool]:
    """The rows that one reading SQL statement returns; see `store.Store.query_sql`."""
    if "\0" in statement:  # where the server would take it to end
        raise _refused("it has a NUL in it")
    engine = engine_to_read(url.render_as_string(hide_password=False))
    query = _query_sqlite if engine.dialect.name == "sqlite" else _query_postgresql
    try:
        names, rows = query(engine, statement, limit + 1, timeout_s)
    finally:
        engine.dispose()
    return _frame(names, rows[:limit]), len(rows) > limit


def _query_sqlite(engine: Engine, statement: str, max_rows: int, timeout_s: float) -> _Answer:
    (file,), _ = engine.dialect.create_connect_args(engine.url)
    question = {
        "file": file, "views": {"labels": _flat_labels(engine, schema="main")},
        "statement": statement, "max_rows": max_rows, "timeout_s": timeout_s,
    }  # fmt: skip
    try:
        answer = subprocess.run(
            [sys.executable, "-IS", sqlite_reader.__file__],
            input=json.dumps(question).encode(),
            capture_output=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise _took_too_long(timeout_s) from error
    lines = [json.loads(line) for line in answer.stdout.splitlines()]
    if answer.returncode or not lines:
        raise _refused(f"it ended the process that answers (status {answer.returncode})")
    if isinstance(lines[-1], dict):
        raise _refused(lines[-1]["refused"])
    return lines[0], lines[1:]


def _query_postgresql(engine: Engine, statement: str, max_rows: int, timeout_s: float) -> _Answer:
    with store_errors(engine), closing(engine.raw_connection()) as connection:
        driver: Any = connection.driver_connection
        inner = statement.rstrip().rstrip(";")
        # In parentheses it may have a WITH of its own. In the expression, `labels` is the table.
        flat = f"WITH labels AS ({_flat_labels(engine)}) SELECT * FROM (\n{inner}\n) AS answer"  # noqa: S608
        return _query_server(driver, flat, max_rows, timeout_s)


def _flat_labels(engine: Engine, schema: str | None = None) -> str:
    """The SELECT of the flat view; a schema keeps it from referring to the view itself."""
    query = joined(LabelRow, [column.label(name) for name, column in FLAT_COLUMNS.items()])
    options: dict[str, Any] = {}
    if schema is not None:
        options = {"schema_translate_map": {None: schema}, "render_schema_translate": True}
    return str(query.compile(engine, **options))


def _query_server(
    connection: Connection[Any], statement: str, max_rows: int, timeout_s: float
) -> _Answer:
    import psycopg

    try:
        connection.read_only = True
        _begin(connection, timeout_s)
        with psycopg.ServerCursor(connection, _CURSOR, scrollable=True) as cursor:
            deadline = time.monotonic() + timeout_s
            cursor.execute(statement)
            names = [column.name for column in cursor.description or ()]
            return names, _fetched(connection, cursor, max_rows, deadline)
    except psycopg.errors.QueryCanceled as error:
        raise _took_too_long(timeout_s) from error
    except psycopg.errors.UndefinedColumn as error:
        raise _refused(f"{_UNKNOWN_COLUMN}: {one_line(error)}") from error
    except (psycopg.DataError, psycopg.ProgrammingError, psycopg.errors.InternalError) as error:
        raise _refused(one_line(error)) from error
    except (psycopg.NotSupportedError, psycopg.IntegrityError, ValueError) as error:
        raise _refused(one_line(error)) from error
    except psycopg.errors.ProtocolViolation as error:  # it has parameters
        raise _refused(one_line(error)) from error
    finally:
        connection.rollback()


def _fetched(
    connection: Connection[Any], cursor: Any, max_rows: int, deadline: float
) -> list[tuple[Any, ...]]:
    """The rows, a few at a time, so that they do not fill the memory before they are counted.

    The limit of time is set anew each time: a row may have changed it (`set_config`).
    """
    rows: list[tuple[Any, ...]] = []
    size, portion = 0, 1
    while len(rows) < max_rows:
        portion = min(portion, max_rows - len(rows))
        _limit_time(connection, deadline - time.monotonic())
        connection.execute(_WEIGH.format(begin=len(rows), rows=portion))
        _limit_time(connection, deadline - time.monotonic())
        fetched = cursor.fetchmany(portion)
        rows += fetched
        fetched_size = sum(_size(value) for row in fetched for value in row)
        size += fetched_size
        if size > MAX_ANSWER_BYTES:
            raise _refused(f"it gives more than {MAX_ANSWER_BYTES >> 20} MiB")
        if len(fetched) < portion:
            break
        portion = min(2 * portion, _PORTION) if fetched_size < _LARGE_BYTES else 1
    return rows


def _size(value: Any) -> int:
    """Bytes of a value at least; what is nested is weighed as it is shown."""
    if isinstance(value, str | bytes | memoryview):
        return len(value)
    return len(str(value)) if isinstance(value, dict | list) else 8


def _begin(connection: Connection[Any], timeout_s: float) -> None:
    """A transaction that ends by itself, of a role that may only read if there can be one."""
    from psycopg.errors import InsufficientPrivilege

    _limit_time(connection, timeout_s)
    try:
        with connection.transaction():
            connection.execute("SET LOCAL ROLE pg_read_all_data")
    except InsufficientPrivilege:
        pass  # it stays who it is; a superuser never comes here


def _limit_time(connection: Connection[Any], seconds: float) -> None:
    """For the next commands of this transaction; 0 would mean that there is no limit."""
    connection.execute(f"SET LOCAL statement_timeout = {max(1, round(seconds * 1000))}")


def _refused(reason: str) -> InputError:
    hint = "answered is one SELECT or VALUES that only reads"
    if reason.startswith(_UNKNOWN_COLUMN):
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
    if isinstance(value, bytes | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, dict | list):
        return json.dumps(value)
    return float(value) if isinstance(value, Decimal) else value
