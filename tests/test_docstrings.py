"""The examples in the docstrings of entry points run as they stand."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

from trappm.store import Home, Store

ENTRY_POINTS = [
    "trappm", "trappm.campaigns", "trappm.cluster.campaign.next_job", "trappm.cluster.spec",
    "trappm.extensions.transformers.generation", "trappm.label_store",
    "trappm.learner.heads.physics_heads", "trappm.learner.snapshots.registry",
    "trappm.learner.stats.calibration", "trappm.prediction.predict",
    "trappm.profiler.measuring.isolation", "trappm.profiler.memory.simulation",
    "trappm.profiler.trace", "trappm.store.label_filter", "trappm.store.store",
]  # fmt: skip


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    Store.open(Home.open().database_url).close()  # LabelStore reads one that exists
    result = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted
    assert not result.failed
