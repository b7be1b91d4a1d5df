"""Stores of every released schema, brought up to today's with all that is in them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Integer, MetaData, create_engine, func, make_url, select

from trappm.profiler.errors import InputError
from trappm.store import LabelFilter, Store
from trappm.store.db.migrate import REVISIONS
from trappm.store.maintenance.upgrade import upgrade_store

FOLDER = Path(__file__).parent / "schemas"
STORED = sorted({path.name.split(".")[0] for path in FOLDER.glob("*.sql")})


def load(url, revision):
    """Makes the database as it was stored."""
    system = make_url(url).get_backend_name()
    script = (FOLDER / f"{revision}.{system}.sql").read_text()
    if system == "sqlite":
        with closing(sqlite3.connect(make_url(url).database)) as connection:
            connection.executescript(script)
        return
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.connection.driver_connection.execute(script)
        there = MetaData()
        there.reflect(connection)
        for table in there.sorted_tables:  # a script tells rows, and not how far ids were given out
            if "id" in table.columns and isinstance(table.columns["id"].type, Integer):
                sequence = func.pg_get_serial_sequence(table.name, "id")
                connection.execute(select(func.setval(sequence, func.max(table.columns["id"]))))
    engine.dispose()


GONE = {"lease_expires_at", "snapshot_aliases"}
"""Columns and tables that a later schema has no more."""


def rows_of(url, columns=None):
    """Every row by table; with the columns of an earlier answer, only those."""
    engine, there = create_engine(url), MetaData()
    there.reflect(engine)
    rows = {}
    with engine.connect() as connection:
        for table in there.sorted_tables:
            there_now = [name for name in table.columns.keys() if name not in GONE]  # noqa: SIM118
            names = there_now if columns is None else columns.get(table.name)
            if names is None or table.name in {"alembic_version", *GONE}:
                continue
            records = connection.execute(table.select()).mappings()
            rows[table.name] = names, sorted(repr([row[name] for name in names]) for row in records)
    engine.dispose()
    return rows


def test_a_database_of_every_released_schema_is_stored():
    """The newest may still change: it is stored when the next one is made."""
    assert set(REVISIONS[:-1]) <= set(STORED) <= set(REVISIONS), (
        "make it with: python tests/store/db/make_schemas.py REVISION"
    )


@pytest.mark.parametrize("revision", STORED)
def test_every_released_schema_comes_up_whole(empty_database_url, revision):
    load(empty_database_url, revision)
    before = rows_of(empty_database_url)
    assert all(rows for _, rows in before.values()), "there are rows in every table"
    done = upgrade_store(empty_database_url)
    assert (done.before, done.after) == (revision, REVISIONS[-1])
    assert (
        rows_of(empty_database_url, {name: names for name, (names, _) in before.items()}) == before
    )
    with Store.open(empty_database_url) as store:
        # There were no censored labels before 0004; what ran out of memory then still lacks one.
        # Nor was there an owner before 0009: who runs the campaign of a lease is not known.
        assert len(store.maintenance.check()) == (revision < "0004") + (revision < "0009")
        assert store.maintenance.relabel().made == (revision < "0004")
        store.assignments.release_leases(store.campaigns.get().id)
        assert store.maintenance.check() == []
        assert store.maintenance.stats().rows["labels"] == len(store.labels.matching()) >= 2
        assert set(store.labels.query(LabelFilter(outcome="any")).outcome) > {"ok", "oom"}


@pytest.mark.parametrize("revision", STORED[:1])
def test_a_copy_of_what_was_there_is_kept(tmp_path, revision):
    path = tmp_path / "labels.db"
    url = f"sqlite:///{path}"
    load(url, revision)
    before = rows_of(url)
    done = upgrade_store(url)
    copy = Path(done.backup)
    assert copy.parent == tmp_path
    assert f"schema-{revision}" in copy.name
    assert rows_of(f"sqlite:///{copy}") == before
    again = upgrade_store(url)
    assert (again.before, again.after, again.backup) == (REVISIONS[-1], REVISIONS[-1], None)


def test_an_empty_database_becomes_a_store(empty_database_url, tmp_path):
    if empty_database_url.startswith("sqlite"):
        (tmp_path / "labels.db").touch()
    done = upgrade_store(empty_database_url)
    assert (done.before, done.backup) == (None, None)
    with Store.open_to_read(empty_database_url) as store:
        assert store.maintenance.check() == []


def test_where_there_is_no_store_none_is_made(tmp_path):
    with pytest.raises(InputError, match="no label store at"):
        upgrade_store(f"sqlite:///{tmp_path / 'labels.db'}")
    assert list(tmp_path.iterdir()) == []


def test_without_room_for_the_copy_nothing_is_upgraded(tmp_path, monkeypatch):
    path = tmp_path / "labels.db"
    load(f"sqlite:///{path}", "0001")
    before = rows_of(f"sqlite:///{path}")
    link = tmp_path / "elsewhere"
    link.symlink_to("/proc")
    monkeypatch.setattr(Path, "with_name", lambda _path, name: link / name)
    with pytest.raises(InputError, match="cannot be written"):
        upgrade_store(f"sqlite:///{path}")
    assert rows_of(f"sqlite:///{path}") == before
