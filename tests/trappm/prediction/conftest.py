"""An empty data folder for the tests of a file, so that a model is traced once."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def home(module_home):
    return module_home
