"""Import order, import cycles, libraries and the packages that may use them, quick imports.

The order and the walls are those of docs/architecture.md. Sources are parsed, not imported, so that
an import inside a function counts as well.
"""

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "profiler": set(),
    "store": {"profiler"},
    "learner": {"profiler"},
    "cluster": {"profiler", "store", "learner"},
    "trappm": {"profiler", "store", "learner", "cluster"},
}

# Which rooms know a library; every other room asks them.
HOMES = {
    "ray": {"cluster"},
    "pydantic": {"store", "cluster", "learner", "trappm"},
    "fastapi": {"trappm"},
    "starlette": {"trappm"},
    "uvicorn": {"trappm"},
    "prometheus_client": {"trappm"},
    "sqlalchemy": {"store"},
    "timm": {"profiler"},
    "torchvision": {"profiler"},
    "onnx": {"trappm"},
    "onnx_tool": set(),
    "pynvml": {"profiler"},
    "torch_geometric": {"learner"},
    "optuna": {"trappm"},
    "sklearn": set(),
    "xgboost": {"learner"},
    "matplotlib": {"trappm"},
    "typer": {"trappm"},
    "rich": {"trappm"},
    "plotext": {"trappm"},
}

# Within a room: the folders that know a library.
FOLDERS = {
    "fastapi": {"trappm/extensions/web", "trappm/extensions/web/page"},
    "starlette": {"trappm/extensions/web", "trappm/extensions/web/page"},
    "uvicorn": {"trappm/extensions/web"},
    "prometheus_client": {"trappm/extensions/web"},
    "onnx": {"trappm/extensions/onnx"},
    "optuna": {"trappm/extensions/integrations"},
}

# What could run code out of a file that it reads.
CODE_RUNNERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CODE_RUNNING_CALLS = {"torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
CODE_RUNNING_CALLS |= {"pandas.read_pickle", "pd.read_pickle", "eval", "exec"}


RESEARCH = "research"
"""Top-level package outside the wheel, which no room imports."""


def violations(room: str, source: str) -> list[str]:
    """What a module of `room` with this source does that the rules forbid."""
    breaches = []
    for node in ast.walk(ast.parse(source)):
        for name in _imported(node):
            top = name.split(".")[0]
            inner = _room(name)
            if top == RESEARCH or inner not in {None, room} | MAY_IMPORT[room]:
                breaches.append(f"line {node.lineno}: {room} may not import {name}")
            if top in MAY_IMPORT and top != "trappm":
                breaches.append(f"line {node.lineno}: {name} is only known as trappm.{name}")
            if room not in HOMES.get(top, {room}):
                breaches.append(f"line {node.lineno}: {name} belongs to {sorted(HOMES[top])}")
            if top in CODE_RUNNERS or name in CODE_RUNNING_CALLS:
                breaches.append(f"line {node.lineno}: {name} runs code from what it reads")
        if isinstance(node, ast.Call):
            pickles = {k for k in node.keywords if k.arg == "allow_pickle"}
            if ast.unparse(node.func) in CODE_RUNNING_CALLS or any(
                ast.unparse(k.value) != "False" for k in pickles
            ):
                breaches.append(f"line {node.lineno}: it runs code from what it reads")
    return breaches


def _room(name: str) -> str | None:
    """The room of a module of ours; None for anybody else's."""
    first, *rest = name.split(".")
    if first != "trappm":
        return None
    return rest[0] if rest and rest[0] in MAY_IMPORT else "trappm"


def _imported(node: ast.AST) -> Iterator[str]:
    """Dotted names of what a node imports: of modules, and of names taken from them."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"import_module", "importlib.import_module", "__import__"}
        and isinstance(node.args[0], ast.Constant)
    ):
        yield str(node.args[0].value)


def _sources() -> list[Path]:
    return sorted(path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_module_keeps_order_and_walls(path):
    room = path.relative_to(ROOT).parts[0]
    assert violations(room, path.read_text()) == []


def test_the_web_stays_in_its_folders():
    for path in _sources():
        folder = str(path.parent.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            for name in _imported(node):
                homes = FOLDERS.get(name.split(".")[0], {folder})
                assert folder in homes, f"{path}: {name} belongs to {sorted(homes)}"


def test_the_core_does_not_import_extensions():
    """The command line registers what is in their folder, and `trappm` offers public names."""
    for path in _sources():
        if path.is_relative_to(ROOT / "trappm/extensions") or path == ROOT / "trappm/__init__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = {name for name in _imported(node) if name.startswith("trappm.extensions")}
            assert not names, path


def _module(path: Path) -> str:
    """The dotted name of a source file of ours."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "trappm" else ("trappm", *parts))


@functools.cache
def _imports() -> dict[str, set[str]]:
    """Which modules of ours each of them imports, anywhere in its source."""
    sources = {_module(path): path for path in _sources()}
    imports: dict[str, set[str]] = {}
    for module, path in sources.items():
        names = {n for node in ast.walk(ast.parse(path.read_text())) for n in _imported(node)}
        ours = {n if n in sources else n.rpartition(".")[0] for n in names}
        imports[module] = ours & sources.keys() - {module}
    return imports


def test_no_circle_of_imports_or_folders():
    for imports in (_imports(), _folder_imports(_imports())):
        try:
            TopologicalSorter(imports).prepare()
        except CycleError as error:
            pytest.fail(" -> ".join(error.args[1]))


def _folder_imports(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Which folders' modules import those of which others, for folders side by side in a room.

    What lies in a room's own folder is left out: its lowest modules and its doors are there.
    """
    folders: dict[str, set[str]] = {}
    for module, names in imports.items():
        mine = FOLDER_OF[module]
        side_by_side = {
            other
            for other in (FOLDER_OF[name] for name in names)
            if len(other.parts) > 1 and not other.is_relative_to(mine)
            if not mine.is_relative_to(other)
        }
        if len(mine.parts) > 1:
            folders.setdefault(str(mine), set()).update(map(str, side_by_side))
    return folders


FOLDER_OF = {_module(path): path.parent.relative_to(ROOT) for path in _sources()}


def test_a_circle_of_folders_would_be_seen():
    imports = _imports()
    assert "cluster/scheduler" in _folder_imports(imports)["cluster/campaign"]
    imports["trappm.cluster.scheduler.messages"].add("trappm.cluster.campaign.loop")
    with pytest.raises(CycleError):
        TopologicalSorter(_folder_imports(imports)).prepare()


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_every_folder_says_what_it_is(room):
    folders = {path.parent for path in _sources() if path.is_relative_to(ROOT / room)}
    for folder in folders:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("profiler", "from trappm import store"),
        ("learner", "def late():\n    from research.evaluation import scores"),
        ("cluster", "import store"),
        ("learner", "import importlib\nimportlib.import_module('trappm.store')"),
        ("learner", "import timm.models"),
        ("trappm", "def late():\n    from ray import serve"),
        ("store", "import pickle"),
        ("learner", "import torch\ntorch.load('snapshot.pt')"),
        ("learner", "from torch import load"),
        ("cluster", "import yaml\nyaml.load(text, yaml.SafeLoader)"),
        ("learner", "import numpy as np\nnp.load(path, allow_pickle=True)"),
    ],
)
def test_a_breach_is_noticed(room, source):
    assert len(violations(room, source)) == 1


def _python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module", ["trappm", "trappm.profiler.records", "trappm.profiler.errors", "trappm.store"]
)
def test_quick_imports_load_nothing_heavy(module):
    loaded = set(
        json.loads(_python(f"import json, sys, {module}; print(json.dumps([*sys.modules]))"))
    )
    heavy = {
        "torch", "timm", "torchvision", "torch_geometric", "onnx", "onnx_tool", "ray", "pandas",
        "fastapi", "pydantic",
    }  # fmt: skip
    assert loaded & heavy == set()
    assert module in loaded
