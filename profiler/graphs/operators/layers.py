"""Rules for the layers of a network: products, normalizations, activations, attention, pooling.

As in `tensors`, each says which ONNX nodes one call of a PyTorch operator is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trappm.profiler.graphs.builder import Call, Value
from trappm.profiler.graphs.operators.tensors import transpose_of


def linear(call: Call) -> list[Value]:
    x, weight = call.values("input", "weight")
    bias = call.value("bias")
    transposed = call.emit("Transpose", weight, shape=weight.shape[::-1], perm=[1, 0])
    if bias is None:
        return [call.emit("MatMul", x, transposed)]
    if len(x.shape) == 2:
        return [call.emit("Gemm", x, weight, bias, transB=1)]
    return [call.emit("Add", bias, call.emit("MatMul", x, transposed))]


def addmm(call: Call) -> list[Value]:
    bias, left, right = call.tensors()
    scales: dict[str, Any] = {"alpha": float(call["alpha"]), "beta": float(call["beta"])}
    return [call.emit("Gemm", left, right, bias, **scales)]


def baddbmm(call: Call) -> list[Value]:
    bias, left, right = call.tensors()
    return [call.emit("Add", call.emit("MatMul", left, right), bias)]


def conv(call: Call) -> list[Value]:
    operator = "ConvTranspose" if call["transposed"] else "Conv"
    return _convolution(call, operator)


def conv_transpose(call: Call) -> list[Value]:
    return _convolution(call, "ConvTranspose")


def _convolution(call: Call, operator: str) -> list[Value]:
    x, weight, *bias = call.values("input", "weight", "bias")
    kernel = weight.shape[2:]
    dilations = _spread(call["dilation"], len(kernel))
    padding = call["padding"]
    if padding == "same":  # the longer end comes last
        totals = [d * (size - 1) for d, size in zip(dilations, kernel, strict=True)]
        pads = [total // 2 for total in totals] + [total - total // 2 for total in totals]
    else:
        pads = _spread(0 if padding == "valid" else padding, len(kernel)) * 2
    attributes = {
        "dilations": dilations,
        "group": call["groups"],
        "kernel_shape": list(kernel),
        "pads": pads,
        "strides": _spread(call["stride"], len(kernel)),
    }
    if operator == "ConvTranspose":
        attributes["output_padding"] = _spread(call["output_padding"], len(kernel))
    return [call.emit(operator, x, weight, *bias, **attributes)]


def batch_norm(call: Call) -> list[Value]:
    names = ("input", "weight", "bias", "running_mean", "running_var")
    return [call.emit("BatchNormalization", *call.values(*names), epsilon=call["eps"])]


def layer_norm(call: Call) -> list[Value]:
    values = call.values("input", "weight", "bias")
    axis = -len(call["normalized_shape"])
    return [call.emit("LayerNormalization", *values, axis=axis, epsilon=call["eps"])]


def instance_norm(call: Call) -> list[Value]:
    values = call.values("input", "weight", "bias")
    return [call.emit("InstanceNormalization", *values, epsilon=call["eps"])]


def group_norm(call: Call) -> list[Value]:
    """Instances of one group each, then the scale and shift of each channel."""
    x, groups = call.input, call["num_groups"]
    elements = 1
    for size in x.shape[1:]:
        elements *= size
    grouped = (x.shape[0], groups, elements // groups)
    constant = Value((groups,))
    value = call.emit("Reshape", x, shape=grouped)
    value = call.emit(
        "InstanceNormalization", value, constant, constant, shape=grouped, epsilon=call["eps"]
    )
    value = call.emit("Reshape", value)
    for operator, name in (("Mul", "weight"), ("Add", "bias")):
        weight = call.value(name)
        if weight is None:  # the exporter writes ones and zeros
            weight = Value((1,))
        spread = weight.of_shape(weight.shape + (1,) * (len(x.shape) - 2))
        value = call.emit(operator, value, spread)
    return [value]


def rms_norm(call: Call) -> list[Value]:
    x, axes = call.input, len(call["normalized_shape"])
    reduced = x.shape[:-axes] + (1,) * axes
    last = list(range(-axes, 0))
    value = call.emit("ReduceMean", call.emit("Mul", x, x), shape=reduced, axes=last)
    for operator in ("Add", "Sqrt"):
        value = call.emit(operator, value, shape=reduced)
    normal = call.emit("Div", x, value)
    weight = call.value("weight")
    return [normal if weight is None else call.emit("Mul", normal, weight)]


def gelu(call: Call) -> list[Value]:
    x = call.input
    if call["approximate"] == "none":
        erf = call.emit("Erf", call.emit("Div", x))
        return [call.emit("Mul", call.emit("Mul", x, call.emit("Add", erf)))]
    number = Value(())
    cube = call.emit("Mul", x, call.emit("Mul", x, x))
    inner = call.emit("Mul", number, call.emit("Add", x, call.emit("Mul", number, cube)))
    shifted = call.emit("Add", number, call.emit("Tanh", inner))
    return [call.emit("Mul", number, call.emit("Mul", x, shifted))]


def silu(call: Call) -> list[Value]:
    return [call.emit("Mul", call.input, call.emit("Sigmoid", call.input))]


def mish(call: Call) -> list[Value]:
    return [call.emit("Mul", call.input, call.emit("Tanh", call.emit("Softplus", call.input)))]


def attention(call: Call) -> list[Value]:
    """Scaled queries times scaled keys, mask, softmax, times values."""
    query, key, value = call.values("query", "key", "value")
    turned = (*key.shape[:-2], key.shape[-1], key.shape[-2])
    scores_shape = (*query.shape[:-1], key.shape[-2])
    rank = len(turned)
    keys = transpose_of(call, key, turned, [*range(rank - 2), rank - 1, rank - 2])
    queries = call.emit("Mul", query, shape=query.shape)
    keys = call.emit("Mul", keys, shape=turned)
    scores = call.emit("MatMul", queries, keys, shape=scores_shape)
    mask = call.value("attn_mask")
    if mask is None and call["is_causal"]:
        mask = Value(scores_shape[-2:])
    if mask is None:
        return [call.emit("MatMul", call.emit("Softmax", scores, shape=scores_shape), value)]
    boolean = call["attn_mask"] is not None and call["attn_mask"].dtype == torch.bool
    if boolean:
        mask = call.emit("Where", mask, shape=mask.shape)
    scores = call.emit("Add", scores, mask, shape=scores_shape)
    scores = call.emit("Softmax", scores, shape=scores_shape)
    if boolean:
        unknown = call.emit("IsNaN", scores, shape=scores_shape)
        scores = call.emit("Where", unknown, Value(()), scores, shape=scores_shape)
    return [call.emit("MatMul", scores, value)]


def adaptive_pool(call: Call) -> list[Value]:
    """As `tests.onnx_export` writes it."""
    x, target = call.input, list(call.shapes[0][-2:])
    if target == [1, 1]:
        return [call.emit("GlobalAveragePool", x)]
    height, width = x.shape[-2:]
    if height % target[0] == 0 and width % target[1] == 0:
        kernel = [height // target[0], width // target[1]]
        return [call.emit("AveragePool", x, kernel_shape=kernel, strides=kernel)]
    rows = call.emit(
        "MatMul", Value((target[0], height)), x, shape=(*x.shape[:-2], target[0], width)
    )
    return [call.emit("MatMul", rows, Value((width, target[1])))]


def adaptive_max_pool(call: Call) -> list[Value]:
    x, target = call.input, list(call.shapes[0][-2:])
    if target == [1, 1]:
        operator, kernel = "GlobalMaxPool", list(x.shape[-2:])
    else:
        operator = "MaxPool"
        kernel = [-(-size // wanted) for size, wanted in zip(x.shape[-2:], target, strict=True)]
    return call.builder.emit(operator, [x], *call.shapes, kernel_shape=kernel, strides=kernel)


def _spread(size: int | Sequence[int], axes: int) -> list[int]:
    """A number for each axis, of which one may stand for all."""
    sizes = [size] if isinstance(size, int) else list(size)
    return sizes * axes if len(sizes) == 1 else sizes


def lstm(call: Call) -> list[Value]:
    """A node for each layer, both directions in one; it wants time first, and splits directions."""
    x, weights = call.input, call.sequence("params")
    directions = 2 if call["bidirectional"] else 1
    each = len(weights) // (call["num_layers"] * directions)
    if call["batch_first"]:
        x = transpose_of(call, x, (x.shape[1], x.shape[0], x.shape[2]), [1, 0, 2])
    steps, batch, _ = x.shape
    last: list[list[Value]] = [[], []]
    for layer in range(call["num_layers"]):
        own = weights[layer * directions * each : (layer + 1) * directions * each]
        width = own[0].shape[0] // 4
        packed = [
            Value((directions, *own[i].shape), weights=_weights(own[i::each])) for i in (0, 1)
        ]
        packed += [Value((directions, 8 * width), weights=_weights(own))] if each > 2 else []
        state = (directions, batch, width)
        y, *ends = call.builder.emit(
            "LSTM",
            [x, *packed],
            (steps, directions, batch, width),
            state,
            state,
            direction="bidirectional" if directions == 2 else "forward",
        )
        for kept, end in zip(last, ends, strict=True):
            kept.append(end)
        if directions == 1:
            x = call.emit("Squeeze", y, shape=(steps, batch, width))
        else:
            y = transpose_of(call, y, (steps, batch, directions, width), [0, 2, 1, 3])
            x = call.emit("Reshape", y, shape=(steps, batch, directions * width))
    if call["batch_first"]:
        x = transpose_of(call, x, call.shapes[0], [1, 0, 2])
    states = [
        kept[0] if len(kept) == 1 else call.emit("Concat", *kept, shape=shape, axis=0)
        for kept, shape in zip(last, call.shapes[1:], strict=True)
    ]
    return [x, *states]


def _weights(values: Sequence[Value]) -> frozenset[int]:
    return frozenset[int]().union(*(value.weights for value in values))


def unfold(call: Call) -> list[Value]:
    """Neighbourhoods as columns: two gathers along rows and columns of the padded image."""
    x = call.input
    shape = (*x.shape[:2], *call["kernel_size"], call.shapes[0][-1])
    value = call.emit("Gather", call.emit("Pad", x, shape=x.shape), Value(()), shape=shape)
    return [call.emit("Reshape", value)]
