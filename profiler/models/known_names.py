"""Names of models, read without importing timm or another library, which takes seconds.

A name without a prefix is one of timm's, which are read from its source. A name that may be valid
passes here, and timm checks it later. Models of other sources are `PREFIX:NAME`, then options after
commas: `hf:llama-2-7b,lora=16`. An extension adds a source with its module `model_names`. Users'
modules are `package.module:function` (`own_modules`).
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from trappm.profiler.errors import MissingLibraryError, UnknownArchitectureError, nearest
from trappm.profiler.extensions import extension_modules
from trappm.profiler.models.own_modules import is_own_module, with_version, without_version
from trappm.profiler.records import unit_by_name

WILD = "*?["
"""Marks of a glob."""
_WEIGHTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
"""Ends of files that hold weights, or Python objects."""
_OF_PYTHON = ("torchvision.", "models.", "torch.", "timm.", "transformers.")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_PREFIX = re.compile(r"[a-z]\w*:")
_REGISTERED = re.compile(r"^@register_model\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)

_FORMER = re.compile(r"register_model_deprecations\(__name__, \{(.*?)\n?\}\)", re.DOTALL)
_FORMER_NAME = re.compile(r"^\s*['\"]([\w.]+)['\"]\s*:", re.MULTILINE)


class AdaptedName(NamedTuple):
    """Name of a model that trains adapters only."""

    option: str
    """Option of the name, such as `lora=16`."""
    name: str
    python: tuple[str, ...]
    """Lines of Python that load and adapt the model."""


class ModelNames(Protocol):
    """Names of a source with a prefix, read without importing its library; a module is one."""

    PREFIX: str
    """Prefix of the names, with its colon."""
    SOURCE: str
    """Module that is a `ModelSource`; importing it raises InputError without its library."""

    def content_of(self, architecture: str, /) -> str:
        """Return what defines the model; raises InputError if the name is unknown."""

    def unit_of(self, architecture: str, /) -> str:
        """Return `px` or `tokens`, the unit of the model's input size."""

    def refuse_length(self, architecture: str, tokens: int, /) -> None:
        """Raise InputError for more tokens than the model has, as far as its name says."""

    def suggested_name(self, name: str, /) -> str | None:
        """Return the name with prefix that was probably meant by a name without, if any."""


def is_prefixed(architecture: str) -> bool:
    """Return whether the name is of a source with a prefix, such as `hf:`."""
    return _PREFIX.match(architecture) is not None


def model_of(architecture: str) -> str:
    """Return the name without options: `hf:gpt2` for `hf:gpt2,lora=16`; or without its version."""
    if is_own_module(architecture):
        return without_version(architecture)
    return architecture.partition(",")[0] if is_prefixed(architecture) else architecture


def content_of(architecture: str) -> str:
    """Return what defines the architecture today; for a file this changes with its content.

    For a user's module it is its name with the version of its package.

    Raises:
        InputError, UnknownArchitectureError: The source or the name is unknown.
    """
    if not is_prefixed(architecture):
        return with_version(architecture)
    return names_of(architecture).content_of(architecture)


def unit_of(architecture: str) -> str:
    """Return the unit of the architecture's input size: `px` of images, or `tokens` of text."""
    names = _prefixes().get(_prefix(architecture))
    return unit_by_name(architecture) if names is None else names.unit_of(architecture)


def refuse_length(architecture: str, tokens: int) -> None:
    """Raise InputError for more tokens than a model with a prefix has, as far as its name says."""
    names_of(architecture).refuse_length(architecture, tokens)


def suggested_name(name: str) -> str | None:
    """Return the prefixed name that was probably meant by a name without prefix, if any."""
    suggestions = (names.suggested_name(name) for names in _prefixes().values())
    return next((suggestion for suggestion in suggestions if suggestion), None)


def names_of(architecture: str) -> ModelNames:
    """Return the names of the source of an architecture with a prefix; raises InputError."""
    prefix, known = _prefix(architecture), _prefixes()
    if prefix not in known:
        others = f", or a name with the prefix {', '.join(known)}" if known else ""
        raise MissingLibraryError(
            f"{architecture}: no installed extension has models with the prefix {prefix!r}; give a "
            f"timm name such as resnet50, package.module:function of your code{others}"
        )
    return known[prefix]


def is_file(model: str) -> bool:
    """Return whether this is the path of an ONNX file, not the name of an architecture."""
    if model.endswith(".onnx"):
        return True
    if is_prefixed(model) or (is_hub_id(model) and suggested_name(model)):
        return False
    return os.sep in model


def looks_like_path(name: str) -> bool:
    """Return whether a name may be a path: it has a separator, or the end of a model file."""
    return "/" in name or "\\" in name or model_of(name).endswith((".onnx", ".json"))


def has_public_name(architecture: str) -> bool:
    """Return whether others can build this model by its name, which names no file and no code."""
    if is_own_module(architecture):
        return False
    if is_prefixed(architecture):
        return not looks_like_path(architecture)
    return architecture.partition(".")[0] in registered_names() | _former_names()


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
    """Raise InputError with the nearest spellings of an unknown model."""
    if is_prefixed(name) or is_own_module(name):
        content_of(name)
        return
    refuse_weights(name)
    current = frozenset[str]() if "timm" in sys.modules else registered_names()
    if not current or any(mark in name for mark in WILD):
        return  # timm answers quickly itself, or not at all
    if not {name, name.partition(".")[0]} & (current | _former_names()):
        raise unknown_architecture(name, current)


@cache
def registered_names() -> frozenset[str]:
    """Return the names that timm's sources register; none where timm is not installed."""
    return frozenset(name for source in _sources() for name in _REGISTERED.findall(source))


@cache
def _former_names() -> frozenset[str]:
    """Return the old names of models, which timm still accepts."""
    blocks = (block for source in _sources() for block in _FORMER.findall(source))
    return frozenset(name for block in blocks for name in _FORMER_NAME.findall(block))


@cache
def _sources() -> tuple[str, ...]:
    """Return the source texts of the modules that register timm's models."""
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        return ()
    files = (Path(spec.origin).parent / "models").glob("*.py")
    return tuple(path.read_text(encoding="utf-8") for path in files)


def unknown_architecture(name: str, names: Iterable[str]) -> UnknownArchitectureError:
    """Return the error for a name that timm does not have, with the nearest of these."""
    if not name:
        return UnknownArchitectureError("the model's name is empty; give one, such as resnet50")
    known = sorted(names)
    meant = suggested_name(name)
    hint = nearest(name, known, otherwise="timm.list_models() lists them all")
    if name.startswith(_OF_PYTHON):
        called = name.removesuffix("()")
        hint = f"call trappm.predict({called}(), example_input=images) in Python"
        if near := nearest(called.rpartition(".")[2], known, otherwise=""):
            hint += f", or give a name: {near}"
    elif os.path.isfile(name):
        hint = f"write {os.path.join(os.curdir, name)} to read the file as ONNX"
    elif meant is not None:
        hint = f"did you mean '{meant}'?"
    return UnknownArchitectureError(f"timm has no architecture {name!r}; {hint}")


def _prefix(architecture: str) -> str:
    match = _PREFIX.match(architecture)
    return match.group() if match else ""


def _prefixes() -> dict[str, ModelNames]:
    modules = extension_modules("model_names")
    return {module.PREFIX: cast("ModelNames", module) for module in modules}
