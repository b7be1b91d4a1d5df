"""Opening a database: new ones, stores of other versions, files of something else, and reading."""

import multiprocessing
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.exc import IntegrityError
from store_samples import configuration, contents, measurement

from trappm.profiler.errors import InputError, StoreAccessError, StoreError, TrappmError
from trappm.store import Home, LabelFilter, Store
from trappm.store.engine import make_engine

NOBODY = 65534


IMPOSSIBLE = (
    "UPDATE labels SET measurement_id = 4, outcome = 'unsupported' WHERE id = 2",
    "UPDATE labels SET outcome = 'timeout' WHERE id = 2",
    "UPDATE labels SET outcome = 'oom', memory_above_mib = 9, memory_mib = NULL WHERE id = 2",
    "UPDATE measurements SET outcome = 'error' WHERE id = 3",
    "DELETE FROM measurements WHERE id = 1",
)
"""Changes of the whole store: labels 1 and 2 are ok, 3 is censored, and measurement 4 failed."""


def test_labels_of_failed_measurements_violate_constraints(whole_url):
    engine = make_engine(whole_url)
    before = contents(whole_url)
    for change in IMPOSSIBLE:
        with pytest.raises(IntegrityError, match=r"(?i)foreign key|check"), engine.begin() as new:
            new.exec_driver_sql(change)
    engine.dispose()
    assert contents(whole_url) == before


def test_a_store_of_a_schema_without_a_revision_is_refused_with_advice(store, database_url):
    for schema, advice in (
        ("0017", r"too old to be upgraded .from 0018 on.* labels export .* labels import"),
        ("9999", r"a newer version of TraPPM .schema 9999.* update TraPPM"),
    ):
        with store.database.writing() as session:
            session.execute(text("UPDATE alembic_version SET version_num = :x"), {"x": schema})
        for open_ in (Store.open, Store.open_to_read, Store.upgrade):
            with pytest.raises(StoreAccessError, match=advice):
                open_(database_url)


def test_opening_an_empty_database_creates_a_store(empty_database_url, tmp_path):
    if empty_database_url.startswith("sqlite"):
        (tmp_path / "labels.db").touch()
    with pytest.raises(StoreError, match="not yet a label store"):
        Store.open_to_read(empty_database_url)
    Store.open(empty_database_url).close()
    with Store.open_to_read(empty_database_url) as store:
        assert store.check() == []


def test_a_database_with_other_tables_is_not_changed(empty_database_url):
    engine = create_engine(empty_database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE customers (id INTEGER)"))
    with pytest.raises(StoreAccessError, match=r"something else .*'customers'"):
        Store.open(empty_database_url)
    assert inspect(engine).get_table_names() == ["customers"]
    engine.dispose()


@pytest.mark.parametrize(
    "content", [b"not a database, but long enough for one" * 100, b"\0" * 4096]
)
def test_a_file_that_is_not_a_database_is_refused_unchanged(tmp_path, content):
    path = tmp_path / "labels.db"
    path.write_bytes(content)
    for open_ in (Store.open, Store.open_to_read):
        with pytest.raises(StoreAccessError, match=r"labels\.db refused: file is not a database"):
            open_(f"sqlite:///{path}")
    assert path.read_bytes() == content


def test_sqlite_is_configured_for_durability(tmp_path):
    with (
        Store.open(f"sqlite:///{tmp_path / 'labels.db'}") as store,
        store.database.reading() as session,
    ):
        settings = {
            name: session.execute(text(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    full = 2
    assert settings == {
        "journal_mode": "wal", "synchronous": full, "foreign_keys": 1, "busy_timeout": 60_000,
    }  # fmt: skip


@pytest.fixture
def path(tmp_path):
    """Of a SQLite store with one label that nobody has open."""
    path = tmp_path / "50% & more? a#b naïve" / "labels.db"
    path.parent.mkdir()
    with Store.open(url_of(path)) as store:
        store.measurements.record_many([measurement()])
    return path


def url_of(path):
    return Home(path.parent).database_url


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def ask_as_nobody(url):
    """What somebody who may write nowhere reads: the number of labels, or an error."""
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def ask():
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        try:
            with Store.open_to_read(url) as store:
                theirs.send(len(store.labels.query(LabelFilter())))
        except TrappmError as error:
            theirs.send(str(error))

    process = multiprocessing.get_context("fork").Process(target=ask)
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def test_a_store_opened_to_read_refuses_changes_and_sees_new_labels(store, database_url):
    store.measurements.record_many([measurement()])
    campaign = store.campaigns.create("one", {}, 0)
    before = contents(database_url)
    with Store.open_to_read(database_url) as readable:
        assert len(readable.labels.query(LabelFilter())) == 1
        assert readable.campaigns.get() == campaign
        for change in (
            lambda: readable.measurements.record_many([measurement(configuration(2))]),
            lambda: readable.campaigns.create("two", {}, 0),
            lambda: readable.campaigns.log_event(campaign.id, "note", {}),
            lambda: readable.pools.save("late", [configuration(99)]),
        ):
            with pytest.raises(StoreError, match=r"readonly|read-only"):
                change()
        assert contents(database_url) == before
        for count in (2, 3):
            store.measurements.record_many([measurement(configuration(count))])
            assert len(readable.labels.find()) == count


def test_reading_creates_no_store(tmp_path):
    with pytest.raises(StoreAccessError, match="unable to open database file"):
        Store.open(url_of(tmp_path / "nowhere" / "labels.db"))
    for path in (tmp_path / "labels.db", tmp_path / "nowhere" / "labels.db"):
        with pytest.raises(InputError, match=r"no label store at .*labels\.db; fill one with"):
            Store.open_to_read(url_of(path))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def read_only(path):
    """The store in a folder that all may read and its owner alone may write."""
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory() as folder:  # pytest's are closed to others
        Path(folder).chmod(0o755)
        yield Path(shutil.copy(path, folder))


def test_other_users_can_read_a_store_they_cannot_write(read_only):
    before = files(read_only.parent)
    assert ask_as_nobody(url_of(read_only)) == 1
    assert files(read_only.parent) == before
    with Store.open(url_of(read_only)) as store:
        store.measurements.record_many([measurement(configuration(2))])
        assert ask_as_nobody(url_of(read_only)) == 2


def test_labels_only_in_the_write_ahead_log_are_not_missed(read_only, tmp_path):
    with Store.open(url_of(read_only)) as store:
        store.measurements.record_many([measurement(configuration(2))])
        log = read_only.with_name("labels.db-wal")
        kept = read_only.read_bytes(), log.read_bytes()
    read_only.write_bytes(kept[0])
    log.write_bytes(kept[1])
    read_only.with_name("labels.db-shm").unlink(missing_ok=True)
    assert "unable to open database file" in ask_as_nobody(url_of(read_only))
    with Store.open_to_read(url_of(read_only)) as readable:  # root may make what is missing
        assert len(readable.labels.find()) == 2
    assert sqlite3.connect(read_only).execute("SELECT count(*) FROM labels").fetchone() == (2,)
