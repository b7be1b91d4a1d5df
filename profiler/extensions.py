"""Extensions: packages in `trappm/extensions` that add features to the core.

The core imports no extension by name. Where a feature can be added, the core asks every extension
for a module of one name and uses what it defines:

    model_names    names of models with a prefix, such as `hf:gpt2` (`models.sources.ModelNames`)
    model_heads    heads for models of such a source (`trappm.prediction`)
    device_kinds   devices of several members, such as `a100x4` (`devices.device_kinds`)
    commands       commands of the command line
    public_names   names that `trappm` offers in Python

These modules import optional libraries inside functions, so one that is not installed only
disables its own feature. The lookup runs once per process, also in Ray workers.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType

_FOLDER = "trappm.extensions"


@cache
def extension_modules(name: str) -> tuple[ModuleType, ...]:
    """Import the module of this name from every extension that has one, sorted by extension."""
    folder = find_spec(_FOLDER)
    locations = folder.submodule_search_locations if folder is not None else None
    packages = sorted(module.name for module in iter_modules(locations or []) if module.ispkg)
    paths = (f"{_FOLDER}.{package}.{name}" for package in packages)
    return tuple(import_module(path) for path in paths if find_spec(path) is not None)
