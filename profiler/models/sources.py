"""Sources of models: timm by plain names, others by a prefix such as `hf:` (extensions).

An architecture of another source is `PREFIX:NAME`, then options behind commas:
`hf:llama-2-7b,lora=16`. Extensions register a source as their module `model_names`. It is found
when a name with a prefix is first looked up, in every process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, cast

from trappm.profiler.errors import InputError
from trappm.profiler.extensions import extension_modules
from trappm.profiler.records import unit_by_name

if TYPE_CHECKING:
    from torch import nn

    from trappm.profiler.models.model_input import Inputs

_PREFIX = re.compile(r"[a-z]\w*:")


class ModelSource(Protocol):
    """Models of a library by name; a module with these functions is one."""

    def architectures(self, patterns: Iterable[str], /) -> list[str]:
        """Return all that match one of these names or globs; raises as `create_model` if none."""

    def check(self, architecture: str, /) -> str:
        """Return the architecture's current name; raises as `create_model` if unknown."""

    def native_input_size(self, architecture: str, /) -> int | None:
        """Return the input size that the model was made for, if any."""

    def input_size_of(self, architecture: str, input_size: int | None, /) -> int:
        """Return the given size or the architecture's own; raises InputError if it is invalid."""

    def create_model(self, architecture: str, input_size: int, /) -> nn.Module:
        """Return the model with fresh weights.

        Raises:
            UnknownArchitectureError, InputError, UnsupportedModelError: The name or size is
                unknown, or the model cannot be built.
        """

    def inputs(self, architecture: str, input_size: int, /) -> Inputs:
        """Return the inputs of the model."""


class ModelNames(Protocol):
    """Names of a source with a prefix, read without importing its library; a module is one."""

    PREFIX: str
    """Prefix of the names, with its colon."""

    def content_of(self, architecture: str, /) -> str:
        """Return what defines the model; raises InputError if the name is unknown."""

    def unit_of(self, architecture: str, /) -> str:
        """Return `px` or `tokens`, the unit of the model's input size."""

    def suggested_name(self, name: str, /) -> str | None:
        """Return the name with prefix that was probably meant by a name without, if any."""

    def source(self) -> ModelSource:
        """Import the library; raises InputError if it is not installed."""


def is_prefixed(architecture: str) -> bool:
    """Return whether the name is of a source with a prefix, and not of timm."""
    return _PREFIX.match(architecture) is not None


def model_of(architecture: str) -> str:
    """Return the name without options: `hf:gpt2` for `hf:gpt2,lora=16`."""
    return architecture.partition(",")[0] if is_prefixed(architecture) else architecture


def content_of(architecture: str) -> str:
    """Return what defines the architecture today; for a file this changes with its content.

    Raises:
        InputError, UnknownArchitectureError: The source or the name is unknown.
    """
    return _names_of(architecture).content_of(architecture) if is_prefixed(architecture) else architecture


def unit_of(architecture: str) -> str:
    """Return the unit of the architecture's input size: `px` of images, or `tokens` of text."""
    names = _prefixes().get(_prefix(architecture))
    return unit_by_name(architecture) if names is None else names.unit_of(architecture)


def suggested_name(name: str) -> str | None:
    """Return the prefixed name that was probably meant by a name without prefix, if any."""
    suggestions = (names.suggested_name(name) for names in _prefixes().values())
    return next((suggestion for suggestion in suggestions if suggestion), None)


def source_of(architecture: str) -> ModelSource:
    """Return the source of an architecture; its library is imported.

    Raises:
        InputError: The source is unknown, or its library is not installed.
    """
    if is_prefixed(architecture):
        from trappm.profiler.models.torchvision_shim import register_missing_operators

        register_missing_operators()  # libraries of other sources may import torchvision
        return _names_of(architecture).source()
    from trappm.profiler.models import zoo

    return zoo


def _prefix(architecture: str) -> str:
    match = _PREFIX.match(architecture)
    return match.group() if match else ""


def _prefixes() -> dict[str, ModelNames]:
    modules = extension_modules("model_names")
    return {module.PREFIX: cast("ModelNames", module) for module in modules}


def _names_of(architecture: str) -> ModelNames:
    prefix, known = _prefix(architecture), _prefixes()
    if prefix not in known:
        offered = f"; there are: {', '.join(known)}" if known else ""
        raise InputError(f"no source of models has the prefix {prefix!r}{offered}")
    return known[prefix]
