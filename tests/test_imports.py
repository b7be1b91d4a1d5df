"""Import checks that import-linter and ruff (pyproject.toml) do not have, and quick imports."""

import json
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for package in ("profiler", "store", "learner", "cluster", "trappm")
    for path in sorted((ROOT / package).rglob("*.py"))
]


def test_every_folder_is_a_package():
    """import-linter and the wheel leave out a folder without `__init__.py`."""
    for folder in {path.parent for path in SOURCES}:
        assert (folder / "__init__.py").is_file(), folder


def test_no_circle_of_modules():
    """import-linter compares siblings, not a package with its own modules."""
    graph = grimp.build_graph("trappm", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()


def test_arrays_are_read_without_pickle():
    for path in SOURCES:
        assert not re.search(r"allow_pickle\s*=\s*(?!False\b)", path.read_text()), path


def _python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _loaded(module: str) -> set[str]:
    return set(
        json.loads(_python(f"import json, sys, {module}; print(json.dumps([*sys.modules]))"))
    )


def test_heads_predict_without_scipy():
    assert "scipy" not in _loaded("trappm.prediction.answer")


@pytest.mark.parametrize(
    "module", ["trappm", "trappm.profiler.records", "trappm.profiler.errors", "trappm.store"]
)
def test_quick_imports_load_nothing_heavy(module):
    loaded = _loaded(module)
    heavy = {
        "torch", "timm", "torchvision", "torch_geometric", "onnx", "onnx_tool", "ray", "pandas",
        "fastapi", "pydantic",
    }  # fmt: skip
    assert loaded & heavy == set()
    assert module in loaded
