"""Imports are quick and without circles, and `trappm` shows its public names."""

import json
import subprocess
import sys
from graphlib import TopologicalSorter

import grimp
import pytest

import trappm


def test_no_circle_of_modules():
    """import-linter compares siblings, not a package with its own modules."""
    graph = grimp.build_graph("trappm", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()


def test_dir_lists_only_public_names():
    public = {name for name in trappm.__all__ if not name.startswith("_")}
    assert {name for name in dir(trappm) if not name.startswith("_")} == public


HEAVY = {
    "torch", "timm", "torchvision", "torch_geometric", "onnx", "onnx_tool", "ray", "pandas",
    "fastapi", "pydantic",
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("trappm", HEAVY),
        ("trappm.profiler.records", HEAVY),
        ("trappm.store", HEAVY),
        ("trappm.prediction.answer", {"scipy"}),
        ("trappm.cluster.campaign.rules", {"torch", "ray"}),
        ("trappm.cluster.launch", {"torch", "ray"}),  # for pause, cancel and resume
    ],
)
def test_quick_imports_load_nothing_heavy(module, heavy):
    code = f"import json, sys, {module}; print(json.dumps([*sys.modules]))"
    loaded = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    assert heavy.isdisjoint(loaded)
    assert module in loaded
