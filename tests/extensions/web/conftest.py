"""A server of its own for a file's tests, over an empty data folder."""

import pytest
from serving_samples import Asker


@pytest.fixture(scope="module")
def home(module_home):
    return module_home


@pytest.fixture(scope="module")
def server(home):
    with Asker() as asker:
        yield asker
