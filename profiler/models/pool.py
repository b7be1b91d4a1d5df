"""The pool: the configurations that a campaign may choose from, by a short specification."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from trappm.profiler.errors import InputError
from trappm.profiler.models import own_modules
from trappm.profiler.models.families import in_families
from trappm.profiler.models.known_names import is_prefixed, unit_of
from trappm.profiler.models.own_modules import is_own_module, with_version
from trappm.profiler.models.sources import ModelSource, source_of
from trappm.profiler.records import (
    MAX_SIZE,
    Configuration,
    Execution,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
)

MAX_CONFIGURATIONS = 1_000_000
NATIVE = "native"
FULL = "full"
_KINDS = (("input_sizes", "px", "images"), ("sequence_lengths", "tokens", "text"))
_METHODS = "full, lora=RANK, frozen=embeddings, frozen=body"
_MAY_BE_NATIVE = ("input_sizes", "sequence_lengths", "vocabularies")
_MAY_BE_EMPTY = frozenset({"architectures", "families", "input_sizes", "sequence_lengths"})


class Attention(enum.StrEnum):
    """Implementation of attention: PyTorch's fused function, or single operators."""

    SDPA = "sdpa"
    EAGER = "eager"
    MEGATRON = "megatron"
    """Megatron-LM before flash attention: the mask, scale and softmax are one kernel."""


def is_megatron(architecture: str) -> bool:
    """Return whether a model runs as Megatron-LM's, by the options of its name."""
    return Attention.MEGATRON in architecture.split(",")


@dataclass(frozen=True, kw_only=True)
class PoolGroup:
    """Every combination of these architectures and settings.

    Raises:
        InputError: No architectures, a setting without values, no input size, a number that is not
            an integer from 1 to MAX_SIZE, or an unknown method.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "use_attribute_docstrings": True}

    architectures: tuple[str, ...] = ()
    """timm names or globs, such as `resnet18` or `convnext_*`, transformers such as `hf:gpt2*`, or
    your own modules: `package.module:function`."""
    families: tuple[str, ...] = ()
    """Families whose architectures all belong to the group, such as `vit`."""
    batch_sizes: tuple[int, ...]
    input_sizes: tuple[Literal["native"] | int, ...] = ()
    """Pixels of square images; `native` is each model's own size."""
    sequence_lengths: tuple[Literal["native"] | int, ...] = ()
    """Tokens of a sample of text; `native` is the longest of each model."""
    methods: tuple[str, ...] = ("full",)
    """Training methods of transformers: `full`, `lora=RANK`, `frozen=embeddings`, `frozen=body`."""
    checkpointing: tuple[bool, ...] = (False,)
    """True if transformers compute activations again in the backward pass."""
    attentions: tuple[Attention, ...] = (Attention.SDPA,)
    vocabularies: tuple[Literal["native"] | int, ...] = ("native",)
    """Size of the vocabulary; `native` is the configuration's own."""
    precisions: tuple[Precision, ...] = (Precision.FP32,)
    memory_formats: tuple[MemoryFormat, ...] = (MemoryFormat.CONTIGUOUS,)
    optimizers: tuple[Optimizer, ...] = (Optimizer.SGD,)
    phases: tuple[Phase, ...] = (Phase.TRAIN,)
    executions: tuple[Execution, ...] = (Execution.EAGER,)
    """`eager`, or `compile`: `torch.compile`, measured after the chosen eager step."""

    def __post_init__(self) -> None:
        if not self.architectures and not self.families:
            raise InputError("a group of the pool names neither architectures nor families")
        if not self.input_sizes and not self.sequence_lengths:
            raise InputError(
                "a group of the pool has neither input_sizes (of images) nor sequence_lengths (of "
                "text); give those that its models take"
            )
        for name, values in vars(self).items():
            if not values and name not in _MAY_BE_EMPTY:
                raise InputError(f"{name} is empty in a group of the pool; name at least one")
        for method in self.methods:
            if method != FULL and method.partition("=")[0] not in ("lora", "frozen"):
                raise InputError(f"methods holds {method!r}; there are: {_METHODS}")
        for name in ("batch_sizes", *_MAY_BE_NATIVE):
            for value in getattr(self, name):
                if name in _MAY_BE_NATIVE and value == NATIVE:
                    continue
                if isinstance(value, bool) or not isinstance(value, int):
                    raise InputError(f"{name} holds {value!r}; it must be a whole number")
                if not 1 <= value <= MAX_SIZE:
                    raise InputError(f"{name} holds {value}; it must be from 1 to {MAX_SIZE:,}")


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """A pool as the union of its groups.

    Raises:
        InputError: There is no group.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    groups: tuple[PoolGroup, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise InputError("the pool has no groups; give at least one")


def build_pool(spec: PoolSpec) -> list[Configuration]:
    """Return all configurations of the specification, each once, sorted.

    No user's package is imported.

    Raises:
        UnknownArchitectureError: A name or glob matches no architecture.
        InputError: A family is empty, a model's kind of size is missing, a sequence is too long, or
            there are more than MAX_CONFIGURATIONS.
    """
    pool: set[Configuration] = set()
    named = [(group, _architectures(group)) for group in spec.groups]
    # Counted before any is made, as too many would take all memory. Shared ones count once.
    if max(_product(group, len(names)) for group, names in named) > MAX_CONFIGURATIONS:
        raise _too_many()
    for group, names in named:
        _check_kinds(group, names)
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
                    execution=execution,
                )
                for batch_size, input_size, precision, memory_format, optimizer, phase, execution in
                itertools.product(
                    group.batch_sizes, _sizes(group, architecture), group.precisions,
                    group.memory_formats, group.optimizers, group.phases, group.executions,
                )
            )  # fmt: skip
            if len(pool) > MAX_CONFIGURATIONS:
                raise _too_many()
    return sorted(pool)


def _product(group: PoolGroup, architectures: int) -> int:
    """Return the largest number of configurations of a group."""
    settings = (
        group.batch_sizes, max(group.input_sizes, group.sequence_lengths, key=len),
        group.precisions, group.memory_formats, group.optimizers, group.phases, group.executions,
    )  # fmt: skip
    return architectures * math.prod(len(set(values)) for values in settings)


def _too_many() -> InputError:
    return InputError(
        f"the pool has more than {MAX_CONFIGURATIONS:,} configurations; make it smaller"
    )


def _architectures(group: PoolGroup) -> list[str]:
    named: set[str] = set()
    endings = _endings(group)
    if len(endings) * len(group.architectures) > MAX_CONFIGURATIONS:
        raise _too_many()
    for text in group.architectures:
        if is_own_module(text):
            named.add(with_version(text))
            continue
        texts = [text + end for end in endings] if is_prefixed(text) else [text]
        named.update(source_of(text).architectures(texts))
    if group.families:
        from trappm.profiler.models.zoo import architectures

        named |= in_families(group.families, architectures(["*"]))
    if endings != [""] and not any(map(is_prefixed, named)):
        raise InputError(
            "methods, checkpointing, attentions and vocabularies are of transformers (hf: names), "
            "and a group of the pool has none; leave them out there"
        )
    return sorted(named)


def _endings(group: PoolGroup) -> list[str]:
    """Return the suffixes of the names of a group's transformers, such as `,lora=8,eager`."""
    options = (
        ["" if method == FULL else f",{method}" for method in group.methods],
        [",checkpointing" if is_on else "" for is_on in group.checkpointing],
        ["" if kind is Attention.SDPA else f",{kind}" for kind in map(Attention, group.attentions)],
        ["" if number == NATIVE else f",vocabulary={number}" for number in group.vocabularies],
    )
    if math.prod(map(len, options)) > MAX_CONFIGURATIONS:
        raise _too_many()
    return ["".join(chosen) for chosen in itertools.product(*options)]


def _sizes(group: PoolGroup, architecture: str) -> set[int]:
    """Return the input sizes of the group for this model.

    Raises:
        InputError: A sequence is too long for the model.
    """
    if is_own_module(architecture):  # its package is imported on workers only
        source = cast("ModelSource", own_modules)
    else:
        source = source_of(architecture)
    takes_text = unit_of(architecture) == "tokens"
    sizes: set[int] = set()
    for size in group.sequence_lengths if takes_text else group.input_sizes:
        native = source.native_input_size(architecture) if size == NATIVE else int(size)
        if native is None:
            raise InputError(f"{architecture} has no input size of its own; give one")
        known = is_prefixed(architecture)  # of the others, what cannot be is refused one by one
        sizes.add(source.input_size_of(architecture, native) if known else native)
    return sizes


def _check_kinds(group: PoolGroup, architectures: Sequence[str]) -> None:
    """Raise InputError if a model's kind of size is missing, or a kind fits no model."""
    first = {unit_of(name): name for name in reversed(architectures)}
    for key, unit, taken in _KINDS:
        if unit in first and not getattr(group, key):
            raise InputError(f"{first[unit]} takes {taken}; its group of the pool needs {key}")
    for key, unit, taken in _KINDS:
        if unit not in first and getattr(group, key):
            raise InputError(
                f"{key} are of models that take {taken}, and of these the group of the pool with "
                f"{architectures[0]} has none; leave them out there"
            )
