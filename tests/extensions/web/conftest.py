"""A server of its own for a file's tests, over an empty data folder."""

import pytest
from serving_samples import Asker


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAPPM_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def server(home):
    with Asker() as asker:
        yield asker
