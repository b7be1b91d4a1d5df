"""The result of a check of the store, and how the rows of a fault are counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, Table, TextClause, func, select

BY_HAND = "restore a backup, or mend the rows by hand after: trappm store backup"

_AS_TEXT = {"literal_binds": True, "render_postcompile": True}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One kind of fault in the store."""

    what: str
    count: int
    example: str
    """The key of the first row that has it, or the database's message."""
    mend: str
    sql: str | None = None
    """Lists the keys of all of them, in the dialect of the database."""


def faulty_rows(
    connection: Connection,
    table: Table,
    condition: ColumnElement[bool] | TextClause,
    *,
    what: str,
    mend: str,
) -> Iterator[Finding]:
    """A finding if there are rows of this table for which the condition holds."""
    count = connection.scalar(select(func.count()).select_from(table).where(condition)) or 0
    if count:
        key = list(table.primary_key.columns)
        rows = select(*key).where(condition).order_by(*key)
        first = connection.execute(rows.limit(1)).one()
        yield Finding(
            what=what,
            count=count,
            example=", ".join(map(str, first)),
            mend=mend,
            sql=" ".join(str(rows.compile(connection, compile_kwargs=_AS_TEXT)).split()),
        )
