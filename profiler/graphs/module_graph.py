"""Makes a GraphTemplate from a PyTorch module: one forward pass without weights or arithmetic.

The module lies on the meta device and runs in inference mode, in which PyTorch hands every operator
to a dispatch mode whole (a linear layer, an attention), before it takes it apart. Each call becomes
the ONNX nodes that PyTorch's exporter would have written for it (`operators.table`), so that a
model by its name and the same model as a file have one graph; docs/static_profile.md lists where
they differ. As in `reader`, only what depends on the pixels is in the graph: the rest
is folded away, and its weights count at the node that uses the result.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trappm.profiler.errors import InputError, TrappmError, UnsupportedModelError, one_line
from trappm.profiler.graphs.builder import Call, GraphBuilder, Value
from trappm.profiler.graphs.nodes import BATCH_SIZES
from trappm.profiler.graphs.operators.table import RULES, Rule, elementwise
from trappm.profiler.models.model_input import Sample
from trappm.profiler.records import Graph, GraphTemplate


def module_template(
    model: str | nn.Module, input_size: int | Sample, batch_size: int | None = None
) -> GraphTemplate:
    """The graph of a timm architecture, or of a module that maps one tensor to tensors.

    A module stays as it is: what runs is a copy of it without weights, in evaluation mode.

    Args:
        model: a timm architecture, or a module whose input has the batch first.
        input_size: height and width of square images, in pixels; or the sample of a module.
        batch_size: the only one that the module knows; None if it takes every one.

    Raises:
        UnknownArchitectureError, InputError: as `profiler.models.zoo.create_model`, or an input
            size that the module does not take.
        UnsupportedModelError: no graph can be made of the model; with the reason.
    """
    sample = Sample.of(input_size)
    name = model if isinstance(model, str) else model._get_name()
    module = on_meta(model, input_size).eval()
    recorder = _Recorder(module.parameters())
    try:
        if batch_size is not None:
            return GraphTemplate.fixed(_trace(module, recorder, sample.batch(batch_size)))
        graphs = [_trace(module, recorder, sample.batch(b)) for b in BATCH_SIZES]
        return GraphTemplate.from_graphs(*graphs)
    except TrappmError as error:
        raise UnsupportedModelError(f"{name} at {sample}: {error}") from error


def on_meta(model: str | nn.Module, input_size: int | Sample) -> nn.Module:
    """The timm model of this name, or a copy of this module, on the meta device.

    Raises:
        UnknownArchitectureError, InputError, UnsupportedModelError: as `zoo.create_model`; or a
            module that cannot be copied, or has no weights yet.
    """
    if isinstance(model, str):
        from trappm.profiler.models.zoo import create_model

        if not isinstance(input_size, int):
            raise InputError(f"{model} is asked for samples of {input_size}; give a size in pixels")
        with torch.device("meta"):
            return create_model(model, input_size)
    if any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        raise UnsupportedModelError(
            f"{type(model).__name__} has lazy layers, which do not know their sizes yet; run the "
            "module once, on an input as it will get, and try again"
        )
    weights: dict[int, Any] = {
        id(tensor): tensor.detach().to("meta")
        for part in model.modules()
        for tensor in (*part.buffers(recurse=False), *vars(part).values())
        if isinstance(tensor, torch.Tensor)
    }
    weights |= {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()
    }
    try:
        return copy.deepcopy(model, weights)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be copied to be traced: {one_line(error)}"
        ) from error


def _trace(module: nn.Module, recorder: _Recorder, images: torch.Tensor) -> Graph:
    batch_size = images.shape[0]
    recorder.restart()
    try:
        # What a module makes in its forward pass, it may make without naming a device.
        with torch.inference_mode(), torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes read while tracing, for instance
            recorder.watch(images)
            with recorder:
                results = [t for t in tree_leaves(module(images)) if isinstance(t, torch.Tensor)]
    except TrappmError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"its forward pass does not run without values: {one_line(error)}"
        ) from error
    outputs = [value for value in map(recorder.value, results) if value.depends]
    if all(value.producer is None for value in outputs):
        raise UnsupportedModelError("no output depends on the images, but as a copy")
    for value in outputs:
        if value.shape[:1] != (batch_size,):
            raise UnsupportedModelError(
                f"at batch size {batch_size} an output has shape {value.shape}; the batch size is "
                "written into the model, or the output has no batch axis"
            )
    return recorder.builder.graph(outputs, batch_size, str(images.dtype).removeprefix("torch."))


class _Recorder(TorchDispatchMode):
    """Turns every operator that runs into nodes, following tensors by identity."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The tensors are held so that no identity is given out twice.
        self._held: dict[int, torch.Tensor] = {id(p): p for p in parameters}
        self._values = {
            key: Value(tuple(p.shape), weights=frozenset([key])) for key, p in self._held.items()
        }
        self._sizes = {key: p.numel() for key, p in self._held.items()}
        self.restart()

    def restart(self) -> None:
        """Begins a new graph. What was made of weights is remembered: a model may keep it."""
        self.builder = GraphBuilder(self._sizes)
        self._values = {key: value for key, value in self._values.items() if not value.depends}
        self._held = {key: self._held[key] for key in self._values}
        self._same_storage: dict[int, list[torch.Tensor]] = {}
        for tensor in self._held.values():
            self._same_storage.setdefault(_storage(tensor), []).append(tensor)

    def watch(self, images: torch.Tensor) -> None:
        """What depends on these is the graph."""
        self._set(images, Value(tuple(images.shape), depends=True))

    def value(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor; one that no operator made is a buffer or a constant."""
        return self._values.get(id(tensor)) or Value(tuple(tensor.shape))

    def _set(self, tensor: torch.Tensor, value: Value) -> None:
        if id(tensor) not in self._values:
            self._held[id(tensor)] = tensor
            self._same_storage.setdefault(_storage(tensor), []).append(tensor)
        self._values[id(tensor)] = value

    def _overwrite(self, tensor: torch.Tensor, value: Value) -> None:
        """After an in-place operator all views of the same memory are what it wrote."""
        self._set(tensor, value)
        for other in self._same_storage[_storage(tensor)]:
            self._values[id(other)] = value.of_shape(tuple(other.shape))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        name = func._schema.name.removeprefix("aten::")
        depends = any(self.value(t).depends for t in tensors)
        rule = RULES.get(name) or RULES.get(name.removesuffix("_")) if depends else None
        if depends and _needs_values(func, args):
            raise UnsupportedModelError(f"its forward pass depends on values of tensors ({func})")
        if depends and rule is None:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            rule = _rule_by_tag(func)
        result = func(*args, **kwargs)
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if rule is not None:
            values = rule(Call(func, args, kwargs, outputs, self.value, self.builder))
        else:
            weights = frozenset[int]().union(*(self.value(t).weights for t in tensors))
            values = [Value(tuple(t.shape), weights=weights) for t in outputs]
        written = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        for tensor, value in zip(outputs, values, strict=True):
            (self._overwrite if written else self._set)(tensor, value)
        return result


def _needs_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a number or a shape hangs on values: by a mask it does, by whole numbers not."""
    if func is torch.ops.aten.index.Tensor:
        return any(t is not None and t.dtype == torch.bool for t in args[1])
    return bool(_NEEDS_VALUES & set(func.tags))


_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _rule_by_tag(func: Any) -> Rule:
    """Any operator that computes element by element is one node under its own name."""
    if torch.Tag.pointwise not in func.tags:
        raise UnsupportedModelError(
            f"no rule says which ONNX operators {func} stands for; export the model to ONNX and "
            "use the file, or add a rule to profiler/graphs/operators/table.py"
        )
    words = func._schema.name.removeprefix("aten::").strip("_").split("_")
    return elementwise("".join(word.capitalize() for word in words))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
