"""What every test starts from: no label store of the developer's own, and every core."""

import os

import pytest

os.environ.pop("TRAPPM_DATABASE", None)
_CORES = os.sched_getaffinity(0)


@pytest.fixture(autouse=True)
def every_core():
    """Preparing a CPU device keeps a process to its cores: right for a child, not for us."""
    yield
    os.sched_setaffinity(0, _CORES)
