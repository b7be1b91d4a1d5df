"""Opening a store only to ask: nothing is made, nothing can be changed, nothing is missed."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from store_samples import configuration, contents, measurement

from trappm.profiler.errors import InputError, StoreError
from trappm.store import Home, LabelFilter, Store

NOBODY = 65534


@pytest.fixture
def path(tmp_path):
    """Of a SQLite store with one label that nobody has open."""
    path = tmp_path / "50% & more?" / "labels.db"
    path.parent.mkdir()
    with Store.open(url_of(path)) as store:
        store.measurements.record(measurement())
    return path


def url_of(path):
    return Home(path.parent).database_url


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_every_question_is_answered_and_every_change_refused(store, database_url):
    store.measurements.record(measurement())
    campaign = store.campaigns.create("one", {}, 0)
    before = contents(database_url)
    with Store.open_to_read(database_url) as readable:
        assert len(readable.labels.query(LabelFilter())) == 1
        assert readable.campaigns.get() == campaign
        for change in (
            lambda: readable.measurements.record(measurement(configuration(2))),
            lambda: readable.campaigns.create("two", {}, 0),
            lambda: readable.campaigns.log_event(campaign.id, "note", {}),
            lambda: readable.pools.save("late", {}, [configuration(99)]),
        ):
            with pytest.raises(StoreError, match=r"readonly|read-only"):
                change()
    assert contents(database_url) == before


def test_what_is_written_meanwhile_is_seen(store, database_url):
    with Store.open_to_read(database_url) as readable:
        for count in (1, 2, 3):
            store.measurements.record(measurement(configuration(count)))
            assert len(readable.labels.matching()) == count


def test_where_there_is_no_store_nothing_is_made(tmp_path):
    for path in (tmp_path / "labels.db", tmp_path / "nowhere" / "labels.db"):
        with pytest.raises(InputError, match=r"no label store at .*labels\.db; fill one with"):
            Store.open_to_read(url_of(path))
    assert list(tmp_path.iterdir()) == []


def test_an_empty_database_is_no_store_yet(empty_database_url, tmp_path):
    if empty_database_url.startswith("sqlite"):
        (tmp_path / "labels.db").touch()
    with pytest.raises(StoreError, match="not yet a label store"):
        Store.open_to_read(empty_database_url)


def test_reading_a_store_of_0_2_0_names_the_export(store, database_url):
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    with pytest.raises(StoreError, match=r"0.2.0 or earlier .schema 0001.*labels export"):
        Store.open_to_read(database_url)
    engine.dispose()


def test_a_file_that_is_no_database_is_told(tmp_path):
    path = tmp_path / "labels.db"
    path.write_bytes(b"not a database, but long enough for one" * 100)
    with pytest.raises(StoreError, match="file is not a database"):
        Store.open_to_read(url_of(path))


ASK = """
import os, sqlite3, sys
from trappm.store import LabelFilter, Store
from trappm.profiler.errors import TrappmError
import pandas, sqlalchemy.dialects.sqlite.pysqlite, alembic
os.setgid({nobody}), os.setuid({nobody})
try:
    with Store.open_to_read(sys.argv[1]) as store:
        print(len(store.labels.query(LabelFilter())), "labels")
except TrappmError as error:
    print(error)
"""


def ask_as_nobody(url):
    """What somebody is answered who may write nowhere."""
    code = ASK.format(nobody=NOBODY)
    done = subprocess.run(
        [sys.executable, "-c", code, url], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def read_only(path):
    """The store in a folder that all may read and its owner alone may write."""
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory() as folder:  # pytest's are closed to others
        Path(folder).chmod(0o755)
        yield Path(shutil.copy(path, folder))


def test_a_folder_that_cannot_be_written_can_be_asked(read_only):
    before = files(read_only.parent)
    assert ask_as_nobody(url_of(read_only)) == "1 labels"
    assert files(read_only.parent) == before


def test_it_can_be_asked_while_its_owner_writes(read_only):
    with Store.open(url_of(read_only)) as store:
        store.measurements.record(measurement(configuration(2)))
        assert ask_as_nobody(url_of(read_only)) == "2 labels"


def test_labels_that_stand_in_the_log_only_are_never_missed(read_only, tmp_path):
    with Store.open(url_of(read_only)) as store:
        store.measurements.record(measurement(configuration(2)))
        log = read_only.with_name("labels.db-wal")
        kept = read_only.read_bytes(), log.read_bytes()
    read_only.write_bytes(kept[0])
    log.write_bytes(kept[1])
    read_only.with_name("labels.db-shm").unlink(missing_ok=True)
    assert "unable to open database file" in ask_as_nobody(url_of(read_only))
    with Store.open_to_read(url_of(read_only)) as readable:  # root may make what is missing
        assert len(readable.labels.matching()) == 2
    assert sqlite3.connect(read_only).execute("SELECT count(*) FROM labels").fetchone() == (2,)


@pytest.mark.parametrize("address", ["sqlite:///{}?timeout=5", "sqlite:///file:{}?uri=true"])
def test_options_of_an_address_make_no_file(tmp_path, address):
    path = tmp_path / "labels.db"
    with pytest.raises(InputError, match="no label store at"):
        Store.open_to_read(address.format(path))
    assert list(tmp_path.iterdir()) == []
    Store.open(f"sqlite:///{path}").close()
    with Store.open_to_read(address.format(path)) as store:
        assert store.labels.matching() == []
