"""Extensions are found by the entry points of any distribution on Python's path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRIES = """
[trappm.extensions]
theirs = their_extension
deleted = trappm.extensions.deleted
nowhere = nowhere.at.all
"""
COMMANDS = '''
def register(app):
    @app.command()
    def greet() -> None:
        """Greet the user."""
        print("hello from their extension")
'''


@pytest.fixture
def run(tmp_path):
    """Run a command where another distribution has an extension, and two without a package."""
    metadata, package = tmp_path / "theirs-1.0.dist-info", tmp_path / "their_extension"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.4\nName: theirs\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRIES)
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "commands.py").write_text(COMMANDS)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])

    def run(*words, program="from trappm.cli import main; main()"):
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            env=os.environ | {"PYTHONPATH": path, "TRAPPM_HOME": str(tmp_path / "home")},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_an_extension_of_another_distribution_is_found(run):
    """And entries whose packages are missing are skipped."""
    assert run("greet") == "hello from their extension\n"


def test_cached_answers_depend_on_extensions_of_others(run, tmp_path):
    program = "from trappm.prediction import predict; print(predict._code())"
    assert str(tmp_path / "their_extension" / "commands.py") in run(program=program)
