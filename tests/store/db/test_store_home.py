"""The data folder: found, made, and refused when it cannot be used."""

from pathlib import Path

import pytest
from store_samples import measurement

from trappm import cli
from trappm.profiler.errors import InputError
from trappm.store import Home, Store
from trappm.store.files import export_file


@pytest.fixture(autouse=True)
def _only_what_a_test_names(monkeypatch):
    monkeypatch.delenv("TRAPPM_DATABASE", raising=False)


def test_the_folder_in_the_environment_is_created(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "a" / "b"))
    home = Home.open()
    assert home.path == tmp_path / "a" / "b"
    for folder in (home.path, home.snapshots, home.campaigns):
        assert folder.is_dir()
    assert Home.open() == home
    assert {p.name for p in home.path.iterdir()} == {"snapshots", "campaigns"}


@pytest.mark.parametrize("value", [None, ""])
def test_the_default_folder_is_in_the_users_data_folder(tmp_path, monkeypatch, value):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("TRAPPM_HOME", raising=False)
    if value is not None:
        monkeypatch.setenv("TRAPPM_HOME", value)
    assert Home.open().path == tmp_path / "trappm"


def test_an_unusable_folder_is_refused_with_advice(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("mine")
    for named in (path / "below", Path("/proc/trappm")):
        monkeypatch.setenv("TRAPPM_HOME", str(named))
        with pytest.raises(InputError, match=f"{named}.* cannot be written to .*set TRAPPM_HOME"):
            Home.open()
    assert path.read_text() == "mine"


def test_the_database_url_is_read_from_the_environment_or_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    assert Home.open().database_url.endswith("/labels.db")
    (tmp_path / "database_url").write_text("postgresql+psycopg://user@host/labels\n")
    assert Home.open().database_url == "postgresql+psycopg://user@host/labels"
    monkeypatch.setenv("TRAPPM_DATABASE", "sqlite:////elsewhere.db")
    assert Home.open().database_url == "sqlite:////elsewhere.db"
    monkeypatch.setenv("TRAPPM_DATABASE", "")
    assert Home.open().database_url == "postgresql+psycopg://user@host/labels"


@pytest.mark.parametrize("content", [b"", b"a://me:hidden@h/\nb://", b"\xff"])
def test_an_invalid_database_url_file_is_refused_without_its_content(
    tmp_path, monkeypatch, content
):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    (tmp_path / "database_url").write_bytes(content)
    with pytest.raises(InputError, match="database_url") as caught:
        _ = Home.open().database_url
    assert "hidden" not in str(caught.value)


def test_commands_use_the_configured_database(empty_database_url, tmp_path, monkeypatch, capsys):
    home, sheet = tmp_path / "home", tmp_path / "one.jsonl"
    export_file([measurement()], sheet)
    monkeypatch.setenv("TRAPPM_HOME", str(home))
    monkeypatch.setenv("TRAPPM_DATABASE", empty_database_url)
    for command in ("campaign status", "snapshot show"):  # no store yet, so no rows
        assert cli.run(command.split()) == 0
    assert cli.run(["labels", "import", str(sheet)]) == 0
    assert cli.run(["labels", "query", "--json"]) == 0
    assert '"provenance": "measured"' in capsys.readouterr().out
    assert not (home / "labels.db").exists()
    with Store.open_to_read(empty_database_url) as store:
        assert len(store.labels.find()) == 1
