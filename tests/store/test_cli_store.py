"""`trappm store`: output, exit status, and that no password is ever shown."""

import json
import logging
import secrets
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import store_whole
from guarded_postgresql import PASSWORD, guard

from trappm import cli
from trappm.store import Home
from trappm.store.schema import SCHEMA

SECRET = "hunter2secret"  # noqa: S105
STORES = Path(__file__).parent / "db" / "stores"
COMMANDS = (["upgrade"], ["upgrade", "--check"])


@pytest.fixture
def home(sqlite_databases, tmp_path, monkeypatch):
    """A data folder with a whole store."""
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    Home.open()
    with sqlite_databases.copy(tmp_path / "home", store_whole.fill):
        return tmp_path / "home"


@pytest.fixture
def run(capfd, caplog, tmp_path):
    caplog.set_level(logging.INFO)

    def run(*arguments, debug=False):
        """Exit status, standard output, standard error of `trappm store ...`, and what it logs."""
        caplog.clear()
        status = cli.run(["store", *map(str, arguments)], debug=debug)
        captured = capfd.readouterr()
        return status, captured.out, captured.err, caplog.text

    return run


def test_a_sound_and_current_store_has_no_damage_and_nothing_to_do(home, run):
    status, out, err, _ = run("upgrade", "--check")
    assert (status, err) == (0, "")
    assert out == f"sqlite:///{home}/labels.db: no damage found\n"
    assert json.loads(run("upgrade", "--check", "--json")[1]) == []
    assert json.loads(run("upgrade", "--json")[1])["schema"] == SCHEMA


def test_upgrade_of_an_older_store_says_from_which_schema_to_which(tmp_path, run):
    path = tmp_path / "labels.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((STORES / "0018_sqlite.sql").read_text("utf-8"))
    database = ["--database", f"sqlite:///{path}"]
    status, out, err, _ = run("upgrade", "--check", *database)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "upgrade it with: trappm store upgrade" in err
    status, out, err, _ = run("upgrade", *database)
    assert (status, err) == (0, "")
    assert out == f"sqlite:///{path} is upgraded from schema 0018 to {SCHEMA}\n"
    assert run("upgrade", "--check", *database)[0] == 0


def test_check_reports_a_damaged_file(home, run):
    path = home / "labels.db"
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT rootpage FROM sqlite_schema WHERE name = 'ix_labels_device_id'"
        ((page,),) = connection.execute(query)
        ((size,),) = connection.execute("PRAGMA page_size")
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    status, out, err, _ = run("upgrade", "--check")
    assert (status, err) == (1, "")
    assert "is damaged" in out


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_missing_store_is_reported_and_not_created(tmp_path, monkeypatch, run, command):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    status, out, err, _ = run(*command)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "there is no label store at" in err
    assert "TRAPPM_DATABASE" in err
    assert list(tmp_path.iterdir()) == []


def test_output_shows_no_password(run, postgresql_server):
    url = guard(postgresql_server, f"guarded_{secrets.token_hex(4)}")
    right = url.set(password=PASSWORD).render_as_string(hide_password=False)
    output = ""
    for command in COMMANDS:
        for more in ([], ["--json"]):
            status, out, err, logged = run(*command, *more, "--database", right)
            assert (status, err) == (0, "")
            output += out + logged
    assert url.database in output
    assert PASSWORD not in output
    wrong = url.set(password=SECRET).render_as_string(hide_password=False)
    for debug in (False, True):
        status, out, err, logged = run("upgrade", "--check", "--database", wrong, debug=debug)
        assert (status, out) == (2, "")
        assert "password authentication failed" in err
        assert SECRET not in err + logged
