"""The pool: the configurations that a campaign may choose from, drawn up from a short spec."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from trappm.profiler.errors import InputError
from trappm.profiler.models.families import in_families
from trappm.profiler.records import (
    MAX_SIZE,
    Configuration,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
)

MAX_CONFIGURATIONS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class PoolGroup:
    """Every combination of these architectures and settings.

    Raises:
        InputError: no architectures, a setting without values, or a batch or input size that is
            not a whole number from 1 to MAX_SIZE.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    architectures: tuple[str, ...] = ()
    """timm names or globs, such as `resnet18` or `convnext_*`, or transformers: `hf:gpt2`."""
    families: tuple[str, ...] = ()
    """Families whose architectures are all in the group, such as `vit`."""
    batch_sizes: tuple[int, ...]
    input_sizes: tuple[Literal["native"] | int, ...]
    """Pixels of square images, or tokens; `native` is what each model was made for."""
    precisions: tuple[Precision, ...] = (Precision.FP32,)
    memory_formats: tuple[MemoryFormat, ...] = (MemoryFormat.CONTIGUOUS,)
    optimizers: tuple[Optimizer, ...] = (Optimizer.SGD,)
    phases: tuple[Phase, ...] = (Phase.TRAIN,)

    def __post_init__(self) -> None:
        if not self.architectures and not self.families:
            raise InputError("a group of the pool names neither architectures nor families")
        for name, values in vars(self).items():
            if not values and name not in {"architectures", "families"}:
                raise InputError(f"{name} is empty in a group of the pool; name at least one")
        for name in ("batch_sizes", "input_sizes"):
            for value in getattr(self, name):
                if name == "input_sizes" and value == "native":
                    continue
                if isinstance(value, bool) or not isinstance(value, int):
                    raise InputError(f"{name} holds {value!r}; it must be a whole number")
                if not 1 <= value <= MAX_SIZE:
                    raise InputError(f"{name} holds {value}; it must be from 1 to {MAX_SIZE:,}")


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """A pool as the sum of its groups; what two groups share is in the pool once.

    Raises:
        InputError: there is no group.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    groups: tuple[PoolGroup, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise InputError("the pool has no groups; give at least one")


def build_pool(spec: PoolSpec) -> list[Configuration]:
    """All configurations of the spec, each once, sorted.

    Raises:
        UnknownArchitectureError: a name or glob matches no timm architecture.
        InputError: a family has no architectures, or more than MAX_CONFIGURATIONS.
    """
    pool: set[Configuration] = set()
    named = [(group, _architectures(group)) for group in spec.groups]
    # Before any is made: so many would take all memory. What groups share counts once in the end.
    if max(_product(group, len(names)) for group, names in named) > MAX_CONFIGURATIONS:
        raise _too_many()
    for group, names in named:
        for architecture in names:
            pool.update(
                Configuration(
                    architecture=architecture,
                    batch_size=batch_size,
                    input_size=input_size,
                    precision=precision,
                    memory_format=memory_format,
                    optimizer=optimizer,
                    phase=phase,
                )
                for batch_size, input_size, precision, memory_format, optimizer, phase in
                itertools.product(
                    group.batch_sizes, _input_sizes(group, architecture), group.precisions,
                    group.memory_formats, group.optimizers, group.phases,
                )
            )  # fmt: skip
            if len(pool) > MAX_CONFIGURATIONS:
                raise _too_many()
    return sorted(pool)


def _product(group: PoolGroup, architectures: int) -> int:
    """How many configurations a group has, values that it names twice counted once."""
    settings = (
        group.batch_sizes, group.input_sizes, group.precisions, group.memory_formats,
        group.optimizers, group.phases,
    )  # fmt: skip
    return architectures * math.prod(len(set(values)) for values in settings)


def _too_many() -> InputError:
    return InputError(
        f"the pool has more than {MAX_CONFIGURATIONS:,} configurations; make it smaller"
    )


def _architectures(group: PoolGroup) -> list[str]:
    from trappm.profiler.models.sources import source_of  # brings in torch and timm

    texts = group.architectures
    named = {name for text in texts for name in source_of(text).architectures([text])}
    if group.families:
        from trappm.profiler.models.zoo import architectures

        named |= in_families(group.families, architectures(["*"]))
    return sorted(named)


def _input_sizes(group: PoolGroup, architecture: str) -> set[int]:
    """The group's sizes in pixels; a size that is also the native one counts once."""
    from trappm.profiler.models.sources import source_of

    sizes: set[int] = set()
    for size in group.input_sizes:
        native = size == "native"
        pixels = source_of(architecture).native_input_size(architecture) if native else int(size)
        if pixels is None:
            raise InputError(f"{architecture} has no input size of its own; give one")
        sizes.add(pixels)
    return sizes
