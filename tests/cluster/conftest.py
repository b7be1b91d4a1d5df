"""What the tests of the campaign loop share."""

import shutil

import pytest

import trappm.store.engine
from trappm.store import Store


@pytest.fixture(scope="module", autouse=True)
def commits_are_not_synced():
    """No test here cuts the power, and most of a campaign's time is for the disk."""
    set_up = trappm.store.engine._set_up_sqlite

    def set_up_without_sync(connection, record):
        set_up(connection, record)
        connection.execute("PRAGMA synchronous = OFF")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trappm.store.engine, "_set_up_sqlite", set_up_without_sync)
        yield


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """A label store without anything in it: making one takes longer than most tests."""
    path = tmp_path_factory.mktemp("store") / "labels.db"
    with Store.open(f"sqlite:///{path}"):
        pass
    return path


@pytest.fixture
def new_store(tmp_path, empty_store):
    """The URL of a store of its own for each call."""
    count = iter(range(1000))

    def make():
        return f"sqlite:///{shutil.copy(empty_store, tmp_path / f'labels-{next(count)}.db')}"

    return make


@pytest.fixture
def store(new_store):
    with Store.open(new_store()) as opened:
        yield opened
