"""The pool: the configurations that a campaign may choose from, drawn up from a short spec."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

from profiler.errors import InputError
from profiler.records import Configuration, MemoryFormat, Optimizer, Phase, Precision

MAX_CONFIGURATIONS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class PoolGroup:
    """Every combination of these architectures and settings.

    Raises:
        InputError: a list is empty, or a batch or input size is not a whole number of 1 or more.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    architectures: tuple[str, ...]
    """timm names or globs, such as `resnet18` or `convnext_*`."""
    batch_sizes: tuple[int, ...]
    input_sizes: tuple[int, ...]
    """Height and width of the square images, in pixels."""
    precisions: tuple[Precision, ...] = (Precision.FP32,)
    memory_formats: tuple[MemoryFormat, ...] = (MemoryFormat.CONTIGUOUS,)
    optimizers: tuple[Optimizer, ...] = (Optimizer.SGD,)
    phases: tuple[Phase, ...] = (Phase.TRAIN,)

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            if not values:
                raise InputError(f"{name} is empty in a group of the pool; name at least one")
        for name in ("batch_sizes", "input_sizes"):
            for value in getattr(self, name):
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise InputError(
                        f"{name} holds {value!r}; it must be a whole number of 1 or more"
                    )


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
        InputError: more than MAX_CONFIGURATIONS.
    """
    from profiler.zoo import architectures  # brings in torch and timm

    pool: set[Configuration] = set()
    for group in spec.groups:
        for architecture in architectures(group.architectures):
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
                    group.batch_sizes, group.input_sizes, group.precisions,
                    group.memory_formats, group.optimizers, group.phases,
                )
            )  # fmt: skip
            if len(pool) > MAX_CONFIGURATIONS:
                raise InputError(
                    f"the pool has more than {MAX_CONFIGURATIONS:,} configurations; make it smaller"
                )
    return sorted(pool)
