"""Sources of models: timm by plain names, users' modules, others by a prefix such as `hf:`."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from trappm.profiler.models.known_names import AdaptedName, is_prefixed, names_of
from trappm.profiler.models.own_modules import is_own_module

if TYPE_CHECKING:
    from torch import nn

    from trappm.profiler.models.model_input import Inputs


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


class PrefixedSource(ModelSource, Protocol):
    """Models of a library by names with a prefix."""

    def adapted(self, architecture: str, rank: int, /) -> list[AdaptedName]:
        """Return the model with adapters of this rank; empty if only a part of it is trained.

        Raises:
            InputError: As `create_model`, or the library of adapters is missing.
        """


def source_of(architecture: str) -> ModelSource:
    """Return the source of an architecture; its library, or the user's package, is imported.

    Raises:
        InputError: The source is unknown, or its library or package cannot be imported.
    """
    if is_own_module(architecture):
        from trappm.profiler.models import own_modules

        own_modules.import_package(architecture)
        return own_modules
    if is_prefixed(architecture):
        return prefixed_source_of(architecture)
    from trappm.profiler.models import zoo

    return zoo


def prefixed_source_of(architecture: str) -> PrefixedSource:
    """Return the source of a name with a prefix; raises as `source_of`."""
    return cast("PrefixedSource", import_module(names_of(architecture).SOURCE))
