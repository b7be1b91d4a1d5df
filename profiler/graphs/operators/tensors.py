"""Rules for arithmetic on tensors and for what only rearranges them.

A rule gets one call of an operator whose result depends on the images and says which ONNX nodes it
is made of; which operators have which rule stands in `function_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from trappm.profiler.graphs.builder import Call, Value
from trappm.profiler.graphs.macs import Shape

Rule = Callable[[Call], list[Value]]


def elementwise(operator: str) -> Rule:
    """One node of all tensors."""

    def rule(call: Call) -> list[Value]:
        return [call.emit(operator, *call.tensors())]

    return rule


def binary(operator: str) -> Rule:
    """One node of the first two operands, where a number stands for a constant."""

    def rule(call: Call) -> list[Value]:
        return [call.emit(operator, *_operands(call, *list(call.arguments)[:2]))]

    return rule


def _operands(call: Call, *names: str) -> list[Value]:
    """Of these arguments, in order; numbers are constants."""
    return [call.value(name) or Value(()) for name in names]


def alias(call: Call) -> list[Value]:
    return [call.input.of_shape(shape) for shape in call.shapes]


def constant(call: Call) -> list[Value]:
    """A new tensor of the shape of another, without its values."""
    return [Value(shape) for shape in call.shapes]


def first(operator: str) -> Rule:
    """One node of the first tensor, of as many outputs as the call has."""

    def rule(call: Call) -> list[Value]:
        return call.builder.emit(operator, [call.input], *call.shapes)

    return rule


def along(operator: str) -> Rule:
    """As `first`, along the axis that the call names."""

    def rule(call: Call) -> list[Value]:
        axis = 0 if call["dim"] is None else call["dim"]
        return call.builder.emit(operator, [call.input], *call.shapes, axis=axis)

    return rule


def reduction(operator: str) -> Rule:
    """As `first`, over the axes that the call names, or all."""

    def rule(call: Call) -> list[Value]:
        return [call.emit(operator, call.input, axes=_axes(call))]

    return rule


def _axes(call: Call) -> list[int]:
    axes = call["dim"]
    return [axes] if isinstance(axes, int) else list(axes or [])


def pick(operator: str) -> Rule:
    """Parts of the first operand, by the places in the second, along an axis."""

    def rule(call: Call) -> list[Value]:
        values = call.values("weight", "self", "indices", "index")
        return [call.emit(operator, *values, axis=call["dim"] or 0)]

    return rule


def fill(mode: str) -> Rule:
    """Padding with a constant or what the image has at its edge."""

    def rule(call: Call) -> list[Value]:
        given = call["mode"] or mode
        return [call.emit("Pad", call.input, mode={"replicate": "edge"}.get(given, given))]

    return rule


def activation(operator: str, **attributes: str | float) -> Rule:
    """One node of the first tensor; an attribute is a number, or the argument that holds it."""

    def rule(call: Call) -> list[Value]:
        values: dict[str, Any] = {
            k: float(call[v] if isinstance(v, str) else v) for k, v in attributes.items()
        }
        return [call.emit(operator, call.input, **values)]

    return rule


def dropout(call: Call) -> list[Value]:
    return [call.emit("Dropout", call.input)] if call["train"] and call["p"] else alias(call)


def cast(call: Call) -> list[Value]:
    source = next(t for t in call.arguments.values() if isinstance(t, torch.Tensor))
    if source.dtype == call.outputs[0].dtype:
        return alias(call)
    return [call.emit("Cast", call.input, to=_ONNX_TYPES.get(call.outputs[0].dtype, 0))]


_ONNX_TYPES = {
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.int16: 5, torch.int32: 6,
    torch.int64: 7, torch.bool: 9, torch.float16: 10, torch.float64: 11, torch.bfloat16: 16,
}  # fmt: skip
"""Numbers of onnx.TensorProto.DataType."""


def add(call: Call, operator: str = "Add") -> list[Value]:
    values = _operands(call, "self", "other")
    other = call.value("other")
    if call["alpha"] not in (None, 1) and other is not None:
        values[-1] = call.emit("Mul", other, shape=other.shape)
    return [call.emit(operator, *values)]


def sub(call: Call) -> list[Value]:
    return add(call, "Sub")


def reversed_sub(call: Call) -> list[Value]:
    """A number, or another tensor, minus this one."""
    return [call.emit("Sub", *_operands(call, "other", "self"))]


def div(call: Call) -> list[Value]:
    value = call.emit("Div", *_operands(call, "self", "other"))
    return [value if call["rounding_mode"] is None else call.emit("Floor", value)]


def clamp(call: Call) -> list[Value]:
    """One Clip for numbers; tensors as bounds are Max and Min."""
    value, bounds = call.input, call.values("min", "max")
    if not any(bound.shape for bound in bounds):
        return [call.emit("Clip", value)]
    for operator, bound in zip(("Max", "Min"), map(call.value, ("min", "max")), strict=True):
        if bound is not None:
            value = call.emit(operator, value, bound)
    return [value]


def vector_norm(call: Call) -> list[Value]:
    axes = _axes(call)
    if call["ord"] in (1, 2):
        return [call.emit(f"ReduceL{int(call['ord'])}", call.input, axes=axes)]
    shape = call.input.shape
    powers = call.emit("Pow", call.emit("Abs", call.input, shape=shape), shape=shape)
    return [call.emit("Pow", call.emit("ReduceSum", powers, axes=axes))]


def variance(call: Call) -> list[Value]:
    """Mean of the squared differences from the mean, scaled by n / (n - 1) unless switched off."""
    x, axes = call.input, _axes(call)
    mean = call.emit("ReduceMean", x, axes=axes)
    difference = call.emit("Sub", x, mean, shape=x.shape)
    square = call.emit("Mul", difference, difference, shape=x.shape)
    result = call.emit("ReduceMean", square, axes=axes)
    if call["unbiased"] is not False and call["correction"] != 0:
        result = call.emit("Div", call.emit("Mul", result))
    return [result, mean][: len(call.outputs)]


def deviation(call: Call) -> list[Value]:
    squared, *mean = variance(call)
    return [call.emit("Sqrt", squared), *mean]


def inverse_root(call: Call) -> list[Value]:
    return [call.emit("Div", Value(()), call.emit("Sqrt", call.input))]


def square(call: Call) -> list[Value]:
    return [call.emit("Mul", call.input, call.input)]


def addcmul(call: Call) -> list[Value]:
    base, left, right = call.values("self", "tensor1", "tensor2")
    shape: Shape = np.broadcast_shapes(left.shape, right.shape)
    product = call.emit("Mul", call.emit("Mul", left, right, shape=shape), shape=shape)
    return [call.emit("Add", base, product)]


def lerp(call: Call) -> list[Value]:
    start, end, *weight = call.tensors()
    difference = call.emit("Mul", call.emit("Sub", end, start), *weight)
    return [call.emit("Add", start, difference)]


def where(call: Call) -> list[Value]:
    return [call.emit("Where", *_operands(call, "condition", "self", "other"))]


def masked_fill(call: Call) -> list[Value]:
    return [call.emit("Where", *_operands(call, "mask", "value", "self"))]


def transpose_of(call: Call, value: Value, shape: Shape, perm: Sequence[int]) -> Value:
    """Two transpositions in a row are one, as the exporter fuses them."""
    before = call.builder.before(value, "Transpose")
    if before is not None:
        value, node = before
        perm = [node.attributes["perm"][axis] for axis in perm]
    return call.emit("Transpose", value, shape=shape, perm=list(perm))


def transpose(call: Call) -> list[Value]:
    """The axes in a new order, or two of them swapped."""
    rank = len(call.input.shape)
    perm = list(range(rank))
    if call["dims"] is not None:  # permute
        perm = [axis % rank for axis in call["dims"]]
    elif call["source"] is not None:  # movedim
        source, destination = _places(call["source"], rank), _places(call["destination"], rank)
        rest = iter(axis for axis in range(rank) if axis not in source)
        moved = dict(zip(destination, source, strict=True))
        perm = [moved[axis] if axis in moved else next(rest) for axis in range(rank)]
    elif rank > 1:
        pair = (call["dim0"], call["dim1"]) if call["dim0"] is not None else None
        first_axis, second_axis = pair or (call["axis0"] or 0, call["axis1"] or -1)
        first_of_two, other = first_axis % rank, second_axis % rank
        perm[first_of_two], perm[other] = other, first_of_two
    return [transpose_of(call, call.input, call.shapes[0], perm)]


def _places(axes: int | Sequence[int], rank: int) -> list[int]:
    return [axis % rank for axis in ([axes] if isinstance(axes, int) else axes)]


def flatten(call: Call) -> list[Value]:
    rank = len(call.input.shape)
    start, end = call["start_dim"] % max(rank, 1), call["end_dim"] % max(rank, 1)
    if rank == 1:
        return alias(call)
    two_axes = (start, end) in ((1, rank - 1), (0, rank - 2))
    return [call.emit("Flatten" if two_axes else "Reshape", call.input)]


def select(call: Call) -> list[Value]:
    """An index from the start gathers; one from the end is a slice whose axis is dropped."""
    x, axis = call.input, call["dim"] % len(call.input.shape)
    if call["index"] >= 0:
        return [call.emit("Gather", x, Value(()), axis=axis)]
    sliced = call.emit("Slice", x, shape=(*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    return [call.emit("Squeeze", sliced)]


def unbind(call: Call) -> list[Value]:
    x, axis = call.input, call["dim"] % len(call.input.shape)
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    pieces = call.builder.emit("Split", [x], *[shape] * len(call.outputs), axis=axis)
    return [call.emit("Squeeze", piece) for piece in pieces]


def chunk(call: Call) -> list[Value]:
    return [call.emit("Slice", call.input, shape=shape) for shape in call.shapes]


def concat(call: Call) -> list[Value]:
    axis = call["axis"] if call["dim"] is None else call["dim"]
    return [call.emit("Concat", *call.sequence("tensors"), axis=axis)]


def stack(call: Call) -> list[Value]:
    axis = call["dim"] % len(call.shapes[0])
    values = [
        call.emit("Unsqueeze", v, shape=(*v.shape[:axis], 1, *v.shape[axis:]))
        for v in call.sequence("tensors")
    ]
    return [call.emit("Concat", *values, axis=axis)]


def roll(call: Call) -> list[Value]:
    """Along each axis two slices, joined the other way round."""
    value = call.input
    for shift, axis in zip(call["shifts"], call["dims"], strict=True):
        size = value.shape[axis]
        pieces = []
        for length in (shift % size, size - shift % size):
            shape = list(value.shape)
            shape[axis] = length
            pieces.append(call.emit("Slice", value, shape=tuple(shape)))
        value = call.emit("Concat", *pieces, axis=axis)
    return [value]


def windows(call: Call) -> list[Value]:
    """Overlapping windows along an axis, which move to a last axis: the exporter takes each out."""
    x, axis = call.input, call["dimension"] % len(call.input.shape)
    rest = (*x.shape[:axis], *x.shape[axis + 1 :], call["size"])
    window = (*x.shape[:axis], call["size"], *x.shape[axis + 1 :])
    rank = len(x.shape)
    perm = [place for place in range(rank) if place != axis] + [axis]
    pieces = []
    for _ in range(call.shapes[0][axis]):
        last = transpose_of(call, call.emit("Slice", x, shape=window), rest, perm)
        pieces.append(call.emit("Unsqueeze", last, shape=(*rest[:axis], 1, *rest[axis:])))
    return [call.emit("Concat", *pieces, axis=axis)]


def index(call: Call) -> list[Value]:
    indices = call.sequence("indices")
    if len(indices) > 1:
        return [call.emit("GatherND", call.input, *indices)]
    axis = next(i for i, given in enumerate(call["indices"]) if given is not None)
    return [call.emit("Gather", call.input, *indices, axis=axis)]


def scatter(call: Call) -> list[Value]:
    """Writing into a tensor; where nothing of it stays, the result is what was written."""
    written = call.value("src") or call.value("values") or Value(())
    return [call.emit("ScatterND", call.input, Value(()), written)]


def extremum(operator: str) -> Rule:
    """Over one axis also the place: a second node."""

    def rule(call: Call) -> list[Value]:
        if call.value("other") is not None:
            return [call.emit(operator, *call.tensors())]
        names = (f"Reduce{operator}", f"Arg{operator}")
        axes = _axes(call)
        attributes: list[dict[str, Any]] = [{"axes": axes}, {"axis": axes[0] if axes else 0}]
        return [
            call.emit(name, call.input, **given)
            for name, given, _ in zip(names, attributes, call.outputs, strict=False)
        ]

    return rule


def einsum(call: Call) -> list[Value]:
    return [call.emit("Einsum", *call.sequence("tensors"), equation=call["equation"])]
