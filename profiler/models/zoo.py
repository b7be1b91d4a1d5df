"""timm's models by name, as `sources.ModelSource`; the only module that imports timm."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, cast

import timm
from timm.models import _registry, get_pretrained_cfg
from torch import nn

from trappm.profiler.errors import (
    InputError,
    TrappmError,
    UnknownArchitectureError,
    UnsupportedModelError,
    is_of_this_machine,
    one_line,
)
from trappm.profiler.models.known_names import WILD, unknown_architecture
from trappm.profiler.models.model_input import Sample


def architectures(patterns: Iterable[str]) -> list[str]:
    """Return all timm architectures that match one of these names or globs, sorted.

    Raises:
        UnknownArchitectureError: A name or glob matches nothing.
    """
    names: set[str] = set()
    for pattern in patterns:
        wanted = current_name(pattern)
        matches = [name for name in _names() if fnmatchcase(name, wanted)]
        if not matches:
            raise _unknown(pattern)
        names.update(matches)
    return sorted(names)


def current_name(name: str) -> str:
    """Return the current name of an architecture.

    Tags (`resnet50.a1_in1k`) and old names (`tf_efficientnet_b0_ns`) describe weights, which do not
    change the cost. Unknown names are returned as they are.
    """
    if name in _names() or any(mark in name for mark in WILD):
        return name
    bare = name.partition(".")[0]
    if bare.startswith("ig_resnext101_"):
        return bare.removeprefix("ig_")  # timm's table takes all widths of these for the least
    # timm has no public way to ask; without it, old names are unknown ones.
    renamed: dict[str, str] = getattr(_registry, "_deprecated_models", {})
    return renamed.get(bare, bare).partition(".")[0]


def check(architecture: str) -> str:
    """Return the architecture's current name.

    Raises:
        UnknownArchitectureError: timm has no such model.
    """
    name = current_name(architecture)
    if name not in _names():
        raise _unknown(architecture)
    return name


def native_input_size(architecture: str) -> int | None:
    """Return the input size in pixels that the architecture was designed for, if known.

    Raises:
        UnknownArchitectureError: timm has no such model.
    """
    config = get_pretrained_cfg(check(architecture))
    return None if config is None else int(config.input_size[-1])


def input_size_of(architecture: str, input_size: int | None) -> int:
    """Return the given input size, or the architecture's own.

    Raises:
        UnknownArchitectureError: timm has no such model.
        InputError: None is given, and timm knows none.
    """
    size = native_input_size(architecture) if input_size is None else input_size
    if size is None:
        raise InputError(f"timm names no input size for {architecture}; give one, such as 224")
    return size


def create_model(architecture: str, input_size: int) -> nn.Module:
    """Return a timm model with fresh weights for square images of this size.

    Raises:
        UnknownArchitectureError: timm has no such model.
        InputError: The input size is below 1, or wrong for this model.
        UnsupportedModelError: timm cannot build this model.
    """
    architecture = check(architecture)
    if input_size < 1:
        raise InputError(f"input size is {input_size}; it must be 1 or more pixels")
    native = native_input_size(architecture)
    config = get_pretrained_cfg(architecture)
    options: dict[str, Any] = {}
    if config is not None and config.fixed_input_size:
        options["img_size"] = input_size
    try:
        return _build(architecture, options)
    except Exception as error:
        if is_of_this_machine(error):
            raise TrappmError(f"{architecture} was not built, try again: {error}") from error
        reason = one_line(error)
        takes_no_size = isinstance(error, TypeError) and "img_size" in reason
        if takes_no_size and input_size == native:
            return _build(architecture, {})
        if takes_no_size:
            raise InputError(
                f"{architecture} takes images of {native} px only, not {input_size}"
            ) from error
        if options and input_size != native:
            raise InputError(
                f"{architecture} cannot be built for images of {input_size} px ({reason}); "
                f"{native} px is its own size"
            ) from error
        raise UnsupportedModelError(f"timm cannot build {architecture}: {reason}") from error


def inputs(_architecture: str, input_size: int) -> Sample:
    return Sample.of(input_size)


def _build(architecture: str, options: dict[str, Any]) -> nn.Module:
    return cast(nn.Module, timm.create_model(architecture, pretrained=False, **options))


@cache
def _names() -> frozenset[str]:
    return frozenset(timm.list_models())


def _unknown(name: str) -> UnknownArchitectureError:
    if any(mark in name for mark in WILD):
        return UnknownArchitectureError(f"no timm architecture matches {name!r}")
    return unknown_architecture(name, _names())
