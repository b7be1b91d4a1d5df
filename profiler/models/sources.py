"""Where an architecture's name leads to: timm's models, or transformers by configuration.

The one place that tells them apart; whoever makes a model of a name asks `source_of`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from trappm.profiler.models.torchvision_shim import register_missing_operators
from trappm.profiler.transformers.names import is_transformer

if TYPE_CHECKING:
    from torch import nn

    from trappm.profiler.models.model_input import Inputs


class ModelSource(Protocol):
    """A library's models by name; modules with these functions are one."""

    def architectures(self, patterns: Iterable[str], /) -> list[str]:
        """All that match one of these names or globs; raises as `create_model` where none does."""

    def check(self, architecture: str, /) -> str:
        """The architecture's current name; raises as `create_model` where there is none."""

    def native_input_size(self, architecture: str, /) -> int | None:
        """The size of input that the model was made for, if it was for one."""

    def input_size_of(self, architecture: str, input_size: int | None, /) -> int:
        """The size that is given, or the architecture's own; raises InputError where none fits."""

    def create_model(self, architecture: str, input_size: int, /) -> nn.Module:
        """The model with fresh weights.

        Raises:
            UnknownArchitectureError, InputError, UnsupportedModelError: there is none of this name
                or size, or it cannot be built.
        """

    def inputs(self, architecture: str, input_size: int, /) -> Inputs:
        """What it is called with."""


def source_of(architecture: str) -> ModelSource:
    """The library that has an architecture of such a name; it is imported.

    Raises:
        InputError: it is not installed.
    """
    if is_transformer(architecture):
        register_missing_operators()  # transformers imports torchvision, too
        from trappm.profiler.transformers import library

        return library
    from trappm.profiler.models import zoo

    return zoo
