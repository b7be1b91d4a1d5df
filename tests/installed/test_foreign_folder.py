"""In a project with packages of the same names as ours, both can be imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from foreign_folder import THEIRS, make_foreign

ROOT = Path(__file__).parents[2]
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
