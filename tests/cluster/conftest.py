"""What the tests of the campaign loop share."""

import pytest

from store import Store


@pytest.fixture
def store(tmp_path):
    with Store.open(f"sqlite:///{tmp_path / 'labels.db'}") as opened:
        yield opened
