"""An empty data folder for the tests of a file, so that a model is traced once."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("TRAPPM_HOME", str(folder))
        yield folder
