"""The examples in the docstrings of entry points run as they stand."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

from trappm.store import Home, Store

ROOT = Path(__file__).parents[1]
PACKAGES = ("cluster", "learner", "profiler", "store", "trappm")


def modules_with_examples():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if re.search(r"^ *>>> ", path.read_text(), re.MULTILINE):
                parts = path.relative_to(ROOT).with_suffix("").parts
                parts = parts if package == "trappm" else ("trappm", *parts)
                yield ".".join(parts).removesuffix(".__init__")


ENTRY_POINTS = list(modules_with_examples())


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    Store.open(Home.open().database_url).close()  # LabelStore reads one that exists
    result = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted
    assert not result.failed
