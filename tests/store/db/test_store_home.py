"""The data folder: found, made, and refused when it cannot be used."""

from __future__ import annotations

import json

import pytest
from store_samples import measurement

from trappm import cli
from trappm.profiler.errors import InputError
from trappm.store import Home, Store
from trappm.store.files import export_file


@pytest.fixture(autouse=True)
def _only_what_a_test_names(monkeypatch):
    monkeypatch.delenv("TRAPPM_DATABASE", raising=False)


def test_the_folder_that_the_variable_names_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "a" / "b"))
    home = Home.open()
    assert home.path == tmp_path / "a" / "b"
    for folder in (home.path, home.snapshots, home.campaigns):
        assert folder.is_dir()
    assert Home.open() == home
    assert {p.name for p in home.path.iterdir()} == {"snapshots", "campaigns"}


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_it_is_the_users(tmp_path, monkeypatch, value):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("TRAPPM_HOME", raising=False)
    if value is not None:
        monkeypatch.setenv("TRAPPM_HOME", value)
    assert Home.open().path == tmp_path / "trappm"


def test_a_relative_folder_stays_the_same_wherever_one_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAPPM_HOME", "here")
    assert Home.open().path == tmp_path / "here"


@pytest.mark.parametrize("name", ["plain", "with space", "50% & more?", "a#b", "naïve"])
def test_any_path_can_hold_a_store(tmp_path, monkeypatch, name):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / name))
    home = Home.open()
    Store.open(home.database_url).close()
    assert home.database_path.is_file()


def test_a_file_is_no_folder(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("mine")
    for named in (path, path / "below"):
        monkeypatch.setenv("TRAPPM_HOME", str(named))
        with pytest.raises(InputError, match=f"cannot be written to .*{path}.*set TRAPPM_HOME"):
            Home.open()
    assert path.read_text() == "mine"


@pytest.mark.parametrize("folder", ["/proc", "/proc/trappm"])  # where even root can make nothing
def test_a_folder_that_cannot_be_written_is_told_with_what_to_do(monkeypatch, folder):
    monkeypatch.setenv("TRAPPM_HOME", folder)
    with pytest.raises(InputError, match=rf"{folder} cannot be written to .*set TRAPPM_HOME") as e:
        Home.open()
    assert e.value.exit_status == 2


def test_another_database_is_named_by_the_variable_or_else_by_a_file_of_the_folder(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    assert Home.open().database_url.endswith("/labels.db")
    (tmp_path / "database_url").write_text("postgresql+psycopg://user@host/labels\n")
    assert Home.open().database_url == "postgresql+psycopg://user@host/labels"
    monkeypatch.setenv("TRAPPM_DATABASE", "sqlite:////elsewhere.db")
    assert Home.open().database_url == "sqlite:////elsewhere.db"
    monkeypatch.setenv("TRAPPM_DATABASE", "")
    assert Home.open().database_url == "postgresql+psycopg://user@host/labels"


@pytest.mark.parametrize("content", [b"", b"  \n", b"a://me:hidden@h/\nb://", b"\xff"])
def test_a_file_that_names_no_database_is_told_without_what_stands_in_it(
    tmp_path, monkeypatch, content
):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    (tmp_path / "database_url").write_bytes(content)
    with pytest.raises(InputError, match="database_url") as caught:
        _ = Home.open().database_url
    assert "hidden" not in str(caught.value)


def test_every_command_works_on_the_database_that_is_named(
    empty_database_url, tmp_path, monkeypatch, capsys
):
    home, sheet = tmp_path / "home", tmp_path / "one.jsonl"
    export_file([measurement()], sheet)
    monkeypatch.setenv("TRAPPM_HOME", str(home))
    monkeypatch.setenv("TRAPPM_DATABASE", empty_database_url)
    for command in ("campaign status", "snapshot show"):  # no store yet, so no rows
        assert cli.run(command.split()) == 0
    what = ["resnet18", "--input-size", "64", "--device", "cpu-2t", "--json"]
    assert cli.run(["labels", "import", str(sheet)]) == 0
    assert cli.run(["labels", "query", "--json"]) == 0
    assert '"provenance": "measured"' in capsys.readouterr().out
    assert cli.run(["predict", *what, "--labels"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["source"] == "measured"
    assert cli.run(["store", "upgrade", "--check"]) == 0
    assert not (home / "labels.db").exists()
    with Store.open_to_read(empty_database_url) as store:
        assert len(store.labels.matching()) == 1
