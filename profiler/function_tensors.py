"""Rules for arithmetic on tensors and for what only rearranges them.

A rule gets one call of an operator whose result depends on the images and says which ONNX nodes it
is made of; which operators have which rule stands in `function_rules`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from profiler.graph_builder import Call, Value
from profiler.macs import Shape

Rule = Callable[[Call], list[Value]]


def elementwise(operator: str) -> Rule:
    """One node of all tensors."""

    def rule(call: Call) -> list[Value]:
        return [call.emit(operator, *call.tensors())]

    return rule


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


def dropout(call: Call) -> list[Value]:
    return [call.emit("Dropout", call.input)] if call["train"] and call["p"] else alias(call)


def cast(call: Call) -> list[Value]:
    source = next(t for t in call.arguments.values() if isinstance(t, torch.Tensor))
    if source.dtype == call.outputs[0].dtype:
        return alias(call)
    return [call.emit("Cast", call.input)]


def add(call: Call, operator: str = "Add") -> list[Value]:
    values = call.tensors()
    other = call.value("other")
    if call["alpha"] not in (None, 1) and other is not None:
        values[-1] = call.emit("Mul", other, shape=other.shape)
    return [call.emit(operator, *values)]


def sub(call: Call) -> list[Value]:
    return add(call, "Sub")


def div(call: Call) -> list[Value]:
    value = call.emit("Div", *call.tensors())
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
    if call["ord"] == 2:
        return [call.emit("ReduceL2", call.input)]
    if call["ord"] == 1:
        return [call.emit("ReduceL1", call.input)]
    shape = call.input.shape
    powers = call.emit("Pow", call.emit("Abs", call.input, shape=shape), shape=shape)
    return [call.emit("Pow", call.emit("ReduceSum", powers))]


def variance(call: Call) -> list[Value]:
    """Mean of the squared differences from the mean, scaled by n / (n - 1) unless told not to."""
    x = call.input
    mean = call.emit("ReduceMean", x)
    difference = call.emit("Sub", x, mean, shape=x.shape)
    square = call.emit("Mul", difference, difference, shape=x.shape)
    result = call.emit("ReduceMean", square)
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
    return [call.emit("Where", *call.tensors())]


def masked_fill(call: Call) -> list[Value]:
    return [call.emit("Where", *call.values("mask", "value", "self"))]


def transpose_of(call: Call, value: Value, shape: Shape) -> Value:
    """Two transpositions in a row are one, as the exporter fuses them."""
    before = call.builder.before(value, "Transpose")
    return call.emit("Transpose", value if before is None else before, shape=shape)


def transpose(call: Call) -> list[Value]:
    return [transpose_of(call, call.input, call.shapes[0])]


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
        return [call.emit("Gather", x, Value(()))]
    sliced = call.emit("Slice", x, shape=(*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    return [call.emit("Squeeze", sliced)]


def unbind(call: Call) -> list[Value]:
    x, axis = call.input, call["dim"] % len(call.input.shape)
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    pieces = call.builder.emit("Split", [x], *[shape] * len(call.outputs))
    return [call.emit("Squeeze", piece) for piece in pieces]


def chunk(call: Call) -> list[Value]:
    return [call.emit("Slice", call.input, shape=shape) for shape in call.shapes]


def concat(call: Call) -> list[Value]:
    return [call.emit("Concat", *call.sequence("tensors"))]


def stack(call: Call) -> list[Value]:
    axis = call["dim"] % len(call.shapes[0])
    values = [
        call.emit("Unsqueeze", v, shape=(*v.shape[:axis], 1, *v.shape[axis:]))
        for v in call.sequence("tensors")
    ]
    return [call.emit("Concat", *values)]


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
        value = call.emit("Concat", *pieces)
    return [value]


def windows(call: Call) -> list[Value]:
    """Overlapping windows along an axis, which move to a last axis: the exporter takes each out."""
    x, axis = call.input, call["dimension"] % len(call.input.shape)
    rest = (*x.shape[:axis], *x.shape[axis + 1 :], call["size"])
    window = (*x.shape[:axis], call["size"], *x.shape[axis + 1 :])
    pieces = []
    for _ in range(call.shapes[0][axis]):
        last = transpose_of(call, call.emit("Slice", x, shape=window), rest)
        pieces.append(call.emit("Unsqueeze", last, shape=(*rest[:axis], 1, *rest[axis:])))
    return [call.emit("Concat", *pieces)]


def index(call: Call) -> list[Value]:
    indices = call.sequence("indices")
    return [call.emit("Gather" if len(indices) == 1 else "GatherND", call.input, *indices)]


def scatter(call: Call) -> list[Value]:
    """Writing into a tensor; where nothing of it stays, the result is what was written."""
    return [call.emit("ScatterND", *call.tensors())]


def extremum(operator: str) -> Rule:
    """Over one axis also the place: a second node."""

    def rule(call: Call) -> list[Value]:
        if call.value("other") is not None:
            return [call.emit(operator, *call.tensors())]
        names = (f"Reduce{operator}", f"Arg{operator}")
        return [call.emit(name, call.input) for name in names[: len(call.outputs)]]

    return rule


def einsum(call: Call) -> list[Value]:
    return [call.emit("Einsum", *call.sequence("tensors"), equation=call["equation"])]
