"""Rules for layers that timm does not have, but other people's modules do.

As in `tensors`, each says which ONNX nodes one call of a PyTorch operator is made of.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from trappm.profiler.graphs.builder import Call, Value
from trappm.profiler.graphs.operators.tensors import Rule, scatter


def max_pool(axes: int) -> Rule:
    """In one to three axes; with places, those within each image and channel."""

    def rule(call: Call) -> list[Value]:
        window = _window(call, axes)
        window["dilations"] = _each(call["dilation"], axes)
        values = call.builder.emit("MaxPool", [call.input], *call.shapes, **window)
        if len(values) == 1:
            return values
        # ONNX counts places through the whole batch: the first of each image is taken off.
        x, ones = call.input, [1] * axes
        starts = call.builder.emit("MaxPool", [x], x.shape, x.shape, kernel_shape=ones)[1]
        start = call.emit("Slice", starts, shape=(*x.shape[:-axes], *ones))
        return [values[0], call.emit("Sub", values[1], start)]

    return rule


def average_pool(axes: int) -> Rule:
    """In one to three axes; zeros that count in the average are an attribute."""

    def rule(call: Call) -> list[Value]:
        counted = int(call["count_include_pad"])
        window = _window(call, axes)
        return [call.emit("AveragePool", call.input, **window, count_include_pad=counted)]

    return rule


def _window(call: Call, axes: int) -> dict[str, Any]:
    """Windows follow one another unless a stride is given."""
    kernel = _each(call["kernel_size"], axes)
    return {
        "kernel_shape": kernel,
        "strides": _each(call["stride"] or kernel, axes),
        "pads": _each(call["padding"], axes) * 2,
    }


def _each(size: int | Sequence[int], axes: int) -> list[int]:
    sizes = [size] if isinstance(size, int) else list(size)
    return sizes * axes if len(sizes) == 1 else sizes


def fill(call: Call) -> list[Value]:
    """A whole tensor forgets what it was; of a part, the rest of its memory stays."""
    written, tensor = call.value("value"), call.outputs[0]
    if tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes():
        return scatter(call)
    if written is not None and written.depends:
        return [call.emit("Expand", written)]
    return [Value(call.shapes[0])]


def embedding_bag(call: Call) -> list[Value]:
    """Rows of the table, reduced bag by bag; the exporter writes a loop that no graph can hold."""
    table, places = call.values("weight", "indices")
    shape = (*places.shape, table.shape[-1])
    rows = call.emit("Gather", table, places, shape=shape, axis=0)
    scales = call.value("per_sample_weights")
    if scales is not None:
        rows = call.emit("Mul", rows, scales, shape=shape)
    bags = call.emit(("ReduceSum", "ReduceMean", "ReduceMax")[call["mode"]], rows)
    return [bags, *(Value(shape) for shape in call.shapes[1:])]


def bilinear(call: Call) -> list[Value]:
    """The exporter does not know it."""
    left, right, weight = call.values("input1", "input2", "weight")
    product = call.emit("Einsum", left, weight, right, equation="...i,oij,...j->...o")
    bias = call.value("bias")
    return [product if bias is None else call.emit("Add", product, bias)]


def as_in_the_file(call: Call) -> list[Value]:
    """An operator of an ONNX file that PyTorch has no form of; its attributes are JSON."""
    attributes = json.loads(call["attributes"])
    inputs = call.sequence("inputs")
    return call.builder.emit(call["operator"], inputs, *call.shapes, **attributes)
