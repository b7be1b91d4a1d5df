"""Opening a database: new ones, old ones, and what is none of ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.exc import IntegrityError
from store_samples import contents, measurement

import trappm.store.migrate
from trappm.profiler.errors import InputError, StoreAccessError, StoreError
from trappm.store import Store
from trappm.store.engine import make_engine
from trappm.store.schema import METADATA
from trappm.store.transactions import Patience


@pytest.fixture
def migrated(store, database_url):
    """A connection to a database that the migrations made."""
    engine = create_engine(database_url)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def constraints(connection):
    """What alembic does not compare: names and conditions of checks, in the database's words."""
    inspector = inspect(connection)
    return {
        table: {
            check["name"]: re.sub(r"\s+", " ", check["sqltext"])
            for check in inspector.get_check_constraints(table)
        }
        for table in inspector.get_table_names()
        if table != "alembic_version"
    }


def test_migrations_make_exactly_the_schema(migrated):
    context = MigrationContext.configure(migrated, opts={"compare_type": True})
    assert compare_metadata(context, METADATA) == []
    by_migrations = constraints(migrated)
    assert sum(map(len, by_migrations.values())) > 30
    migrated.rollback()
    migrated.execute(text("DROP TABLE alembic_version"))
    METADATA.drop_all(migrated)
    METADATA.create_all(migrated)
    assert constraints(migrated) == by_migrations


def test_every_revision_is_released_in_order():
    config = Config()
    config.set_main_option("script_location", "trappm.store:migrations")
    config.set_main_option("path_separator", "os")
    scripts = ScriptDirectory.from_config(config)
    assert scripts.get_heads() == [trappm.store.migrate.REVISIONS[-1]]
    walked = [script.revision for script in scripts.walk_revisions()]
    assert walked == list(reversed(trappm.store.migrate.REVISIONS))


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE labels SET measurement_id = 4, outcome = 'unsupported' WHERE id = 2",
        "UPDATE labels SET measurement_id = 4 WHERE id = 2",
        "UPDATE labels SET outcome = 'timeout' WHERE id = 2",
        "UPDATE labels SET outcome = 'oom', memory_above_mib = 9, memory_mib = NULL WHERE id = 2",
        "UPDATE labels SET memory_above_mib = NULL, memory_mib = 9 WHERE id = 3",
        "UPDATE measurements SET outcome = 'error' WHERE id = 3",
        "DELETE FROM measurements WHERE id = 1",
    ],
)
def test_no_label_stands_on_a_measurement_that_failed_whoever_writes(whole_url, change):
    """Of the whole store: labels 1 and 2 are ok, 3 is censored, and measurement 4 failed."""
    engine = make_engine(whole_url)
    before = contents(whole_url)
    with pytest.raises(IntegrityError, match=r"(?i)foreign key|check"), engine.begin() as writing:
        writing.exec_driver_sql(change)
    engine.dispose()
    assert contents(whole_url) == before


def test_opening_again_keeps_everything(empty_database_url):
    with Store.open(empty_database_url) as first:
        label_id = first.measurements.record(measurement()).label_id
    with Store.open(empty_database_url) as second:
        assert [label.id for label in second.labels.matching()] == [label_id]


def test_a_newer_schema_is_left_alone(store, database_url):
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreAccessError, match=r"newer TraPPM .schema 9999.*update TraPPM"):
        Store.open(database_url)
    engine.dispose()


def test_a_database_of_something_else_is_left_alone(empty_database_url):
    engine = create_engine(empty_database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE customers (id INTEGER)"))
    with pytest.raises(StoreAccessError, match=r"something else .*'customers'"):
        Store.open(empty_database_url)
    assert inspect(engine).get_table_names() == ["customers"]
    engine.dispose()


def test_a_migration_that_fails_leaves_nothing_behind(empty_database_url, monkeypatch):
    def fail(connection):
        METADATA.create_all(connection)
        raise StoreError("power cut")

    monkeypatch.setattr(trappm.store.migrate, "_run_alembic", fail)
    with pytest.raises(StoreError, match="power cut"):
        Store.open(empty_database_url)
    monkeypatch.undo()
    Store.open(empty_database_url).close()


@pytest.mark.parametrize(
    "content", [b"not a database, but long enough for one" * 100, b"\0" * 4096]
)
def test_a_file_that_is_no_database_is_told_and_left_alone(tmp_path, content):
    path = tmp_path / "labels.db"
    path.write_bytes(content)
    with pytest.raises(StoreAccessError, match=r"labels\.db refused: file is not a database"):
        Store.open(f"sqlite:///{path}")
    assert path.read_bytes() == content


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(StoreAccessError, match="unable to open database file"):
        Store.open(f"sqlite:///{tmp_path / 'nowhere' / 'labels.db'}")


def test_a_store_that_cannot_be_written_can_be_read(tmp_path):
    path = tmp_path / "labels.db"
    with Store.open(f"sqlite:///{path}") as store:
        store.measurements.record(measurement())
        # Opened read-only while somebody writes: afterwards SQLite would need to write to read.
        with Store.open(f"sqlite:///file:{path}?mode=ro&uri=true") as readable:
            assert len(readable.labels.matching()) == 1
            with pytest.raises(StoreAccessError, match="readonly database"):
                readable.measurements.record(measurement())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "not an SQLAlchemy URL"),
        ("mysql://user:secret@host/labels", "sqlite or postgresql, not on 'mysql'"),
        ("postgresql+nodriver://user:secret@host/labels", "knows no driver"),
        ("postgresql+psycopg://user:pa@127.0.0.1/secret@host/labels", "more than one @"),
        ("postgresql+psycopg://user:secret@127.0.0.1:1/labels", "refused"),
    ],
)
def test_an_address_that_cannot_be_is_told_without_its_password(url, message):
    if "psycopg" in url:
        pytest.importorskip("psycopg")
    with pytest.raises(StoreAccessError, match=message) as caught:
        Store.open(url)
    assert "secret" not in str(caught.value)


def test_what_the_user_can_mend_is_bad_input_and_a_busy_database_is_not(tmp_path, monkeypatch):
    assert issubclass(StoreAccessError, InputError)
    assert StoreAccessError.exit_status == InputError.exit_status
    monkeypatch.setattr("trappm.store.engine.BUSY_TIMEOUT_S", 0.1)
    url = f"sqlite:///{tmp_path / 'labels.db'}"
    Store.open(url).close()
    engine = create_engine(url)
    with engine.connect() as other, Store.open(url, Patience(wait_s=0)) as waiting:
        other.exec_driver_sql("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="locked") as caught:
            waiting.measurements.record(measurement())
        assert not isinstance(caught.value, StoreAccessError)
    engine.dispose()


def test_faults_of_our_own_are_not_told_as_the_databases(tmp_path):
    with Store.open(f"sqlite:///{tmp_path / 'labels.db'}") as store:
        with pytest.raises(ValueError, match="ours"), store.database.writing():
            raise ValueError("ours")
        with pytest.raises(StoreError, match="surrogates not allowed"):
            store.pools.save("\ud800", {}, [])
        with pytest.raises(StoreError, match="too large"):
            store.campaigns.create("a", {}, 1 << 70)


def test_sqlite_is_set_up_to_keep_what_it_acknowledged(tmp_path):
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


def test_the_migrations_are_part_of_the_package():
    folder = Path(trappm.store.migrate.__file__).parent / "migrations"
    for package in (folder, folder / "versions"):
        assert (package / "__init__.py").is_file()
