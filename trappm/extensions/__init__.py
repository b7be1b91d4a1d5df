"""Extensions: features outside the mission; deleting the folder of one removes the feature."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import find_spec

import typer


def register_all(app: typer.Typer) -> None:
    """Add the commands of every extension that is there.

    An extension with commands has a module `commands` with a function `register(app)`.
    """
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        if find_spec(f"{module.name}.commands") is not None:
            import_module(f"{module.name}.commands").register(app)
