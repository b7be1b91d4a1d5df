"""Answers one question in SQL about a SQLite file; a script, for a process of its own.

SQLite looks at the clock between its instructions only, and one call of a function is one
instruction, which may go over megabytes for minutes. So `store.query.sql` has the question
answered here, in a process that it can kill, and that has a bound of its own for memory, files and
CPU time. It needs nothing but the standard library, so that it starts in a few hundredths of a
second.

    python -IS sqlite_reader.py < question

where the question is a JSON object of file, views (SELECTs by name), statement, max_rows and
timeout_s, writes JSON, one value a line: the names of the columns, then each row; an object with
the reason of a refusal.
"""

from __future__ import annotations

import json
import math
import resource
import sqlite3
import sys
from collections.abc import Iterator
from typing import Any

MAX_VALUE_BYTES = 64 << 20
"""No string or blob that a statement builds may be longer."""
MAX_ANSWER_BYTES = 64 << 20
"""Of all rows together."""
MAX_MEMORY_BYTES = 1 << 30
MAX_FILE_BYTES = 64 << 20
"""Of the index that SQLite may make beside a database; what it sorts stays in memory."""

_READS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}


class _RefusedError(Exception):
    pass


def main() -> None:
    question = json.load(sys.stdin)
    _limit(resource.RLIMIT_AS, MAX_MEMORY_BYTES)
    _limit(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
    _limit(resource.RLIMIT_CPU, math.ceil(question["timeout_s"]) + 1)  # should nobody kill it
    size = 0
    try:
        for value in _answer(question):
            line = json.dumps(value)
            size += len(line)
            if size > MAX_ANSWER_BYTES:
                raise _RefusedError(f"it gives more than {MAX_ANSWER_BYTES >> 20} MiB")
            sys.stdout.write(line + "\n")
    except MemoryError:
        _refuse(f"it takes more than {MAX_MEMORY_BYTES >> 30} GiB of memory")
    except (_RefusedError, sqlite3.Error, sqlite3.Warning, OverflowError, ValueError) as error:
        _refuse(" ".join(str(error).split()))


def _answer(question: dict[str, Any]) -> Iterator[list[Any]]:
    """The names of the columns, then the rows."""
    connection = sqlite3.connect(question["file"], uri=True, isolation_level=None)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    connection.execute("PRAGMA temp_store = MEMORY")
    for name, select in question["views"].items():  # of this connection, not of the file
        connection.execute(f"CREATE TEMP VIEW {name} AS {select}")
    connection.execute("PRAGMA query_only = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.set_authorizer(_authorize)
    cursor = connection.execute(question["statement"])
    if cursor.description is None:
        raise _RefusedError("it gives no rows")
    yield [column[0] for column in cursor.description]
    for _, row in zip(range(question["max_rows"]), cursor, strict=False):
        yield [f"<{len(x)} bytes>" if isinstance(x, bytes) else x for x in row]


def _authorize(action: int, _first: str | None, second: str | None, *_: str | None) -> int:
    allowed = action in _READS and second != "load_extension"
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard < 0 else min(most, hard), hard))


def _refuse(reason: str) -> None:
    sys.stdout.write(json.dumps({"refused": reason}) + "\n")


if __name__ == "__main__":
    main()
