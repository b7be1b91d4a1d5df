"""timm's names without timm: what it has no model for is told before seconds go into importing it.

The names stand in timm's source, at the functions that it registers. What is doubtful passes: timm
itself is asked about it later.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from trappm.profiler.errors import UnknownArchitectureError
from trappm.profiler.nearest import nearest
from trappm.profiler.transformers.names import PREFIX, content_of, is_transformer, shape_like

WILD = "*?["
"""Marks of a glob."""
_WEIGHTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
"""Ends of files that hold weights, or Python objects."""
_OF_PYTHON = ("torchvision.", "models.", "torch.", "timm.", "transformers.")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_REGISTERED = re.compile(r"^@register_model\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)


def is_file(model: str) -> bool:
    """Return whether this is the path of an ONNX file, not the name of an architecture."""
    if is_transformer(model) or (is_hub_id(model) and shape_like(model)):
        return False
    return model.endswith(".onnx") or os.sep in model


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form of an id of the Hub, such as `org/model`."""
    return bool(_HUB_ID.fullmatch(name)) and not name.endswith(".onnx")


def refuse_weights(name: str) -> None:
    """Raise UnknownArchitectureError for a file of weights; with what to give instead."""
    if name.endswith(_WEIGHTS):
        raise UnknownArchitectureError(
            f"{name} holds weights, not a step; export the model with torch.onnx.export(model, "
            "images, 'model.onnx') and give that file, or call trappm.predict(module, "
            "example_input=images) in Python"
        )


def refuse_unknown(name: str) -> None:
    """Raises InputError: there is no such model; with the nearest spellings."""
    if is_transformer(name):
        content_of(name)
        return
    refuse_weights(name)
    sources = () if "timm" in sys.modules else _sources()
    if not sources:
        return  # it answers quickly itself, or not at all
    bare = name.partition(".")[0].removeprefix("ig_")
    marks = (f"def {bare}(", f"'{bare}'", f'"{bare}"', f"'{bare}.", f'"{bare}.')
    if any(mark in source for source in sources for mark in marks):
        return  # a model, or the old name of one
    names = registered_names()
    if names and not any(mark in name for mark in WILD):
        raise unknown_architecture(name, names)


@cache
def registered_names() -> frozenset[str]:
    """The names that timm's sources register; none where timm is not installed."""
    return frozenset(name for source in _sources() for name in _REGISTERED.findall(source))


@cache
def _sources() -> tuple[str, ...]:
    """Of the modules that register timm's models."""
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        return ()
    files = (Path(spec.origin).parent / "models").glob("*.py")
    return tuple(path.read_text(encoding="utf-8") for path in files)


def unknown_architecture(name: str, names: Iterable[str]) -> UnknownArchitectureError:
    """The error for a name that is none of timm's, with the nearest of these."""
    known = sorted(names)
    like = shape_like(name)
    hint = nearest(name, known, otherwise="timm.list_models() lists them all")
    if name.startswith(_OF_PYTHON):
        called = name.removesuffix("()")
        hint = f"call trappm.predict({called}(), example_input=images) in Python"
        if near := nearest(called.rpartition(".")[2], known, otherwise=""):
            hint += f", or give a name: {near}"
    elif like is not None:
        hint = f"did you mean '{PREFIX}{like}'?"
    return UnknownArchitectureError(f"timm has no architecture {name!r}; {hint}")
