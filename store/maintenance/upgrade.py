"""Upgrading a store on purpose, with a copy of what was there before."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import make_url

from trappm.store.db.engine import address, make_engine
from trappm.store.db.migrate import REVISIONS, schema_of, upgrade
from trappm.store.db.read_only import engine_to_read
from trappm.store.maintenance.backup import back_up


@dataclass(frozen=True, kw_only=True)
class Upgrade:
    """From which schema to which; the same if there was nothing to do."""

    address: str
    before: str | None
    """None: an empty database, of which a label store was made."""
    after: str
    backup: str | None
    """The file that the store was copied to before anything was changed, if anything was."""


def upgrade_store(url: str) -> Upgrade:
    """Brings the label store at this SQLAlchemy URL to the newest schema, in one transaction.

    A SQLite file is copied first, to a new file beside it. A PostgreSQL database is not: nothing of
    the upgrade stays there if it fails, and `pg_dump` is the way to keep an older schema.

    Raises:
        InputError: there is no such SQLite file, it is not ours, or of a newer version; or there
            is no place beside it for the copy.
        StoreError: the database refused; it is as it was.
    """
    reader = engine_to_read(url)
    try:
        before, is_file = schema_of(reader), reader.dialect.name == "sqlite"
        where = address(reader)
    finally:
        reader.dispose()
    copy = None
    if before not in {None, REVISIONS[-1]} and is_file:
        now = f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}Z"
        path = Path(str(make_url(url).database))
        copy = back_up(url, path.with_name(f"{path.name}.schema-{before}-{now}")).file
    if before != REVISIONS[-1]:
        engine = make_engine(url)
        try:
            upgrade(engine)
        finally:
            engine.dispose()
    return Upgrade(address=where, before=before, after=REVISIONS[-1], backup=copy)
