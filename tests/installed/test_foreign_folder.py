"""In a project with packages of the same names as ours, both can be imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from foreign_folder import THEIRS, make_foreign

ROOT = Path(__file__).parents[2]
MAIN = "from trappm.cli import main; main()"
ANYHOW = "import sys; from trappm.cli import run; run(sys.argv[1:])"
"""Runs a command, which may fail."""


@pytest.fixture(params=["installed", "a checkout on the path"])
def run(request, tmp_path):
    """Runs Python in that project's folder, as it is installed here, or with the checkout alone."""
    folder = make_foreign(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if request.param != "installed":
        environment["PYTHONPATH"] = str(ROOT)

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


@pytest.mark.parametrize("run", ["a checkout on the path"], indirect=True)
def test_measuring_processes_use_our_packages(run, tmp_path):
    """Fork servers and their children start from the path of whoever started them."""
    options = ("--device", "cpu-1t", "--input-size", "64", "--protocol", "quick", "--json")
    measured = json.loads(run("-c", ANYHOW, "measure", "test_resnet", *options))
    # Others on the machine may make it unstable, but it was measured.
    assert measured["outcome"] in {"ok", "unstable"}, measured["message"]
    assert measured["memory_mib"] > 0


def test_a_checkout_measures_without_installation():
    """A GPU node has the files, and the core dependencies alone are installed."""
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "measure", "--devices"],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "cpu-1t" in done.stdout
