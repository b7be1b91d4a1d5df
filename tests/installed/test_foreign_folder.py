"""In a project with packages of the same names as ours, both can be imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("profiler", "store", "learner", "cluster")

THEIRS = f"""
import sys, pathlib
import trappm, trappm.store, trappm.cluster.spec
import {", ".join(ROOMS)}
from store import NAME
assert NAME == "the store of somebody else", NAME
assert trappm.cluster.spec.load_preset("laptop").name == "laptop"
theirs = {{pathlib.Path(m.__file__).parents[1] for m in ({", ".join(ROOMS)})}}
(folder,) = theirs
print(folder, pathlib.Path(trappm.__file__).parent)
"""
"""Prints where all of theirs are, and where ours is."""


def make_foreign(folder):
    """Such a project in this folder."""
    for room in ROOMS:
        (folder / room).mkdir()
        (folder / room / "__init__.py").write_text(f'NAME = "the {room} of somebody else"\n')
        (folder / room / "__main__.py").write_text(f'print("the {room} of somebody else")\n')
    return folder


ANYHOW = "import sys; from trappm.cli import run; run(sys.argv[1:])"
"""Runs a command, which may fail."""


@pytest.fixture
def run(tmp_path):
    """Runs Python in that project's folder, with the checkout alone on the path."""
    folder = make_foreign(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=environment, text=True,
            capture_output=True, timeout=280, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_packages_of_equal_names_can_be_imported(run, tmp_path):
    assert run("-c", THEIRS).split() == [str(tmp_path), str(ROOT / "trappm")]
    assert run("-m", "profiler") == "the profiler of somebody else\n"


def test_measuring_processes_use_our_packages(run):
    """Fork servers and their children start from the path of whoever started them."""
    options = ("--device", "cpu-1t", "--input-size", "64", "--protocol", "quick", "--json")
    measured = json.loads(run("-c", ANYHOW, "measure", "test_resnet", *options))
    # Others on the machine may make it unstable, but it was measured.
    assert measured["outcome"] in {"ok", "unstable"}, measured["message"]
    assert measured["memory_mib"] > 0
