"""Looks for what cannot be true: damage, lost rows, values that no measurement gives.

The constraints of the schema keep most of it out, as long as they are there. So this has
the database check its file and its constraints, compares its schema with ours, and then looks for
what no constraint can say (`contradictions`).
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import CheckConstraint, Connection, inspect
from sqlalchemy.exc import DatabaseError

from trappm.store.db.models import METADATA
from trappm.store.maintenance.contradictions import contradictions
from trappm.store.maintenance.findings import BY_HAND, Finding

_TABLES = METADATA.sorted_tables

_BY_CONSTRAINT = ("CHECK constraint failed", "NULL value", "non-unique entry")
"""What SQLite's check of integrity reports of values, not of the file."""


def find_faults(connection: Connection) -> list[Finding]:
    """Everything in the database that cannot be true."""
    lines = _integrity(connection)
    against = [line for line in lines if line.startswith(_BY_CONSTRAINT)]
    damage = [line for line in lines if line not in against]
    if damage:  # nothing else in the file can be trusted then
        return [_damaged(damage)]
    differences = list(_differences(connection))
    if not _has_all_columns(connection):
        return differences
    return [*differences, *_broken_constraints(connection, against), *contradictions(connection)]


def _integrity(connection: Connection) -> list[str]:
    """What SQLite has to report of its file; PostgreSQL has pg_amcheck for who runs the server."""
    if connection.dialect.name != "sqlite":
        return []
    try:
        lines = [line for (line,) in connection.exec_driver_sql("PRAGMA integrity_check")]
    except DatabaseError as error:  # so damaged that not even this can go on
        if getattr(error.orig, "sqlite_errorname", "") != "SQLITE_CORRUPT":
            raise
        lines = [str(error.orig)]
    return [line for line in lines if line != "ok"]


def _damaged(lines: list[str]) -> Finding:
    return Finding(
        what="damage to the database file (PRAGMA integrity_check)",
        count=len(lines),
        example=" ".join(lines[0].split()),
        mend="restore a backup; without one, sqlite3's .recover saves what can be read; "
        "labels.db-wal and labels.db-shm belong to the file, so take all three along",
    )


def _broken_constraints(connection: Connection, against: list[str]) -> Iterator[Finding]:
    """What a tool that switches constraints off has written into a SQLite file."""
    if against:
        yield Finding(
            what="values against the constraints of their tables (PRAGMA integrity_check)",
            count=len(against),
            example=against[0],
            mend=BY_HAND,
        )
    if connection.dialect.name == "sqlite":
        orphans = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
        if orphans:
            table, row, parent, _ = orphans[0]
            yield Finding(
                what="rows without the row that they refer to (PRAGMA foreign_key_check)",
                count=len(orphans),
                example=f"row {row} of {table}, of {parent}",
                mend=f"{BY_HAND}; a row that nothing needs can be deleted",
            )


def _differences(connection: Connection) -> Iterator[Finding]:
    """Tables, columns, indices and constraints that are not as in `store.db.models`.

    Tables and indices that somebody added to ours harm nobody.
    """
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext

    context = MigrationContext.configure(connection, opts={"compare_type": True})
    lacking = [
        " ".join(str(getattr(part, "name", part)) for part in change if part is not None)
        for changes in compare_metadata(context, METADATA)
        for change in (changes if isinstance(changes, list) else [changes])
        if change[0] not in {"remove_table", "remove_index"}
    ]
    inspector = inspect(connection)
    present = set(inspector.get_table_names())
    for table in _TABLES:
        if table.name in present:
            ours = {str(c.name) for c in table.constraints if isinstance(c, CheckConstraint)}
            checks = inspector.get_check_constraints(table.name)
            there = {check["name"] for check in checks}
            lacking += [f"add_check {name}" for name in sorted(ours - there)]
    if lacking:
        yield Finding(
            what="differences between the schema and that of this version",
            count=len(lacking),
            example=lacking[0],
            mend="somebody changed tables by hand: export the labels (trappm labels export "
            "all.jsonl --outcome any) and import them into a new store, or restore a backup",
        )


def _has_all_columns(connection: Connection) -> bool:
    """Whether all tables and columns are there, so that rows can be queried."""
    inspector = inspect(connection)
    present = set(inspector.get_table_names())
    return all(
        table.name in present
        and {c["name"] for c in inspector.get_columns(table.name)} >= set(table.columns.keys())
        for table in _TABLES
    )
