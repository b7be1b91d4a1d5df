"""Which ONNX nodes each PyTorch operator stands for: those of our exporter at opset 17.

A rule gets one call of an operator whose result depends on the images and says what it is made of.
Rules are needed for such calls only: whatever is made of weights and constants alone is folded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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


def _alias(call: Call) -> list[Value]:
    return [call.input.of_shape(shape) for shape in call.shapes]


def _constant(call: Call) -> list[Value]:
    """A new tensor of the shape of another, without its values."""
    return [Value(shape) for shape in call.shapes]


def _first(operator: str) -> Rule:
    """One node of the first tensor, of as many outputs as the call has."""

    def rule(call: Call) -> list[Value]:
        return call.builder.emit(operator, [call.input], *call.shapes)

    return rule


def _dropout(call: Call) -> list[Value]:
    return [call.emit("Dropout", call.input)] if call["train"] and call["p"] else _alias(call)


def _cast(call: Call) -> list[Value]:
    source = next(t for t in call.arguments.values() if isinstance(t, torch.Tensor))
    if source.dtype == call.outputs[0].dtype:
        return _alias(call)
    return [call.emit("Cast", call.input)]


def _add(call: Call, operator: str = "Add") -> list[Value]:
    values = call.tensors()
    other = call.value("other")
    if call["alpha"] not in (None, 1) and other is not None:
        values[-1] = call.emit("Mul", other, shape=other.shape)
    return [call.emit(operator, *values)]


def _sub(call: Call) -> list[Value]:
    return _add(call, "Sub")


def _div(call: Call) -> list[Value]:
    value = call.emit("Div", *call.tensors())
    return [value if call["rounding_mode"] is None else call.emit("Floor", value)]


def _clamp(call: Call) -> list[Value]:
    """One Clip for numbers; tensors as bounds are Max and Min."""
    value, bounds = call.input, call.values("min", "max")
    if not any(bound.shape for bound in bounds):
        return [call.emit("Clip", value)]
    for operator, bound in zip(("Max", "Min"), map(call.value, ("min", "max")), strict=True):
        if bound is not None:
            value = call.emit(operator, value, bound)
    return [value]


def _linear(call: Call) -> list[Value]:
    x, weight = call.values("input", "weight")
    bias = call.value("bias")
    transposed = call.emit("Transpose", weight, shape=weight.shape[::-1])
    if bias is None:
        return [call.emit("MatMul", x, transposed)]
    if len(x.shape) == 2:
        return [call.emit("Gemm", x, transposed, bias)]
    return [call.emit("Add", bias, call.emit("MatMul", x, transposed))]


def _addmm(call: Call) -> list[Value]:
    bias, left, right = call.tensors()
    return [call.emit("Gemm", left, right, bias)]


def _baddbmm(call: Call) -> list[Value]:
    bias, left, right = call.tensors()
    return [call.emit("Add", call.emit("MatMul", left, right), bias)]


def _conv(call: Call) -> list[Value]:
    operator = "ConvTranspose" if call["transposed"] else "Conv"
    return [call.emit(operator, *call.values("input", "weight", "bias"))]


def _conv_transpose(call: Call) -> list[Value]:
    return [call.emit("ConvTranspose", *call.values("input", "weight", "bias"))]


def _batch_norm(call: Call) -> list[Value]:
    names = ("input", "weight", "bias", "running_mean", "running_var")
    return [call.emit("BatchNormalization", *call.values(*names))]


def _layer_norm(call: Call) -> list[Value]:
    return [call.emit("LayerNormalization", *call.values("input", "weight", "bias"))]


def _instance_norm(call: Call) -> list[Value]:
    return [call.emit("InstanceNormalization", *call.values("input", "weight", "bias"))]


def _group_norm(call: Call) -> list[Value]:
    """Instances of one group each, then the scale and shift of each channel."""
    x, groups = call.input, call["num_groups"]
    elements = 1
    for size in x.shape[1:]:
        elements *= size
    grouped = (x.shape[0], groups, elements // groups)
    constant = Value((groups,))
    value = call.emit("Reshape", x, shape=grouped)
    value = call.emit("InstanceNormalization", value, constant, constant, shape=grouped)
    value = call.emit("Reshape", value)
    for operator, name in (("Mul", "weight"), ("Add", "bias")):
        weight = call.value(name)
        if weight is None:  # the exporter writes ones and zeros
            weight = Value((1,))
        spread = weight.of_shape(weight.shape + (1,) * (len(x.shape) - 2))
        value = call.emit(operator, value, spread)
    return [value]


def _rms_norm(call: Call) -> list[Value]:
    x, axes = call.input, len(call["normalized_shape"])
    reduced = x.shape[:-axes] + (1,) * axes
    value = call.emit("ReduceMean", call.emit("Mul", x, x), shape=reduced)
    for operator in ("Add", "Sqrt"):
        value = call.emit(operator, value, shape=reduced)
    normal = call.emit("Div", x, value)
    weight = call.value("weight")
    return [normal if weight is None else call.emit("Mul", normal, weight)]


def _vector_norm(call: Call) -> list[Value]:
    if call["ord"] == 2:
        return [call.emit("ReduceL2", call.input)]
    if call["ord"] == 1:
        return [call.emit("ReduceL1", call.input)]
    shape = call.input.shape
    powers = call.emit("Pow", call.emit("Abs", call.input, shape=shape), shape=shape)
    return [call.emit("Pow", call.emit("ReduceSum", powers))]


def _variance(call: Call) -> list[Value]:
    """Mean of the squared differences from the mean, scaled by n / (n - 1) unless told not to."""
    x = call.input
    mean = call.emit("ReduceMean", x)
    difference = call.emit("Sub", x, mean, shape=x.shape)
    square = call.emit("Mul", difference, difference, shape=x.shape)
    variance = call.emit("ReduceMean", square)
    if call["unbiased"] is not False and call["correction"] != 0:
        variance = call.emit("Div", call.emit("Mul", variance))
    return [variance, mean][: len(call.outputs)]


def _deviation(call: Call) -> list[Value]:
    variance, *mean = _variance(call)
    return [call.emit("Sqrt", variance), *mean]


def _gelu(call: Call) -> list[Value]:
    x = call.input
    if call["approximate"] == "none":
        erf = call.emit("Erf", call.emit("Div", x))
        return [call.emit("Mul", call.emit("Mul", x, call.emit("Add", erf)))]
    number = Value(())
    cube = call.emit("Mul", x, call.emit("Mul", x, x))
    inner = call.emit("Mul", number, call.emit("Add", x, call.emit("Mul", number, cube)))
    shifted = call.emit("Add", number, call.emit("Tanh", inner))
    return [call.emit("Mul", number, call.emit("Mul", x, shifted))]


def _silu(call: Call) -> list[Value]:
    return [call.emit("Mul", call.input, call.emit("Sigmoid", call.input))]


def _mish(call: Call) -> list[Value]:
    return [call.emit("Mul", call.input, call.emit("Tanh", call.emit("Softplus", call.input)))]


def _inverse_root(call: Call) -> list[Value]:
    return [call.emit("Div", Value(()), call.emit("Sqrt", call.input))]


def _square(call: Call) -> list[Value]:
    return [call.emit("Mul", call.input, call.input)]


def _addcmul(call: Call) -> list[Value]:
    base, left, right = call.values("self", "tensor1", "tensor2")
    shape: Shape = np.broadcast_shapes(left.shape, right.shape)
    product = call.emit("Mul", call.emit("Mul", left, right, shape=shape), shape=shape)
    return [call.emit("Add", base, product)]


def _lerp(call: Call) -> list[Value]:
    start, end, *weight = call.tensors()
    difference = call.emit("Mul", call.emit("Sub", end, start), *weight)
    return [call.emit("Add", start, difference)]


def _where(call: Call) -> list[Value]:
    return [call.emit("Where", *call.tensors())]


def _masked_fill(call: Call) -> list[Value]:
    return [call.emit("Where", *call.values("mask", "value", "self"))]


def _attention(call: Call) -> list[Value]:
    """Scaled queries times scaled keys, mask, softmax, times values."""
    query, key, value = call.values("query", "key", "value")
    turned = (*key.shape[:-2], key.shape[-1], key.shape[-2])
    scores_shape = (*query.shape[:-1], key.shape[-2])
    keys = _transpose_of(call, key, turned)
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
        scores = call.emit("Where", unknown, scores, shape=scores_shape)
    return [call.emit("MatMul", scores, value)]


def _transpose_of(call: Call, value: Value, shape: Shape) -> Value:
    """Two transpositions in a row are one, as the exporter fuses them."""
    before = call.builder.before(value, "Transpose")
    return call.emit("Transpose", value if before is None else before, shape=shape)


def _transpose(call: Call) -> list[Value]:
    return [_transpose_of(call, call.input, call.shapes[0])]


def _flatten(call: Call) -> list[Value]:
    rank = len(call.input.shape)
    start, end = call["start_dim"] % max(rank, 1), call["end_dim"] % max(rank, 1)
    if rank == 1:
        return _alias(call)
    two_axes = (start, end) in ((1, rank - 1), (0, rank - 2))
    return [call.emit("Flatten" if two_axes else "Reshape", call.input)]


def _select(call: Call) -> list[Value]:
    """An index from the start gathers; one from the end is a slice whose axis is dropped."""
    x, axis = call.input, call["dim"] % len(call.input.shape)
    if call["index"] >= 0:
        return [call.emit("Gather", x, Value(()))]
    sliced = call.emit("Slice", x, shape=(*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    return [call.emit("Squeeze", sliced)]


def _unbind(call: Call) -> list[Value]:
    x, axis = call.input, call["dim"] % len(call.input.shape)
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    pieces = call.builder.emit("Split", [x], *[shape] * len(call.outputs))
    return [call.emit("Squeeze", piece) for piece in pieces]


def _chunk(call: Call) -> list[Value]:
    return [call.emit("Slice", call.input, shape=shape) for shape in call.shapes]


def _concat(call: Call) -> list[Value]:
    return [call.emit("Concat", *call.sequence("tensors"))]


def _stack(call: Call) -> list[Value]:
    axis = call["dim"] % len(call.shapes[0])
    values = [
        call.emit("Unsqueeze", v, shape=(*v.shape[:axis], 1, *v.shape[axis:]))
        for v in call.sequence("tensors")
    ]
    return [call.emit("Concat", *values)]


def _roll(call: Call) -> list[Value]:
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


def _index(call: Call) -> list[Value]:
    indices = call.sequence("indices")
    return [call.emit("Gather" if len(indices) == 1 else "GatherND", call.input, *indices)]


def _scatter(call: Call) -> list[Value]:
    """Writing into a tensor; where nothing of it stays, the result is what was written."""
    return [call.emit("ScatterND", *call.tensors())]


def _extremum(operator: str) -> Rule:
    """Over one axis also the place: a second node."""

    def rule(call: Call) -> list[Value]:
        if call.value("other") is not None:
            return [call.emit(operator, *call.tensors())]
        names = (f"Reduce{operator}", f"Arg{operator}")
        return [call.emit(name, call.input) for name in names[: len(call.outputs)]]

    return rule


def _adaptive_pool(call: Call) -> list[Value]:
    """As `profiler.onnx_symbolics` writes it."""
    x, target = call.input, list(call.shapes[0][-2:])
    if target == [1, 1]:
        return [call.emit("GlobalAveragePool", x)]
    height, width = x.shape[-2:]
    if height % target[0] == 0 and width % target[1] == 0:
        kernel = [height // target[0], width // target[1]]
        return [call.emit("AveragePool", x, kernel_shape=kernel)]
    rows = call.emit(
        "MatMul", Value((target[0], height)), x, shape=(*x.shape[:-2], target[0], width)
    )
    return [call.emit("MatMul", rows, Value((width, target[1])))]


def _adaptive_max_pool(call: Call) -> list[Value]:
    x, target = call.input, list(call.shapes[0][-2:])
    if target == [1, 1]:
        operator, kernel = "GlobalMaxPool", list(x.shape[-2:])
    else:
        operator = "MaxPool"
        kernel = [-(-size // wanted) for size, wanted in zip(x.shape[-2:], target, strict=True)]
    return call.builder.emit(operator, [x], *call.shapes, kernel_shape=kernel)


def _average_pool(call: Call) -> list[Value]:
    """Zeros that count in the average are padded first."""
    x, padding = call.input, call["padding"]
    pads = [padding] * 2 if isinstance(padding, int) else list(padding) or [0]
    if call["count_include_pad"] and any(pads):
        rows, columns = pads[0], pads[-1]
        padded = (*x.shape[:-2], x.shape[-2] + 2 * rows, x.shape[-1] + 2 * columns)
        x = call.emit("Pad", x, shape=padded)
    return [call.emit("AveragePool", x, kernel_shape=_pair(call["kernel_size"]))]


def _max_pool(call: Call) -> list[Value]:
    return [call.emit("MaxPool", call.input, kernel_shape=_pair(call["kernel_size"]))]


def _pair(size: int | Sequence[int]) -> list[int]:
    sizes = [size] if isinstance(size, int) else list(size)
    return sizes * 2 if len(sizes) == 1 else sizes


def _unfold(call: Call) -> list[Value]:
    """Neighbourhoods as columns: two gathers along rows and columns of the padded image."""
    x = call.input
    shape = (*x.shape[:2], *call["kernel_size"], call.shapes[0][-1])
    value = call.emit("Gather", call.emit("Pad", x, shape=x.shape), Value(()), shape=shape)
    return [call.emit("Reshape", value)]


def _einsum(call: Call) -> list[Value]:
    return [call.emit("Einsum", *call.sequence("tensors"), equation=call["equation"])]


def _table() -> dict[str, Rule]:
    rules: dict[str, Rule] = {
        "_adaptive_avg_pool2d": _adaptive_pool,
        "_convolution": _conv,
        "adaptive_avg_pool2d": _adaptive_pool,
        "adaptive_max_pool2d": _adaptive_max_pool,
        "add": _add,
        "addcmul": _addcmul,
        "addmm": _addmm,
        "avg_pool2d": _average_pool,
        "baddbmm": _baddbmm,
        "batch_norm": _batch_norm,
        "cat": _concat,
        "chunk": _chunk,
        "clamp": _clamp,
        "concat": _concat,
        "clamp_max": _clamp,
        "clamp_min": _clamp,
        "copy_": _scatter,
        "div": _div,
        "dropout": _dropout,
        "einsum": _einsum,
        "flatten": _flatten,
        "gelu": _gelu,
        "group_norm": _group_norm,
        "im2col": _unfold,
        "index": _index,
        "index_put_": _scatter,
        "instance_norm": _instance_norm,
        "layer_norm": _layer_norm,
        "lerp": _lerp,
        "linalg_vector_norm": _vector_norm,
        "linear": _linear,
        "masked_fill": _masked_fill,
        "max_pool2d": _max_pool,
        "mish": _mish,
        "rms_norm": _rms_norm,
        "roll": _roll,
        "rsqrt": _inverse_root,
        "scaled_dot_product_attention": _attention,
        "select": _select,
        "silu": _silu,
        "square": _square,
        "stack": _stack,
        "std": _deviation,
        "std_mean": _deviation,
        "sub": _sub,
        "unbind": _unbind,
        "var": _variance,
        "var_mean": _variance,
        "where": _where,
    }
    rules |= {f"conv{n}d": _conv for n in (1, 2, 3)}
    rules |= {f"conv_transpose{n}d": _conv_transpose for n in (1, 2, 3)}
    rules |= dict.fromkeys(("permute", "transpose", "t", "swapaxes", "movedim"), _transpose)
    rules |= dict.fromkeys(("to", "type_as", "_to_copy", "float", "half"), _cast)
    rules |= dict.fromkeys(("alias", "clone", "contiguous", "detach", "lift_fresh"), _alias)
    rules |= dict.fromkeys(("zero_", "fill_"), _alias)
    for name in ("empty", "full", "ones", "zeros"):
        rules |= dict.fromkeys((f"new_{name}", f"{name}_like"), _constant)
    single = {
        "Reshape": "reshape reshape_as view view_as _unsafe_view unflatten",
        "Expand": "expand expand_as broadcast_to",
        "Tile": "repeat tile repeat_interleave",
        "Squeeze": "squeeze",
        "Unsqueeze": "unsqueeze",
        "Slice": "narrow slice",
        "Split": "split split_with_sizes tensor_split",
        "Pad": "pad constant_pad_nd reflection_pad2d replication_pad2d",
        "ReduceMean": "mean",
        "ReduceSum": "sum",
        "ReduceMax": "amax",
        "ReduceMin": "amin",
        "ReduceProd": "prod",
        "ReduceLogSumExp": "logsumexp",
        "ArgMax": "argmax",
        "ArgMin": "argmin",
        "Softmax": "softmax _softmax",
        "LogSoftmax": "log_softmax _log_softmax",
        "CumSum": "cumsum",
        "TopK": "topk sort",
        "DepthToSpace": "pixel_shuffle",
        "SpaceToDepth": "pixel_unshuffle",
        "Col2Im": "col2im",
        "Resize": "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d "
        "upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    }
    for operator, names in single.items():
        rules |= dict.fromkeys(names.split(), _first(operator))
    several = {
        "Clip": "hardtanh relu6",
        "MatMul": "matmul bmm mm mv",
        "Gather": "index_select embedding",
        "GatherElements": "gather",
        "GridSample": "grid_sampler grid_sampler_2d",
        "ScatterElements": "scatter",
        "HardSigmoid": "hardsigmoid",
        "HardSwish": "hardswish",
        "LeakyRelu": "leaky_relu",
        "LogSoftmax": "log_softmax",
        "Max": "maximum",
        "Min": "minimum",
        "Mul": "mul multiply",
        "PRelu": "prelu _prelu_kernel",
        "Pow": "pow",
        "Sub": "rsub",
        "ThresholdedRelu": "threshold",
    }
    for operator, names in several.items():
        rules |= dict.fromkeys(names.split(), elementwise(operator))
    rules["max"], rules["min"] = _extremum("Max"), _extremum("Min")
    return rules


RULES: Mapping[str, Rule] = _table()
"""By the name of the ATen operator; its in-place form (`relu_`) has the same rule."""
