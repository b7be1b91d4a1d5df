"""The graph of one forward pass as it is traced: tensors by identity, operators as ONNX nodes.

Each call becomes the ONNX nodes of PyTorch's exporter (`operators`), so that a model and its file
have the same graph; docs/research/tracing.md lists the differences. Only what depends on
the inputs is in the graph: the rest is folded, and its weights count at the node that uses the
result.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.graphs.nodes import ONNX, Call, GraphBuilder, Value
from trappm.profiler.graphs.operators import RULES, Rule, alias, cast, elementwise
from trappm.profiler.records import Graph

_NUMBERS = frozenset((
    torch.ops.aten.item.default, torch.ops.aten.is_nonzero.default,
    torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default,
    torch.ops.aten.allclose.default,
))  # fmt: skip
"""Operators that return a number or a truth value."""
_DRAWS = {
    overload
    for packet in (torch.ops.aten.bernoulli, torch.ops.aten.bernoulli_)
    for overload in map(packet.__getattr__, packet.overloads())  # type: ignore[no-untyped-call]
}
"""Operators that draw which samples are dropped, as in stochastic depth."""
_PACKED = {getattr(torch.ops.aten, name).data for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
"""Recurrent layers of packed sequences; the rules are of padded ones."""
_ONE_NODE = {*_PACKED, torch.ops.aten.ctc_loss.Tensor, torch.ops.aten.ctc_loss.IntList}
"""Operators without a rule whose parts are not operators of PyTorch."""


class GraphLog:
    """Turns operators into nodes; holds no tensor, so lifetimes do not change.

    Args:
        module, inputs: The model that runs, and the tensors of its inputs.
        at_one_batch: True if the graph is of one batch size only, so that an output need not have
            a batch axis.
        by_values: True if the step runs on values, which operators may depend on.
        is_known: Returns whether the number that an operator reads from tensors is known.
        types_are_fixed: False if the step casts between types of real numbers by its precision,
            which the graph leaves out.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor],
        *,
        at_one_batch: bool = False,
        by_values: bool = False,
        is_known: Callable[[Any, Sequence[Tensor]], bool] = lambda _, __: False,
        types_are_fixed: bool = True,
    ) -> None:
        self._at_one_batch, self._by_values = at_one_batch, by_values
        self._is_known = is_known
        self._types_are_fixed = types_are_fixed
        self._refusal: UnsupportedModelError | None = None
        """Why there is no graph."""
        parameters = {id(p): p for p in module.parameters()}
        self._builder = GraphBuilder({key: p.numel() for key, p in parameters.items()})
        self._values: dict[int, Value] = {}
        self._watchers: dict[int, weakref.ref[Tensor]] = {}
        self._views: dict[int, set[int]] = {}
        """Identities of the tensors in each storage."""
        for key, parameter in parameters.items():
            weights = frozenset([key])
            self._set(parameter, Value(tuple(parameter.shape), weights=weights))
        for tensor in inputs:
            self._set(tensor, Value(tuple(tensor.shape), depends=True))
        kind = inputs[0].dtype
        if not types_are_fixed and kind.is_floating_point:
            kind = torch.float32
        self._input_type = str(kind).removeprefix("torch.")

    def graph(self, output: Any, batch_size: int) -> Graph:
        """Return the graph of the forward pass with this output.

        Raises:
            UnsupportedModelError: A call depends on values, no output depends on the inputs, or one
                has no batch axis.
        """
        if self._refusal is not None:
            raise self._refusal
        results = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        outputs = [value for value in map(self._value, results) if value.depends]
        # A loss that the model computes, as of labels among its inputs, is not part of the model.
        outputs = [value for value in outputs if value.shape] or outputs
        if all(value.producer is None for value in outputs):
            raise UnsupportedModelError("no output depends on the inputs, but as a copy")
        for value in () if self._at_one_batch else outputs:
            if value.shape and batch_size not in value.shape:
                raise UnsupportedModelError(
                    f"at batch size {batch_size} an output has shape {value.shape}; the batch size "
                    "is written into the model, or the output has no batch axis"
                )
        return self._builder.graph(outputs, batch_size, self._input_type)

    def rule(self, func: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> Rule | None:
        """Return the rule for the nodes of a call, or None if there is none."""
        if self._refusal is not None or not any(self._value(t).depends for t in tensors):
            return _mark_folded
        depends = _needs_values(func, args)
        if depends and func in _NUMBERS and self._is_known(func, tensors):
            return _mark_folded
        if depends and not self._by_values:
            self._refusal = UnsupportedModelError(
                f"its forward pass depends on values of tensors ({func})"
            )
            return _mark_folded
        if depends or func in _ONE_NODE:
            return _own_rule(func)
        name = func._schema.name.removeprefix("aten::")
        if not self._types_are_fixed and name in _CASTS and _is_real(args[0]):
            return _same_type
        return RULES.get(name) or RULES.get(name.removesuffix("_"))

    def note(
        self, rule: Rule | None, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor], result: Any,
    ) -> None:  # fmt: skip
        """Add the nodes of a call that has run."""
        if self._refusal is not None:
            return
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if rule is _mark_folded:
            weights = frozenset[int]().union(*(self._value(t).weights for t in tensors))
            drops = func in _DRAWS or any(self._value(t).drops for t in tensors)
            values = [Value(tuple(t.shape), weights=weights, drops=drops) for t in outputs]
        else:
            call = Call(func, args, kwargs, outputs, self._value, self._builder)
            values = (rule or _own_rule(func))(call)
        written = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        for tensor, value in zip(outputs, values, strict=True):
            (self._overwrite if written else self._set)(tensor, value)

    def _value(self, tensor: Tensor) -> Value:
        """Return the value of a tensor; unknown ones are buffers or constants."""
        return self._values.get(id(tensor)) or Value(tuple(tensor.shape))

    def _set(self, tensor: Tensor, value: Value) -> None:
        key = id(tensor)
        if key not in self._watchers:
            storage = _storage(tensor)

            def forget(_: Any) -> None:
                del self._values[key], self._watchers[key]
                self._views[storage].discard(key)

            self._watchers[key] = weakref.ref(tensor, forget)
            self._views.setdefault(storage, set()).add(key)
        self._values[key] = value

    def _overwrite(self, tensor: Tensor, value: Value) -> None:
        """Set the value of all views of the same memory after an in-place operator."""
        self._set(tensor, value)
        for key in self._views[_storage(tensor)]:
            self._values[key] = value.of_shape(self._values[key].shape)


def _mark_folded(call: Call) -> list[Value]:
    """Mark a call that does not depend on the inputs."""
    raise AssertionError(call)


_CASTS = frozenset(("_to_copy", "to", "type_as"))


def _is_real(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point()


def _same_type(call: Call) -> list[Value]:
    """Return the tensor itself if it is cast to another type of real numbers."""
    return alias(call) if call.outputs[0].is_floating_point() else cast(call)


def _needs_values(func: Any, args: Sequence[Any]) -> bool:
    """Return whether a result or its shape depends on values: masks do, integer indices do not."""
    if func is torch.ops.aten.index.Tensor:
        return any(t is not None and t.dtype == torch.bool for t in args[1])
    return needs_values(func)


def needs_values(func: Any) -> bool:
    """Return whether an operator returns a number, or a shape, that depends on values."""
    return bool(_NEEDS_VALUES & set(func.tags)) or func is torch.ops.aten.where.default


_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _own_rule(func: Any) -> Rule:
    """Return the rule of an operator that is in no table: one node with its own name."""
    words = re.split("[_:]+", func._schema.name.removeprefix("aten::").strip("_"))
    operator = "".join(word.capitalize() for word in words)
    if torch.Tag.pointwise in func.tags:
        return elementwise(operator)
    if operator in ONNX:  # which has other attributes
        operator = f"Aten{operator}"
    return lambda call: call.builder.emit(operator, call.tensors(), *call.shapes)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
