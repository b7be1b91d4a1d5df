"""Upgrading a store: a new database, an older schema, and a store of 0.2.0."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine, text
from store_samples import measurement

import trappm.store.migrate
from trappm.profiler.errors import InputError, StoreAccessError
from trappm.store import Store
from trappm.store.migrate import upgrade_store

OLDER, NEWER = trappm.store.migrate.REVISIONS[-1], "9000"


@pytest.fixture
def older(tmp_path, monkeypatch):
    """Return a store with one label, for which a newer schema without changes exists."""
    path = tmp_path / "labels.db"
    with Store.open(f"sqlite:///{path}") as store:
        store.measurements.record(measurement())

    def migrate(connection):
        connection.execute(text("UPDATE alembic_version SET version_num = :new"), {"new": NEWER})

    monkeypatch.setattr(trappm.store.migrate, "_run_alembic", migrate)
    monkeypatch.setattr(trappm.store.migrate, "REVISIONS", (OLDER, NEWER))
    return path


def test_an_older_store_is_refused_until_it_is_upgraded(older):
    url = f"sqlite:///{older}"
    for open_ in (Store.open, Store.open_to_read):
        with pytest.raises(StoreAccessError, match=f"schema {OLDER}.*trappm store upgrade"):
            open_(url)
    done = upgrade_store(url)
    assert (done.before, done.after) == (OLDER, NEWER)
    with Store.open_to_read(url) as store:
        assert len(store.labels.matching()) == 1
    again = upgrade_store(url)
    assert (again.before, again.after) == (NEWER, NEWER)


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
    assert (done.before, done.after) == (None, OLDER)
    with Store.open_to_read(empty_database_url) as store:
        assert store.check() == []


def test_where_there_is_no_store_none_is_made(tmp_path):
    with pytest.raises(InputError, match="no label store at"):
        upgrade_store(f"sqlite:///{tmp_path / 'labels.db'}")
    assert list(tmp_path.iterdir()) == []
