"""Extensions: packages that add features to the core, from this distribution or any other.

A distribution names its extensions as entry points of the group `trappm.extensions`, each with the
path of a package. The core imports no extension by name. Where a feature can be added, the core
asks every extension for a module of one name and uses what it defines:

    model_names    names with a prefix, such as `hf:gpt2` (`models.known_names.ModelNames`)
    model_files    models in files, such as ONNX (`trappm.prediction.models.file_tracer`)
    model_heads    heads for models of such a source (`prediction.selection`)
    device_kinds   devices of several members, such as `a100x4` (`profiler.devices`)
    step_power     power of a step by its kernels, and under a limit (`prediction.answer`)
    commands       commands of the command line
    functions      functions of `import trappm`: their modules by name in `FUNCTIONS`

These modules import optional libraries inside functions, so one that is not installed only
disables its own feature. The lookup runs once per process, also in Ray workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_GROUP = "trappm.extensions"


@cache
def extension_modules(name: str) -> tuple[ModuleType, ...]:
    """Import the module of this name from every extension that has one, sorted by extension."""
    paths = (f"{package}.{name}" for package in _packages())
    return tuple(import_module(path) for path in paths if find_spec(path) is not None)


def extension_folders() -> Iterator[Path]:
    """Yield the folders of all installed extensions."""
    for package in _packages():
        spec = find_spec(package)
        yield from map(Path, (spec and spec.submodule_search_locations) or ())


@cache
def _packages() -> tuple[str, ...]:
    """Return the packages of the installed extensions; one whose folder was deleted is left out."""
    entries = sorted(entry_points(group=_GROUP), key=lambda entry: entry.name)
    return tuple(dict.fromkeys(entry.value for entry in entries if _exists(entry.value)))


def _exists(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # a package that this one lies in is missing
        return False
