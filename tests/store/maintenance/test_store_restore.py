"""Backups that are loaded into another database, of either back end."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import store_whole
from sqlalchemy import make_url
from store_samples import configuration, contents, measurement

from trappm.profiler.errors import InputError, StoreError
from trappm.store import Store
from trappm.store.maintenance.backup import back_up
from trappm.store.maintenance.restore import restore


@pytest.fixture
def kept(sqlite_databases, tmp_path):
    """The file of a store with rows in every table."""
    (tmp_path / "kept").mkdir()
    with sqlite_databases.copy(tmp_path / "kept", store_whole.fill) as url:
        return Path(make_url(url).database)


def test_a_restored_store_has_the_same_rows_and_goes_on(kept, empty_database_url):
    done = restore(kept, empty_database_url)
    assert contents(empty_database_url) == contents(f"sqlite:///{kept}")
    assert done.rows == sum(map(len, contents(empty_database_url).values()))
    with Store.open(empty_database_url) as store:
        assert store.maintenance.check() == []
        highest = max(label.id for label in store.labels.matching())
        recorded = store.measurements.record(measurement(configuration(99)))
        assert recorded.label_id > highest
        store.campaigns.log_event(store.campaigns.get().id, "note", {})
        store.pools.save("another", {"name": "another"}, [configuration(98)])


def test_there_and_back_again_nothing_is_lost(kept, database_url, tmp_path):
    restore(kept, database_url)
    back_up(database_url, tmp_path / "again.db")
    assert contents(f"sqlite:///{tmp_path / 'again.db'}") == contents(f"sqlite:///{kept}")


def test_nothing_is_merged_into_a_store_with_rows(kept, store, database_url):
    store.measurements.record(measurement())
    before = contents(database_url)
    with pytest.raises(InputError, match=r"with 4 rows.*nothing is merged"):
        restore(kept, database_url)
    assert contents(database_url) == before


def test_an_empty_store_can_be_restored_into(kept, store, database_url):
    restore(kept, database_url)
    assert len(store.labels.matching()) == 3


def test_a_backup_that_cannot_be_loaded_whole_leaves_no_row(kept, database_url):
    with sqlite3.connect(kept) as connection:  # foreign keys are off here
        connection.execute("UPDATE labels SET device_id = 99 WHERE id = 2")
    connection.close()
    with pytest.raises(StoreError, match="refused"):
        restore(kept, database_url)
    with Store.open(database_url) as store:
        assert sum(store.maintenance.stats().rows.values()) == 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "there is no backup"), (b"", "empty database"), (b"text" * 200, "not a database")],
)
def test_what_is_no_backup_is_told(tmp_path, database_url, content, reason):
    file = tmp_path / "other.db"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises((InputError, StoreError), match=reason) as caught:
        restore(file, database_url)
    assert caught.value.exit_status == 2
