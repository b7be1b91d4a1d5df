"""Fixtures of made-up networks, and a label store on SQLite."""

import pytest
from network_zoo import build_network, measure, small, zoo

from trappm.store import Store

__all__ = ["build_network", "measure", "small", "zoo"]


@pytest.fixture
def database_url(tmp_path):
    return f"sqlite:///{tmp_path}/labels.db"


@pytest.fixture
def store(database_url):
    with Store.open(database_url) as opened:
        yield opened
