"""Looks for what cannot be true: damage, lost rows, values that no measurement gives.

The constraints of the schema keep most of it out, as long as they are there and switched on. A disk
that fails, a tool that writes past them, a table made anew without them and a fault of our own can
still bring it in. So what the constraints say is asked here again as questions, of any back end,
before what no constraint can say (`contradictions`). All is read at one point in time: a campaign
that writes meanwhile is no contradiction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sqlalchemy import (
    CheckConstraint,
    ColumnElement,
    Connection,
    Float,
    PrimaryKeyConstraint,
    Table,
    TextClause,
    UniqueConstraint,
    and_,
    exists,
    func,
    inspect,
    not_,
    or_,
    select,
    text,
)
from sqlalchemy.exc import DatabaseError

from trappm.store.db.models import METADATA
from trappm.store.maintenance.contradictions import contradictions
from trappm.store.maintenance.findings import Finding, faulty_rows

_TABLES = METADATA.sorted_tables
_LARGEST = 1.7976931348623157e308
"""Beyond is infinite; PostgreSQL sorts NaN there too, SQLite has none."""

_BY_CONSTRAINT = ("CHECK constraint failed", "NULL value", "non-unique entry")
"""What SQLite's check of integrity finds wrong with values, not with the file."""

_RESTORE = "restore a backup, or mend the rows by hand after: trappm store backup"


def find_faults(connection: Connection) -> list[Finding]:
    """Everything in the database that cannot be true."""
    damage = list(_damage(connection))
    if damage:
        return damage
    differences = list(_differences(connection))
    if not _can_be_asked(connection):
        return differences
    return [
        *differences,
        *_broken_constraints(connection),
        *contradictions(connection),
    ]


def _damage(connection: Connection) -> Iterator[Finding]:
    """A damaged file; nothing else in it can be trusted then."""
    if connection.dialect.name != "sqlite":
        return  # PostgreSQL has pg_amcheck for those who run the server
    try:
        lines = [line for (line,) in connection.exec_driver_sql("PRAGMA integrity_check")]
    except DatabaseError as error:  # so damaged that not even this can go on
        if getattr(error.orig, "sqlite_errorname", "") != "SQLITE_CORRUPT":
            raise
        lines = [str(error.orig)]
    broken = [line for line in lines if line != "ok" and not line.startswith(_BY_CONSTRAINT)]
    if broken:
        yield Finding(
            what="damage to the database file (PRAGMA integrity_check)",
            count=len(broken),
            example=" ".join(broken[0].split()),
            mend="restore a backup; without one, sqlite3's .recover saves what can be read; "
            "labels.db-wal and labels.db-shm belong to the file, so take all three along",
        )


def _differences(connection: Connection) -> Iterator[Finding]:
    """Tables, columns, indices and constraints that are not as in `schema`.

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
            found = {check["name"] for check in inspector.get_check_constraints(table.name)}
            lacking += [f"add_check {name}" for name in _checks(table) if name not in found]
    if lacking:
        yield Finding(
            what="differences between the schema and that of this version",
            count=len(lacking),
            example=lacking[0],
            mend="somebody changed tables by hand: export the labels (trappm labels export "
            "all.jsonl --outcome any) and import them into a new store, or restore a backup",
        )


def _can_be_asked(connection: Connection) -> bool:
    """Whether all tables and columns are there, so that questions about rows can be put."""
    inspector = inspect(connection)
    present = set(inspector.get_table_names())
    return all(
        table.name in present
        and {c["name"] for c in inspector.get_columns(table.name)} >= set(table.columns.keys())
        for table in _TABLES
    )


def _broken_constraints(connection: Connection) -> Iterator[Finding]:
    for table in _TABLES:
        yield from _orphans(connection, table)
        yield from _duplicates(connection, table)
        yield from _any_of(
            connection,
            table,
            {f"without {c.name}": c.is_(None) for c in table.columns if not c.nullable},
        )
        yield from _any_of(
            connection,
            table,
            {
                f"whose {c.name} is no finite number": func.abs(c) > _LARGEST
                for c in table.columns
                if isinstance(c.type, Float)
            },
        )
        yield from _any_of(
            connection,
            table,
            {f"against the rule {name}": c for name, c in _violations(connection, table).items()},
        )


def _orphans(connection: Connection, table: Table) -> Iterator[Finding]:
    for key in sorted(table.foreign_key_constraints, key=lambda key: str(key.name)):
        parent = key.referred_table.alias()
        pairs = [  # what a row that is there says is not asked here
            (element.parent, parent.c[element.column.name])
            for element in key.elements
            if element.column.primary_key
        ]
        found = exists(select(1).select_from(parent).where(*(one == other for one, other in pairs)))
        columns = ", ".join(one.name for one, _ in pairs)
        yield from faulty_rows(
            connection,
            table,
            and_(*(one.is_not(None) for one, _ in pairs), not_(found)),
            what=f"{table.name} without their row of {key.referred_table.name} ({columns})",
            mend="restore a backup if the lost row matters; else, after trappm store backup, "
            f"delete these rows of {table.name}",
        )


def _duplicates(connection: Connection, table: Table) -> Iterator[Finding]:
    for constraint in sorted(table.constraints, key=lambda constraint: str(constraint.name)):
        if not isinstance(constraint, UniqueConstraint | PrimaryKeyConstraint):
            continue
        columns = list(constraint.columns)
        places = (
            select(*columns)
            .where(*(column.is_not(None) for column in columns))
            .group_by(*columns)
            .having(func.count() > 1)
        )
        count = connection.scalar(select(func.count()).select_from(places.subquery())) or 0
        if count:
            example = connection.execute(places.order_by(*columns).limit(1)).one()
            names = ", ".join(column.name for column in columns)
            yield Finding(
                what=f"values of {table.name} ({names}) that more than one row has",
                count=count,
                example=", ".join(map(str, example)),
                mend="an index was lost: restore a backup, or after trappm store backup delete "
                "all but the first row of each, and then REINDEX",
                sql=str(places.compile(connection)),
            )


def _any_of(
    connection: Connection, table: Table, faults: Mapping[str, ColumnElement[bool] | TextClause]
) -> Iterator[Finding]:
    """Reads the table once for all of these faults, and again for each only where there is one."""
    if not faults or not list(
        faulty_rows(connection, table, or_(*faults.values()), what="", mend="")
    ):
        return
    for what, condition in faults.items():
        yield from faulty_rows(
            connection, table, condition, what=f"{table.name} {what}", mend=_RESTORE
        )


def _checks(table: Table) -> dict[str, CheckConstraint]:
    checks = (c for c in table.constraints if isinstance(c, CheckConstraint))
    return {str(check.name): check for check in sorted(checks, key=lambda c: str(c.name))}


def _violations(connection: Connection, table: Table) -> dict[str, TextClause]:
    """As a CHECK does, what is neither true nor false passes."""
    options = {"literal_binds": True, "render_postcompile": True}
    conditions = {
        name: check.sqltext.compile(dialect=connection.dialect, compile_kwargs=options)
        for name, check in _checks(table).items()
    }
    return {name: text(f"(NOT ({condition}))") for name, condition in conditions.items()}
