"""Inputs of a model: shapes and types without values."""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from threading import Lock
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Self, cast

from trappm.profiler.errors import InputError, UnsupportedModelError, one_line
from trappm.profiler.records import MemoryFormat, Phase

if TYPE_CHECKING:
    import torch
    from torch import nn

TARGETS = "targets of the loss"
"""Keyword of tensors for the loss alone, which no module has as an argument."""


_Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keyword arguments of a module."""


class Inputs(ABC):
    """Inputs of a model for any batch size: shapes and types."""

    only_batch_size: int | None = None
    """The only batch size, or None."""

    @abstractmethod
    def tensors(self, batch_size: int) -> _Batch:
        """Return the arguments with contiguous tensors on the meta device."""

    def batch(
        self, batch_size: int, memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    ) -> _Batch:
        """Return the arguments for this number of samples, with tensors on the meta device."""
        import torch
        from torch.utils._pytree import tree_map

        same: dict[int, torch.Tensor] = {}  # a tensor that is given twice is one tensor

        def channels_last(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.dim() != 4:
                return value
            if id(value) not in same:
                same[id(value)] = value.contiguous(memory_format=torch.channels_last)
            return same[id(value)]

        batch = self.tensors(batch_size)
        if memory_format is MemoryFormat.CONTIGUOUS:
            return batch
        return tree_map(channels_last, batch[0]), tree_map(channels_last, batch[1])

    def values(self, batch_size: int) -> list[torch.Tensor | None]:
        """Return the values on the CPU of each tensor of a batch; None for unknown ones."""
        import torch
        from torch.utils._pytree import tree_leaves

        leaves = tree_leaves(self.tensors(batch_size))
        return [None for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def in_phase(self, phase: Phase) -> Self:
        """Return the inputs of a phase."""
        del phase
        return self

    @property
    def has_labels(self) -> bool:
        """Return whether training has arguments of the module that inference has not."""
        return False


@dataclass(frozen=True)
class Sample(Inputs):
    """One sample of a batch."""

    shape: tuple[int, ...]
    """Shape without the batch axis; (3, 224, 224) for images of 224 px."""
    dtype: torch.dtype

    @classmethod
    def of(cls, input_size: int | Self) -> Self:
        """Return a square RGB image of this size in pixels, or the given sample.

        Raises:
            InputError: The size is below 1.
        """
        import torch

        if not isinstance(input_size, int):
            return input_size
        if input_size < 1:
            raise InputError(f"input size is {input_size}; it must be 1 or more pixels")
        return cls((3, input_size, input_size), torch.float32)

    @classmethod
    def from_example(cls, module: nn.Module, example: object) -> Self:
        """Return one sample of an example input, whose first axis is the batch.

        Raises:
            InputError: The example is not one tensor with a batch, or `forward` takes more.
        """
        import torch

        name = type(module).__name__
        if not isinstance(example, torch.Tensor):
            raise InputError(
                f"example_input for {name} is a {type(example).__name__}; give one tensor with "
                "the batch first, such as torch.empty(1, 3, 224, 224)"
            )
        if example.dim() < 1 or 0 in example.shape:
            raise InputError(
                f"example_input for {name} has the shape {tuple(example.shape)}; its first axis "
                "must be the batch, and no axis empty"
            )
        try:
            with contextlib.suppress(ValueError):  # not of Python, such as a scripted module
                inspect.signature(module.forward).bind(example)
        except TypeError as error:
            raise InputError(
                f"the forward of {name} cannot be called with one tensor ({one_line(error)}); "
                "wrap it in a module that takes one"
            ) from error
        return cls(tuple(example.shape[1:]), example.dtype)

    def tensors(self, batch_size: int) -> _Batch:
        import torch

        return (torch.empty((batch_size, *self.shape), dtype=self.dtype, device="meta"),), {}

    def __str__(self) -> str:
        square = len(self.shape) == 3 and self.shape[1] == self.shape[2] and self.shape[0] == 3
        return f"{self.shape[-1]} px" if square else "x".join(map(str, self.shape)) or "one number"


@dataclass(frozen=True)
class ExampleInputs(Inputs):
    """Arguments of a module: tensors, lists and dictionaries of them, keywords.

    The first axis of the first tensor is the batch; each tensor with as many entries there has the
    same batch. If the first argument is a list of samples, as for torchvision's detectors, its
    length is the batch. The keyword `TARGETS` is for the loss, not the module.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch_size: int
    """Batch size of the example."""
    in_lists: bool
    """True if a batch is a list of samples."""
    has_graphs: bool = False
    """True if graphs of PyTorch Geometric are among them, whose nodes and edges have no batch."""
    of_training: frozenset[str] = frozenset({TARGETS})
    """Keywords that inference does not have."""

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> Self:
        """Return inputs as in `model(*args, **kwargs)`.

        Raises:
            InputError: There is no tensor in them, or an empty batch, or a graph of several kinds
                of nodes.
        """
        import torch
        from torch.utils._pytree import tree_leaves

        has_graphs = register_containers([*args, *kwargs.values()])
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(tensor.layout is not torch.strided for tensor in tensors):
            raise InputError("a sparse tensor among the inputs is not simulated; give a dense one")
        if not tensors:
            raise InputError(
                "no tensor among the inputs; give them as the model is called, such as "
                "torch.empty(1, 3, 224, 224)"
            )
        first = next(iter((*args, *kwargs.values())))
        in_lists = isinstance(first, list)
        batch_size = len(first) if in_lists else (*tensors[0].shape, 0)[0]
        if batch_size < 1:
            raise InputError(
                f"the first input has the shape {tuple(tensors[0].shape)}; its first axis is the "
                "batch, and must not be empty"
            )
        return cls(args, kwargs, batch_size, in_lists, has_graphs=has_graphs)

    def tensors(self, batch_size: int) -> _Batch:
        import torch

        def empty(tensor: torch.Tensor) -> torch.Tensor:
            shape = self._shape(tensor, batch_size)
            return torch.empty(shape, dtype=tensor.dtype, device="meta")

        return self._spread(empty, batch_size)

    def values(self, batch_size: int, floats: bool = False) -> list[torch.Tensor | None]:
        """Return the values on the CPU of integer tensors, or of all; None for others.

        The example's samples are repeated.
        """
        import torch
        from torch.utils._pytree import tree_leaves

        def repeated(tensor: torch.Tensor) -> torch.Tensor:
            whole = not (tensor.is_floating_point() or tensor.is_complex())
            if tensor.is_meta or not (whole or floats):
                return torch.empty(0, device="meta")
            known = tensor.detach().cpu().clone()
            if self._shape(tensor, batch_size) == list(tensor.shape):
                return known
            return known[torch.arange(batch_size) % self.batch_size]

        leaves = tree_leaves(self._spread(repeated, batch_size))
        known = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return [None if leaf.is_meta else leaf for leaf in known]

    def _shape(self, tensor: torch.Tensor, batch_size: int) -> list[int]:
        shape = list(tensor.shape)
        if not self.in_lists and shape[:1] == [self.batch_size]:
            shape[0] = batch_size
        return shape

    def _spread(self, change: Callable[[torch.Tensor], torch.Tensor], batch_size: int) -> _Batch:
        """Return the inputs with every tensor changed, and lists of samples resized."""
        if self.has_graphs and batch_size != self.batch_size:
            raise UnsupportedModelError(
                f"the example has graphs of {self.batch_size} nodes; for {batch_size} nodes, give "
                "an example with them and their edges"
            )
        import torch
        from torch.utils._pytree import tree_map

        same: dict[int, torch.Tensor] = {}  # a tensor that is given twice is one tensor

        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, torch.Tensor) else value

        def changed_once(value: Any) -> Any:
            if id(value) not in same:
                same[id(value)] = changed(value)
            return same[id(value)]

        def repeated(value: Any) -> Any:
            if self.in_lists and isinstance(value, list) and len(value) == self.batch_size:
                return [tree_map(changed, value[0]) for _ in range(batch_size)]
            return tree_map(changed_once, value)

        kwargs = {name: repeated(value) for name, value in self.kwargs.items()}
        return tuple(map(repeated, self.args)), kwargs

    def in_phase(self, phase: Phase) -> Self:
        """Return the inputs of a phase: inference has no targets."""
        if phase is Phase.TRAIN:
            return self
        kwargs = {name: x for name, x in self.kwargs.items() if name not in self.of_training}
        return replace(self, kwargs=kwargs)

    @property
    def has_labels(self) -> bool:
        return not self.kwargs.keys().isdisjoint(self.of_training - {TARGETS})

    def __str__(self) -> str:
        return f"inputs of batch {self.batch_size}"


_REGISTERING = Lock()


def register_containers(value: object) -> bool:
    """Let `tree_map` find the tensors in records and mappings; return whether there is a graph.

    Records are dataclasses, objects of other classes with tensors among their attributes, and
    graphs of PyTorch Geometric, whose nodes and edges have no batch.

    Raises:
        InputError: A graph has several kinds of nodes.
    """
    return _register(value, [], {})[0]


def _register(
    value: object, path: list[int], known: dict[int, tuple[bool, frozenset[int]]]
) -> tuple[bool, frozenset[int]]:
    """Register the containers in a value, but no objects that refer to themselves.

    Args:
        value: Value within the containers of `path`.
        path: Identities of the values around it.
        known: Results by the identity of a value.

    Returns:
        Whether there is a graph in it, and the identities of `path` that it refers to.
    """
    import torch
    from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node, tree_leaves

    kind, key = type(value), id(value)
    if key in path:
        return False, frozenset([key])
    if key in known or isinstance(value, torch.Tensor | torch.nn.Module) or _is_code(value):
        return known.get(key, (False, frozenset()))
    is_sequence = isinstance(value, list | tuple) and kind in SUPPORTED_NODES
    is_graph = _is_graph(kind)
    parts, changed = _container(kind, is_graph)
    values = list(cast("Any", value)) if is_sequence else list(parts(value).values())
    within = [_register(part, [*path, key], known) for part in values]
    has_graph = is_graph or any(graph for graph, _ in within)
    around = frozenset[int]().union(*(references for _, references in within))
    known[key] = has_graph, around - {key}
    is_record = parts is _attributes_of
    if around or is_sequence or kind in SUPPORTED_NODES:
        return known[key]
    if is_record and not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(values)):
        return known[key]

    def flatten(container: Any) -> tuple[list[Any], Any]:
        return list(parts(container).values()), container

    def unflatten(values: Iterable[Any], container: Any) -> Any:
        return changed(container, dict(zip(parts(container), values, strict=True)))

    with _REGISTERING:
        if kind not in SUPPORTED_NODES:
            register_pytree_node(kind, flatten, unflatten)
    return known[key]


def _is_code(value: object) -> bool:
    """Return whether a value is a class, a module of Python or a function."""
    return inspect.isroutine(value) or isinstance(value, type | ModuleType)


_Parts = dict[str, Any]


def _container(
    kind: type, is_graph: bool
) -> tuple[Callable[[Any], _Parts], Callable[[Any, _Parts], Any]]:
    """Return how the parts of a container of this class are read, and how others are set."""
    if is_graph:
        return lambda graph: graph.to_dict(), _with_items
    if is_dataclass(kind):
        return _fields_of, _with_attributes
    if issubclass(kind, MutableMapping):
        return dict, _with_items
    if kind is MappingProxyType:
        return dict, lambda _, parts: MappingProxyType(parts)
    return _attributes_of, _with_attributes


def _fields_of(record: Any) -> _Parts:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _attributes_of(record: Any) -> _Parts:
    """Return the attributes of an object, those in slots too."""
    slots = [name for kind in type(record).__mro__ for name in _slots_of(kind)]
    own = {name: getattr(record, name) for name in slots if hasattr(record, name)}
    return own | getattr(record, "__dict__", {})


def _slots_of(kind: type) -> list[str]:
    """Return the names of a class's slots, as `setattr` needs them."""
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    own = [name for name in names if not name.endswith("__")]
    private = f"_{kind.__name__.lstrip('_')}"
    return [private + name if name.startswith("__") else name for name in own]


def _with_items(mapping: Any, parts: _Parts) -> Any:
    changed = copy(mapping)
    for name, part in parts.items():
        changed[name] = part
    return changed


def _with_attributes(record: Any, parts: _Parts) -> Any:
    try:
        changed = copy(record)
        own = getattr(changed, "__dict__", {})
        for name, part in parts.items():
            if name in own:
                own[name] = part
            else:
                object.__setattr__(changed, name, part)  # which may be frozen
    except Exception as error:
        raise InputError(
            f"a batch of {type(record).__name__} cannot be copied ({one_line(error)}); give its "
            "tensors"
        ) from error
    return changed


def _is_graph(kind: type) -> bool:
    """Return whether values of a class are graphs of PyTorch Geometric."""
    names = {c.__name__ for c in kind.__mro__ if c.__module__.startswith("torch_geometric.data.")}
    if names and "Data" not in names:
        raise InputError(f"a {kind.__name__} is not traced; give Data, or tensors")
    return bool(names)


@dataclass(frozen=True)
class Field:
    """One tensor of a model's inputs."""

    shape: tuple[int, ...]
    """Shape of a sample, without the batch axis."""
    dtype: torch.dtype
    upper: int = 0
    """Upper bound (exclusive) of random whole numbers."""

    def draw(self, batch_size: int, generator: torch.Generator) -> torch.Tensor:
        """Return a random batch on the generator's device."""
        import torch

        shape, device = (batch_size, *self.shape), generator.device
        if self.dtype.is_floating_point:
            empty = torch.empty(shape, dtype=self.dtype, device=device)
            return empty.normal_(generator=generator)
        return torch.randint(
            max(self.upper, 1), shape, generator=generator, dtype=self.dtype, device=device
        )


@dataclass(frozen=True)
class NamedInputs(Inputs):
    """Inputs by keyword that differ between the phases, such as tokens with labels."""

    train: Mapping[str, Field]
    infer: Mapping[str, Field]
    settings: Mapping[Phase, Mapping[str, Any]]
    """Arguments that are not tensors."""
    phase: Phase = Phase.TRAIN

    def in_phase(self, phase: Phase) -> Self:
        return replace(self, phase=phase)

    def tensors(self, batch_size: int) -> _Batch:
        import torch

        tensors = {
            name: torch.empty((batch_size, *field.shape), dtype=field.dtype, device="meta")
            for name, field in self._fields.items()
        }
        return (), {**tensors, **self.settings.get(self.phase, {})}

    def draw(self, batch_size: int, generator: torch.Generator) -> dict[str, Any]:
        """Return a random batch on the generator's device."""
        tensors = {name: f.draw(batch_size, generator) for name, f in self._fields.items()}
        return {**tensors, **self.settings.get(self.phase, {})}

    @property
    def _fields(self) -> Mapping[str, Field]:
        return self.train if self.phase is Phase.TRAIN else self.infer

    def __str__(self) -> str:
        first = next(iter(self.infer.values())).shape
        return f"{first[-1]:,} tokens" if len(first) == 1 else f"{first[-1]} px"
