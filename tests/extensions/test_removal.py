"""Deleting the folder of an extension removes the feature and breaks nothing else."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("profiler", "learner", "store", "cluster", "trappm")
READ_BY_TESTS = ("research", "docs", "examples")
TESTS = [f"tests/{part}" for part in (*PACKAGES, "extensions")]
EXTENSIONS = sorted(path.parent.name for path in ROOT.glob("trappm/extensions/*/__init__.py"))
CORE = """
import pkgutil, sys
from importlib import import_module
import trappm
for module in pkgutil.walk_packages(trappm.__path__, "trappm."):
    # Only alembic can run its `env`.
    if not module.name.startswith(("trappm.extensions.", "trappm.store.migrations.env")):
        import_module(module.name)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the sources, with the metadata that an installation writes."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copy(ROOT / "pyproject.toml", folder)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = folder / f"trappm-{project['version']}.dist-info"
    metadata.mkdir()
    head = f"Metadata-Version: 2.4\nName: trappm\nVersion: {project['version']}\n"
    (metadata / "METADATA").write_text(head)
    entries = project["entry-points"]["trappm.extensions"].items()
    lines = [f"{name} = {package}\n" for name, package in entries]
    (metadata / "entry_points.txt").write_text("[trappm.extensions]\n" + "".join(lines))
    for name in (*PACKAGES, *READ_BY_TESTS, "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    return folder


def finished(tree, *arguments):
    environment = os.environ | {"PYTHONPATH": str(tree), "TRAPPM_HOME": str(tree / "home")}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


def run(tree, *arguments):
    done = finished(tree, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", EXTENSIONS)
def test_the_core_works_without_an_extension(tree, tmp_path, name):
    folder = tree / "trappm/extensions" / name
    shutil.move(folder, tmp_path / name)
    try:
        run(tree, "-c", CORE)
        command = ("-c", "from trappm.cli import main; main()")
        assert "predict" in run(tree, *command, "--help")
        answer = run(tree, *command, "predict", "resnet18", "--batch-size", "4", "--device", "a100")
        assert "A100 40 GB" in answer
        own = f"--ignore=tests/extensions/{name}"
        run(tree, "-m", "pytest", "--collect-only", "-q", own, *TESTS)
    finally:
        shutil.move(tmp_path / name, folder)
