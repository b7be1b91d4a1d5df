"""Copies of a store: whole, of one moment, never over anything, and of both back ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sqlite3
import subprocess
import sys

import pytest
import store_workers
from sqlalchemy import create_engine, make_url, text
from store_samples import configuration, contents, measurement

from trappm.profiler.errors import InputError, StoreError
from trappm.profiler.files.whole_file import made_whole
from trappm.store import Store
from trappm.store.maintenance.backup import back_up

PATIENCE_S = 120
context = multiprocessing.get_context("spawn")


def test_a_copy_is_a_store_with_the_same_rows(whole_url, tmp_path):
    file = tmp_path / "copies" / "50% & more?.db"
    file.parent.mkdir()
    done = back_up(whole_url, file)
    with sqlite3.connect(file) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    connection.close()
    assert [p.name for p in file.parent.iterdir()] == [file.name]
    assert done.size_bytes == file.stat().st_size
    assert file.stat().st_mode & 0o077 == 0
    plain = tmp_path / "plain.db"
    plain.write_bytes(file.read_bytes())
    url = f"sqlite:///{plain}"
    assert contents(url) == contents(whole_url)
    assert done.rows == sum(map(len, contents(whole_url).values()))
    with Store.open(url) as copy:
        assert copy.maintenance.check() == []
        copy.measurements.record(measurement(configuration(99)))  # one can go on with it


def test_nothing_is_ever_overwritten(store, database_url, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("mine")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"mine\.txt is there already") as caught:
        back_up(database_url, file)
    assert caught.value.exit_status == 2
    assert file.read_text() == "mine"
    assert [p for p in sorted(tmp_path.iterdir()) if "labels.db-" not in p.name] == [
        p for p in before if "labels.db-" not in p.name
    ]


@pytest.mark.parametrize("place", ["/proc/copy.db", "nowhere/copy.db"])
def test_where_nothing_can_be_written_is_told(store, database_url, tmp_path, place):
    with pytest.raises(InputError, match=r"copy\.db cannot be written"):
        back_up(database_url, tmp_path / place)


@pytest.mark.parametrize("databases", ["sqlite"], indirect=True)
def test_a_damaged_store_is_not_taken_for_a_copy(whole_url, tmp_path):
    with sqlite3.connect(make_url(whole_url).database) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_schema SET rootpage = 3 WHERE name = 'labels'")
    connection.close()
    with pytest.raises(StoreError):
        back_up(whole_url, tmp_path / "copy.db")
    assert not [p for p in tmp_path.iterdir() if "copy" in p.name]


@pytest.mark.parametrize("databases", ["postgresql"], indirect=True)
def test_a_postgresql_store_of_an_older_schema_is_told(databases, database_url, tmp_path):
    with databases.new(tmp_path) as empty, pytest.raises(StoreError, match="empty database"):
        back_up(empty, tmp_path / "copy.db")
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    engine.dispose()
    with pytest.raises(StoreError, match="trappm labels export"):
        back_up(database_url, tmp_path / "copy.db")
    assert list(tmp_path.iterdir()) == []


def test_a_copy_made_while_another_process_writes_is_of_one_moment(store, database_url, tmp_path):
    """All that was acknowledged before it began is in it, and no half of anything."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=store_workers.record_for_ever, args=(database_url, theirs), daemon=True
    )
    process.start()
    theirs.close()
    try:
        acknowledged = 0
        for number in range(4):
            assert ours.poll(PATIENCE_S)
            while ours.poll(0):
                ours.recv()
                acknowledged += 1
            file = tmp_path / f"copy{number}.db"
            back_up(database_url, file)
            with Store.open(f"sqlite:///{file}") as copy:
                assert copy.maintenance.check() == []
                assert copy.maintenance.stats().rows["labels"] >= acknowledged
                # The writer goes through batch sizes one by one: a copy has all up to its moment.
                sizes = sorted(label.configuration.batch_size for label in copy.labels.matching())
                assert sizes == list(range(1, len(sizes) + 1))
        assert ours.poll(PATIENCE_S), "the writer was not held up"
    finally:
        process.kill()
        process.join()


KILLED = """
import os, signal, sys
from pathlib import Path
from trappm.store.exchange import files
from trappm.store.maintenance import backup, upgrade

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

backup._verify = die
what, url, file = sys.argv[1:]
if what == "backup":
    backup.back_up(url, Path(file))
elif what == "upgrade":
    upgrade.upgrade_store(url)
else:
    files.export_file(map(die, [1]), Path(file))
"""


def killed(*arguments):
    command = [sys.executable, "-c", KILLED, *map(str, arguments)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize("what", ["backup", "export"])
def test_a_killed_writer_leaves_nothing_of_the_name_and_the_next_one_clears_up(
    whole_url, tmp_path, what
):
    file = tmp_path / "copies" / "copy.jsonl"
    file.parent.mkdir()
    for _ in range(2):  # the same name is not refused
        killed(what, whole_url, file)
        assert not file.exists()
        assert len(list(file.parent.iterdir())) == 1
    back_up(whole_url, file)
    assert list(file.parent.iterdir()) == [file]


def test_a_copy_that_is_still_being_made_is_not_cleared(whole_url, tmp_path):
    first = tmp_path / "first.db"
    with contextlib.suppress(FileExistsError), made_whole(first, replace=False) as part:
        part.write_text("half")
        back_up(whole_url, tmp_path / "second.db")
        assert part.read_text() == "half"
        first.write_text("somebody was quicker")
    assert first.read_text() == "somebody was quicker"
    assert not part.exists()
