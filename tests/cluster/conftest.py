"""What the tests of the campaign loop share."""

import shutil

import pytest

from trappm.store import Store


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
