"""Rules that turn PyTorch operators into the ONNX nodes of PyTorch's exporter at opset 17.

A rule gets one call of an operator whose result depends on the images, and returns the outputs of
its nodes. Calls on weights and constants alone are folded and need no rule.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from trappm.profiler.graphs.nodes import ATEN, Call, Shape, Value

Rule = Callable[[Call], list[Value]]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_BY_NAME: dict[str, Callable[..., Any]] = {}
"""Rules, and functions that make one from an argument, by the name in `aten.csv`."""


def rule(function: _Function) -> _Function:
    """Register a rule, or a function that makes one, by its name."""
    _BY_NAME[function.__name__] = function
    return function


@rule
def elementwise(operator: str) -> Rule:
    """Return a rule for one node of all tensors."""

    def rule(call: Call) -> list[Value]:
        return [call.emit(operator, *call.tensors())]

    return rule


@rule
def binary(operator: str) -> Rule:
    """Return a rule for one node of the first two operands; numbers are constants."""

    def rule(call: Call) -> list[Value]:
        return [call.emit(operator, *_operands(call, *list(call.arguments)[:2]))]

    return rule


def _operands(call: Call, *names: str) -> list[Value]:
    """Return these arguments in order; numbers are constants."""
    return [call.value(name) or Value(()) for name in names]


@rule
def alias(call: Call) -> list[Value]:
    return [call.input.of_shape(shape) for shape in call.shapes]


@rule
def constant(call: Call) -> list[Value]:
    """Return new tensors with the shapes of the results, without values."""
    return [Value(shape) for shape in call.shapes]


@rule
def first(operator: str) -> Rule:
    """Return a rule for one node of the first tensor, with the call's number of outputs."""

    def rule(call: Call) -> list[Value]:
        return call.builder.emit(operator, [call.input], *call.shapes)

    return rule


@rule
def along(operator: str) -> Rule:
    """Return a rule like `first`, along the axis of the call."""

    def rule(call: Call) -> list[Value]:
        axis = 0 if call["dim"] is None else call["dim"]
        return call.builder.emit(operator, [call.input], *call.shapes, axis=axis)

    return rule


@rule
def reduction(operator: str) -> Rule:
    """Return a rule like `first`, over the axes of the call, or all."""

    def rule(call: Call) -> list[Value]:
        return [call.emit(operator, call.input, axes=_axes(call))]

    return rule


def _axes(call: Call) -> list[int]:
    axes = call["dim"]
    return [axes] if isinstance(axes, int) else list(axes or [])


@rule
def pick(operator: str) -> Rule:
    """Return a rule for parts of the first operand, by the indices in the second."""

    def rule(call: Call) -> list[Value]:
        values = call.values("weight", "self", "indices", "index")
        return [call.emit(operator, *values, axis=call["dim"] or 0)]

    return rule


@rule
def pad(mode: str) -> Rule:
    """Return a rule for padding with a constant or with values of the image."""

    def rule(call: Call) -> list[Value]:
        given = call["mode"] or mode
        return [call.emit("Pad", call.input, mode={"replicate": "edge"}.get(given, given))]

    return rule


@rule
def elu(call: Call) -> list[Value]:
    return [call.emit("Elu", call.input, alpha=float(call["alpha"]))]


@rule
def leaky_relu(call: Call) -> list[Value]:
    return [call.emit("LeakyRelu", call.input, alpha=float(call["negative_slope"]))]


@rule
def hard_sigmoid(call: Call) -> list[Value]:
    return [call.emit("HardSigmoid", call.input, alpha=1 / 6)]


@rule
def dropout(call: Call) -> list[Value]:
    """Return the tensor itself, as in inference, and the mask where it is a result."""
    return [call.input, *(Value(shape) for shape in call.shapes[1:])]


@rule
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


@rule
def add(call: Call, operator: str = "Add") -> list[Value]:
    values = _operands(call, "self", "other")
    other = call.value("other")
    if call["alpha"] not in (None, 1) and other is not None:
        values[-1] = call.emit("Mul", other, shape=other.shape)
    return [call.emit(operator, *values)]


@rule
def mul(call: Call) -> list[Value]:
    """Return a product; one with the choice of samples to drop is the tensor, as in inference."""
    factors = _operands(call, "self", "other")
    kept = [value for value in factors if not value.drops]
    if len(kept) == 1:
        return [kept[0].of_shape(call.shapes[0])]
    return [call.emit("Mul", *factors)]


@rule
def sub(call: Call) -> list[Value]:
    return add(call, "Sub")


@rule
def reversed_sub(call: Call) -> list[Value]:
    """Return a number, or another tensor, minus this one."""
    return [call.emit("Sub", *_operands(call, "other", "self"))]


@rule
def div(call: Call) -> list[Value]:
    value = call.emit("Div", *_operands(call, "self", "other"))
    return [value if call["rounding_mode"] is None else call.emit("Floor", value)]


@rule
def clamp(call: Call) -> list[Value]:
    """Return one Clip for numbers; tensors as bounds are Max and Min."""
    value, bounds = call.input, call.values("min", "max")
    if not any(bound.shape for bound in bounds):
        return [call.emit("Clip", value)]
    for operator, bound in zip(("Max", "Min"), map(call.value, ("min", "max")), strict=True):
        if bound is not None:
            value = call.emit(operator, value, bound)
    return [value]


@rule
def vector_norm(call: Call) -> list[Value]:
    axes = _axes(call)
    if call["ord"] in (1, 2):
        return [call.emit(f"ReduceL{int(call['ord'])}", call.input, axes=axes)]
    shape = call.input.shape
    powers = call.emit("Pow", call.emit("Abs", call.input, shape=shape), shape=shape)
    return [call.emit("Pow", call.emit("ReduceSum", powers, axes=axes))]


@rule
def variance(call: Call) -> list[Value]:
    """Return the mean squared difference from the mean, times n / (n - 1) unless uncorrected."""
    x, axes = call.input, _axes(call)
    mean = call.emit("ReduceMean", x, axes=axes)
    difference = call.emit("Sub", x, mean, shape=x.shape)
    square = call.emit("Mul", difference, difference, shape=x.shape)
    result = call.emit("ReduceMean", square, axes=axes)
    if call["unbiased"] is not False and call["correction"] != 0:
        result = call.emit("Div", call.emit("Mul", result))
    return [result, mean][: len(call.outputs)]


@rule
def deviation(call: Call) -> list[Value]:
    squared, *mean = variance(call)
    return [call.emit("Sqrt", squared), *mean]


@rule
def inverse_root(call: Call) -> list[Value]:
    return [call.emit("Div", Value(()), call.emit("Sqrt", call.input))]


@rule
def square(call: Call) -> list[Value]:
    return [call.emit("Mul", call.input, call.input)]


@rule
def addcmul(call: Call) -> list[Value]:
    base, left, right = call.values("self", "tensor1", "tensor2")
    shape: Shape = np.broadcast_shapes(left.shape, right.shape)
    product = call.emit("Mul", call.emit("Mul", left, right, shape=shape), shape=shape)
    return [call.emit("Add", base, product)]


@rule
def lerp(call: Call) -> list[Value]:
    start, end, *weight = call.tensors()
    difference = call.emit("Mul", call.emit("Sub", end, start), *weight)
    return [call.emit("Add", start, difference)]


@rule
def where(call: Call) -> list[Value]:
    return [call.emit("Where", *_operands(call, "condition", "self", "other"))]


@rule
def masked_fill(call: Call) -> list[Value]:
    return [call.emit("Where", *_operands(call, "mask", "value", "self"))]


def transpose_of(call: Call, value: Value, shape: Shape, perm: Sequence[int]) -> Value:
    """Transpose a value; two transpositions in a row are one, as in the exporter."""
    before = call.builder.before(value, "Transpose")
    if before is not None:
        value, node = before
        perm = [node.attributes["perm"][axis] for axis in perm]
    return call.emit("Transpose", value, shape=shape, perm=list(perm))


@rule
def transpose(call: Call) -> list[Value]:
    """Reorder the axes, or swap two of them."""
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


@rule
def flatten(call: Call) -> list[Value]:
    rank = len(call.input.shape)
    start, end = call["start_dim"] % max(rank, 1), call["end_dim"] % max(rank, 1)
    if rank == 1:
        return alias(call)
    two_axes = (start, end) in ((1, rank - 1), (0, rank - 2))
    return [call.emit("Flatten" if two_axes else "Reshape", call.input)]


@rule
def select(call: Call) -> list[Value]:
    """Gather an index from the start; an index from the end is a slice whose axis is dropped."""
    x, axis = call.input, call["dim"] % len(call.input.shape)
    if call["index"] >= 0:
        return [call.emit("Gather", x, Value(()), axis=axis)]
    sliced = call.emit("Slice", x, shape=(*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    return [call.emit("Squeeze", sliced)]


@rule
def unbind(call: Call) -> list[Value]:
    x, axis = call.input, call["dim"] % len(call.input.shape)
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    pieces = call.builder.emit("Split", [x], *[shape] * len(call.outputs), axis=axis)
    return [call.emit("Squeeze", piece) for piece in pieces]


@rule
def chunk(call: Call) -> list[Value]:
    return [call.emit("Slice", call.input, shape=shape) for shape in call.shapes]


@rule
def concat(call: Call) -> list[Value]:
    axis = call["axis"] if call["dim"] is None else call["dim"]
    return [call.emit("Concat", *call.sequence("tensors"), axis=axis)]


@rule
def stack(call: Call) -> list[Value]:
    axis = call["dim"] % len(call.shapes[0])
    values = [
        call.emit("Unsqueeze", v, shape=(*v.shape[:axis], 1, *v.shape[axis:]))
        for v in call.sequence("tensors")
    ]
    return [call.emit("Concat", *values, axis=axis)]


@rule
def roll(call: Call) -> list[Value]:
    """Return two slices along each axis, concatenated in reverse order."""
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


@rule
def windows(call: Call) -> list[Value]:
    """Return overlapping windows along an axis, which the exporter takes out one by one."""
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


@rule
def index(call: Call) -> list[Value]:
    indices = call.sequence("indices")
    if len(indices) > 1:
        return [call.emit("GatherND", call.input, *indices)]
    axis = next(i for i, given in enumerate(call["indices"]) if given is not None)
    return [call.emit("Gather", call.input, *indices, axis=axis)]


@rule
def scatter(call: Call) -> list[Value]:
    """Write into a tensor; if nothing of it stays, the result is what was written."""
    written = call.value("src") or call.value("values") or Value(())
    return [call.emit("ScatterND", call.input, Value(()), written)]


@rule
def extremum(operator: str) -> Rule:
    """Return a rule for a reduction; over one axis a second node gives the indices."""

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


@rule
def einsum(call: Call) -> list[Value]:
    return [call.emit("Einsum", *call.sequence("tensors"), equation=call["equation"])]


@rule
def linear(call: Call) -> list[Value]:
    x, weight = call.values("input", "weight")
    bias = call.value("bias")
    transposed = call.emit("Transpose", weight, shape=weight.shape[::-1], perm=[1, 0])
    if bias is None:
        return [call.emit("MatMul", x, transposed)]
    if len(x.shape) == 2:
        return [call.emit("Gemm", x, weight, bias, transB=1)]
    return [call.emit("Add", bias, call.emit("MatMul", x, transposed))]


@rule
def addmm(call: Call) -> list[Value]:
    bias, left, right = call.tensors()
    scales: dict[str, Any] = {"alpha": float(call["alpha"]), "beta": float(call["beta"])}
    return [call.emit("Gemm", left, right, bias, **scales)]


@rule
def baddbmm(call: Call) -> list[Value]:
    bias, left, right = call.tensors()
    return [call.emit("Add", call.emit("MatMul", left, right), bias)]


@rule
def convolution(call: Call) -> list[Value]:
    # `_convolution` has a flag; of the others, only `conv_transposeNd` has an output padding.
    is_transposed = call.arguments.get("transposed", "output_padding" in call.arguments)
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
    if is_transposed:
        attributes["output_padding"] = _spread(call["output_padding"], len(kernel))
    operator = "ConvTranspose" if is_transposed else "Conv"
    return [call.emit(operator, x, weight, *bias, **attributes)]


@rule
def deform_conv(call: Call) -> list[Value]:
    """Return a deformable convolution of torchvision, whose bias and mask may be constants."""
    x, weight, offset, mask, bias = call.tensors()
    sizes = [value for value in call.arguments.values() if type(value) is int]
    attributes: dict[str, Any] = {
        "dilations": sizes[4:6],
        "group": sizes[6],
        "kernel_shape": list(weight.shape[2:]),
        "offset_group": sizes[7],
        "pads": sizes[2:4] * 2,
        "strides": sizes[:2],
    }
    return [call.emit("DeformConv", x, weight, offset, bias, mask, **attributes)]


@rule
def batch_norm(call: Call) -> list[Value]:
    names = ("input", "weight", "bias", "running_mean", "running_var")
    return [call.emit("BatchNormalization", *call.values(*names), epsilon=call["eps"])]


@rule
def layer_norm(call: Call) -> list[Value]:
    values = call.values("input", "weight", "bias")
    axis = -len(call["normalized_shape"])
    return [call.emit("LayerNormalization", *values, axis=axis, epsilon=call["eps"])]


@rule
def instance_norm(call: Call) -> list[Value]:
    values = call.values("input", "weight", "bias")
    return [call.emit("InstanceNormalization", *values, epsilon=call["eps"])]


@rule
def group_norm(call: Call) -> list[Value]:
    """Return an instance norm over groups, then scale and shift of each channel."""
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


@rule
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


@rule
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


@rule
def silu(call: Call) -> list[Value]:
    return [call.emit("Mul", call.input, call.emit("Sigmoid", call.input))]


@rule
def mish(call: Call) -> list[Value]:
    return [call.emit("Mul", call.input, call.emit("Tanh", call.emit("Softplus", call.input)))]


@rule
def attention(call: Call) -> list[Value]:
    """Return scaled queries times scaled keys, mask, softmax, times values."""
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


@rule
def flex_attention(call: Call) -> list[Value]:
    """Return attention without its mask, and constants for the statistics of its rows."""
    return [*attention(call), *map(Value, call.shapes[1:])]


@rule
def adaptive_pool(call: Call) -> list[Value]:
    """Return a global pool, a pool of equal windows, or two products with weights."""
    x, target = call.input, list(call.shapes[0][-2:])
    if target == [1, 1]:
        return [call.emit("GlobalAveragePool", x)]
    height, width = x.shape[-2:]
    if height % target[0] == 0 and width % target[1] == 0:
        kernel = [height // target[0], width // target[1]]
        pooled = call.emit(
            "AveragePool",
            x,
            kernel_shape=kernel,
            strides=kernel,
            pads=[0] * 4,
            count_include_pad=0,
        )
        return [pooled]
    rows = call.emit(
        "MatMul", Value((target[0], height)), x, shape=(*x.shape[:-2], target[0], width)
    )
    return [call.emit("MatMul", rows, Value((width, target[1])))]


@rule
def adaptive_max_pool(call: Call) -> list[Value]:
    x, target = call.input, list(call.shapes[0][-2:])
    if target == [1, 1]:
        operator, kernel = "GlobalMaxPool", list(x.shape[-2:])
    else:
        operator = "MaxPool"
        kernel = [-(-size // wanted) for size, wanted in zip(x.shape[-2:], target, strict=True)]
    attributes = {"kernel_shape": kernel, "strides": kernel, "pads": [0] * 4, "dilations": [1, 1]}
    return call.builder.emit(operator, [x], *call.shapes, **attributes)


def _spread(size: int | Sequence[int], axes: int) -> list[int]:
    """Return a number for each axis from one or several numbers."""
    sizes = [size] if isinstance(size, int) else list(size)
    return sizes * axes if len(sizes) == 1 else sizes


@rule
def lstm(call: Call) -> list[Value]:
    return _recurrent(call, "LSTM", 4)


@rule
def gru(call: Call) -> list[Value]:
    return _recurrent(call, "GRU", 3, linear_before_reset=1)


@rule
def rnn(activation: str) -> Rule:
    """Return the rule of layers with this activation."""

    def rule(call: Call) -> list[Value]:
        activations = [activation.encode()] * (2 if call["bidirectional"] else 1)
        return _recurrent(call, "RNN", 1, activations=activations)

    return rule


def _recurrent(call: Call, operator: str, gates: int, **attributes: Any) -> list[Value]:
    """Return a node for each layer with both directions; time comes first in ONNX."""
    x, weights = call.input, call.sequence("params")
    directions = 2 if call["bidirectional"] else 1
    each = len(weights) // (call["num_layers"] * directions)
    if call["batch_first"]:
        x = transpose_of(call, x, (x.shape[1], x.shape[0], x.shape[2]), [1, 0, 2])
    steps, batch, _ = x.shape
    last: list[list[Value]] = [[] for _ in call.shapes[1:]]
    for layer in range(call["num_layers"]):
        own = weights[layer * directions * each : (layer + 1) * directions * each]
        width = own[0].shape[0] // gates
        packed = [
            Value((directions, *own[i].shape), weights=_weights(own[i::each])) for i in (0, 1)
        ]
        packed += (
            [Value((directions, 2 * gates * width), weights=_weights(own))] if each > 2 else []
        )
        state = (directions, batch, width)
        y, *ends = call.builder.emit(
            operator,
            [x, *packed],
            (steps, directions, batch, width),
            *(state for _ in last),
            direction="bidirectional" if directions == 2 else "forward",
            hidden_size=width,
            **attributes,
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


@rule
def unfold(call: Call) -> list[Value]:
    """Return neighborhoods as columns: gathers along rows and columns of the padded image."""
    x = call.input
    shape = (*x.shape[:2], *call["kernel_size"], call.shapes[0][-1])
    value = call.emit("Gather", call.emit("Pad", x, shape=x.shape), Value(()), shape=shape)
    return [call.emit("Reshape", value)]


@rule
def max_pool(axes: int) -> Rule:
    """Return a rule for one to three axes; indices are within each image and channel."""

    def rule(call: Call) -> list[Value]:
        window = _window(call, axes)
        window["dilations"] = _spread(call["dilation"], axes)
        values = call.builder.emit("MaxPool", [call.input], *call.shapes, **window)
        if len(values) == 1:
            return values
        # ONNX counts places through the whole batch: the first of each image is taken off.
        x, ones = call.input, [1] * axes
        starts = call.builder.emit("MaxPool", [x], x.shape, x.shape, kernel_shape=ones)[1]
        start = call.emit("Slice", starts, shape=(*x.shape[:-axes], *ones))
        return [values[0], call.emit("Sub", values[1], start)]

    return rule


@rule
def average_pool(axes: int) -> Rule:
    """Return a rule for one to three axes."""

    def rule(call: Call) -> list[Value]:
        window = _window(call, axes)
        counted = int(any(window["pads"]) and call["count_include_pad"])
        return [call.emit("AveragePool", call.input, **window, count_include_pad=counted)]

    return rule


def _window(call: Call, axes: int) -> dict[str, Any]:
    """Return the window attributes; the default stride is the window's size."""
    kernel = _spread(call["kernel_size"], axes)
    return {
        "kernel_shape": kernel,
        "strides": _spread(call["stride"] or kernel, axes),
        "pads": _spread(call["padding"], axes) * 2,
    }


@rule
def fill(call: Call) -> list[Value]:
    """Fill a tensor; a whole tensor forgets its value, a part keeps the rest of its memory."""
    written, tensor = call.value("value"), call.outputs[0]
    if tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes():
        return scatter(call)
    if written is not None and written.depends:
        return [call.emit("Expand", written)]
    return [Value(call.shapes[0])]


@rule
def embedding_bag(call: Call) -> list[Value]:
    """Return rows of the table, reduced per bag; the exporter would write a loop."""
    table, places = call.values("weight", "indices")
    shape = (*places.shape, table.shape[-1])
    rows = call.emit("Gather", table, places, shape=shape, axis=0)
    scales = call.value("per_sample_weights")
    if scales is not None:
        rows = call.emit("Mul", rows, scales, shape=shape)
    bags = call.emit(("ReduceSum", "ReduceMean", "ReduceMax")[call["mode"]], rows)
    return [bags, *(Value(shape) for shape in call.shapes[1:])]


@rule
def bilinear(call: Call) -> list[Value]:
    """Return an Einsum; the exporter does not know the operator."""
    left, right, weight = call.values("input1", "input2", "weight")
    product = call.emit("Einsum", left, weight, right, equation="...i,oij,...j->...o")
    bias = call.value("bias")
    return [product if bias is None else call.emit("Add", product, bias)]


@rule
def as_in_the_file(call: Call) -> list[Value]:
    """Return a node of an ONNX file without a form in PyTorch; its attributes are JSON."""
    attributes = json.loads(call["attributes"])
    inputs = call.sequence("inputs")
    return call.builder.emit(call["operator"], inputs, *call.shapes, **attributes)


def _rule(text: str) -> Rule:
    """Return the rule of this name in the table, such as `gelu` or `elementwise:Mul`."""
    name, _, argument = text.partition(":")
    made: Rule = _BY_NAME[name]
    if argument:
        made = _BY_NAME[name](int(argument) if argument.isdigit() else argument)
    return made


RULES: Mapping[str, Rule] = {row.operator: _rule(row.rule) for row in ATEN.values() if row.rule}
"""Rules by name of the ATen operator; its in-place form (`relu_`) has the same rule."""
