"""Upgrading a store: a new database, an older schema with its copy, and a store of 0.2.0."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from store_samples import contents, measurement

import trappm.store.db.migrate
from trappm.profiler.errors import InputError, StoreAccessError
from trappm.store import Store
from trappm.store.maintenance.upgrade import upgrade_store

OLDER, NEWER = trappm.store.db.migrate.REVISIONS[-1], "9000"


@pytest.fixture
def older(tmp_path, monkeypatch):
    """Return a store with one label, for which a newer schema without changes exists."""
    path = tmp_path / "labels.db"
    with Store.open(f"sqlite:///{path}") as store:
        store.measurements.record(measurement())

    def migrate(connection):
        connection.execute(text("UPDATE alembic_version SET version_num = :new"), {"new": NEWER})

    monkeypatch.setattr(trappm.store.db.migrate, "_run_alembic", migrate)
    monkeypatch.setattr(trappm.store.db.migrate, "REVISIONS", (OLDER, NEWER))
    monkeypatch.setattr("trappm.store.maintenance.upgrade.REVISIONS", (OLDER, NEWER))
    return path


def test_an_upgrade_keeps_a_copy_of_the_store(older):
    before = contents(f"sqlite:///{older}")
    with pytest.raises(StoreAccessError, match="trappm store upgrade"):
        Store.open(f"sqlite:///{older}")  # which would keep no copy of it
    done = upgrade_store(f"sqlite:///{older}")
    assert (done.before, done.after) == (OLDER, NEWER)
    assert Path(done.backup).parent == older.parent
    assert f"schema-{OLDER}" in Path(done.backup).name
    assert contents(f"sqlite:///{done.backup}") == before
    again = upgrade_store(f"sqlite:///{older}")
    assert (again.before, again.after, again.backup) == (NEWER, NEWER, None)


def test_without_room_for_the_copy_nothing_is_upgraded(older, monkeypatch):
    before = contents(f"sqlite:///{older}")
    link = older.parent / "elsewhere"
    link.symlink_to("/proc")
    monkeypatch.setattr(Path, "with_name", lambda _path, name: link / name)
    with pytest.raises(InputError, match="cannot be written"):
        upgrade_store(f"sqlite:///{older}")
    assert contents(f"sqlite:///{older}") == before


@pytest.mark.parametrize("schema", ["0001", "0012"])
def test_a_store_of_0_2_0_is_refused_with_the_way_to_export_it(store, database_url, schema):
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :old"), {"old": schema})
    engine.dispose()
    with pytest.raises(StoreAccessError, match=r"0\.2\.0.*labels export.*labels import"):
        Store.open(database_url)
    with pytest.raises(StoreAccessError, match=r"0\.2\.0.*labels export.*labels import"):
        upgrade_store(database_url)


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
