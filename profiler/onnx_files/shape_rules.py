"""Output shapes of the common ONNX operators, in their plain forms.

ONNX's own inference is right, and slow when it is asked node by node. These rules answer for what
makes up nearly all nodes; whatever is unusual about a node (automatic padding, rounding up, sizes
that do not fit, an input of rank one) raises an exception of Python's own, and ONNX is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from trappm.profiler.onnx_files.operation import Operation

Shape = tuple[int, ...]
Values = Mapping[str, npt.NDArray[Any]]
Rule = Callable[[Operation, Sequence[Shape], Values], list[Shape]]

UNUSUAL = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError)
"""What a rule raises when it has no answer."""


def rule_for(operation: Operation) -> Rule | None:
    """The rule for this operator, if there is one."""
    return None if operation.domain else _RULES.get(operation.operator)


def _integers(operation: Operation, place: int, values: Values) -> list[int]:
    """The value of an input that is a list of integers; LookupError if it is not known."""
    value = values[operation.inputs[place]]
    if value.dtype.kind not in "iu" or value.ndim > 1:
        raise TypeError
    numbers = value.tolist()
    return numbers if value.ndim else [numbers]


def _given(operation: Operation, place: int) -> bool:
    return len(operation.inputs) > place and bool(operation.inputs[place])


def _listed(operation: Operation, place: int, name: str, values: Values) -> list[int] | None:
    """From an input, or from the attribute of older opsets; None if left out."""
    if _given(operation, place):
        return _integers(operation, place, values)
    numbers = operation.attributes.get(name)
    return None if numbers is None else list(numbers)


def _place(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise IndexError
    return axis % rank


def _places(axes: Iterable[int], rank: int) -> set[int]:
    places = [_place(axis, rank) for axis in axes]
    if len(set(places)) != len(places):
        raise ValueError
    return set(places)


def _same(_: Operation, inputs: Sequence[Shape], __: Values) -> list[Shape]:
    return [inputs[0]]


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape to which all of these spread.

    Raises:
        ValueError: they do not fit.
    """
    result = shapes[0]
    for other in shapes[1:]:
        if other == result or not other:
            continue
        rank = max(len(result), len(other))
        pairs = zip(
            (1,) * (rank - len(result)) + result, (1,) * (rank - len(other)) + other, strict=True
        )
        spread = []
        for a, b in pairs:
            if 1 not in (a, b) and a != b:
                raise ValueError
            spread.append(b if a == 1 else a)
        result = tuple(spread)
    return result


def _broadcast(_: Operation, inputs: Sequence[Shape], __: Values) -> list[Shape]:
    return [broadcast(inputs)]


def _windows(
    operation: Operation, sizes: Shape, kernel: Sequence[int]
) -> list[tuple[int, int, int]]:
    """For each spatial axis: padded size, extent of the kernel, stride."""
    attributes, rank = operation.attributes, len(sizes)
    if attributes.get("auto_pad", "NOTSET") != "NOTSET":
        raise ValueError
    pads = attributes.get("pads") or [0] * 2 * rank
    strides = attributes.get("strides") or [1] * rank
    dilations = attributes.get("dilations") or [1] * rank
    if len(pads) != 2 * rank or not len(kernel) == len(strides) == len(dilations) == rank:
        raise ValueError
    return [
        (size + pads[i] + pads[i + rank], dilations[i] * (kernel[i] - 1) + 1, strides[i])
        for i, size in enumerate(sizes)
    ]


def _fitting(windows: Iterable[tuple[int, int, int]]) -> Shape:
    sizes = []
    for size, kernel, stride in windows:
        if size < kernel or kernel < 1 or stride < 1:
            raise ValueError
        sizes.append((size - kernel) // stride + 1)
    return tuple(sizes)


def _conv(operation: Operation, inputs: Sequence[Shape], _: Values) -> list[Shape]:
    x, weight = inputs[:2]
    if weight[1] * operation.attributes.get("group", 1) != x[1]:
        raise ValueError
    kernel = operation.attributes.get("kernel_shape") or weight[2:]
    return [(x[0], weight[0], *_fitting(_windows(operation, x[2:], kernel)))]


def _conv_transpose(operation: Operation, inputs: Sequence[Shape], _: Values) -> list[Shape]:
    x, weight = inputs[:2]
    attributes = operation.attributes
    if weight[0] != x[1] or "output_shape" in attributes:
        raise ValueError
    kernel = attributes.get("kernel_shape") or weight[2:]
    sizes, more = x[2:], attributes.get("output_padding") or [0] * len(kernel)
    windows = _windows(operation, sizes, kernel)
    grown = [
        stride * (size - 1) + more[i] + extent - (padded - size)
        for i, (size, (padded, extent, stride)) in enumerate(zip(sizes, windows, strict=True))
    ]
    return [(x[0], weight[1] * attributes.get("group", 1), *grown)]


def _pool(operation: Operation, inputs: Sequence[Shape], _: Values) -> list[Shape]:
    x, attributes = inputs[0], operation.attributes
    windows = _windows(operation, x[2:], attributes["kernel_shape"])
    if attributes.get("ceil_mode") and any((size - k) % stride for size, k, stride in windows):
        raise ValueError
    return [(*x[:2], *_fitting(windows))]


def _global_pool(_: Operation, inputs: Sequence[Shape], __: Values) -> list[Shape]:
    return [inputs[0][:2] + (1,) * (len(inputs[0]) - 2)]


def _gemm(operation: Operation, inputs: Sequence[Shape], _: Values) -> list[Shape]:
    (rows, inner), (other, columns) = inputs[:2]
    if operation.attributes.get("transA"):
        rows, inner = inner, rows
    if operation.attributes.get("transB"):
        other, columns = columns, other
    if inner != other:
        raise ValueError
    return [(rows, columns)]


def _matmul(_: Operation, inputs: Sequence[Shape], __: Values) -> list[Shape]:
    left, right = inputs
    if len(left) < 2 or len(right) < 2 or left[-1] != right[-2]:
        raise ValueError
    return [(*broadcast([left[:-2], right[:-2]]), left[-2], right[-1])]


def _reshape(operation: Operation, inputs: Sequence[Shape], values: Values) -> list[Shape]:
    x, shape = inputs[0], _integers(operation, 1, values)
    if not operation.attributes.get("allowzero"):
        shape = [x[i] if size == 0 else size for i, size in enumerate(shape)]
    elements, known = math.prod(x), math.prod(size for size in shape if size != -1)
    if shape.count(-1) == 1:
        if elements == 0 or elements % known:
            raise ValueError
        shape[shape.index(-1)] = elements // known
    elif elements != known:
        raise ValueError
    return [tuple(shape)]


def _flatten(operation: Operation, inputs: Sequence[Shape], _: Values) -> list[Shape]:
    x, axis = inputs[0], operation.attributes.get("axis", 1)
    if not -len(x) <= axis <= len(x):
        raise IndexError
    return [(math.prod(x[:axis]), math.prod(x[axis:]))]


def _transpose(operation: Operation, inputs: Sequence[Shape], _: Values) -> list[Shape]:
    x, order = inputs[0], operation.attributes.get("perm")
    if order is None:
        return [x[::-1]]
    if len(order) != len(x) or len(_places(order, len(x))) != len(x):
        raise ValueError
    return [tuple(x[axis] for axis in order)]


def _concat(operation: Operation, inputs: Sequence[Shape], _: Values) -> list[Shape]:
    x = inputs[0]
    axis = _place(operation.attributes["axis"], len(x))
    before, after, total = x[:axis], x[axis + 1 :], 0
    for shape in inputs:
        if len(shape) != len(x) or shape[:axis] != before or shape[axis + 1 :] != after:
            raise ValueError
        total += shape[axis]
    return [(*before, total, *after)]


def _split(operation: Operation, inputs: Sequence[Shape], values: Values) -> list[Shape]:
    x, count = inputs[0], len(operation.outputs)
    axis = _place(operation.attributes.get("axis", 0), len(x))
    sizes = _listed(operation, 1, "split", values)
    if sizes is None:
        if x[axis] % count or operation.attributes.get("num_outputs", count) != count:
            raise ValueError
        sizes = [x[axis] // count] * count
    if sum(sizes) != x[axis] or len(sizes) != count:
        raise ValueError
    return [(*x[:axis], size, *x[axis + 1 :]) for size in sizes]


def _slice(operation: Operation, inputs: Sequence[Shape], values: Values) -> list[Shape]:
    shape = list(inputs[0])
    starts, ends = (_integers(operation, place, values) for place in (1, 2))
    axes: Sequence[int] = range(len(starts))
    if _given(operation, 3):
        axes = _integers(operation, 3, values)
    steps = _integers(operation, 4, values) if _given(operation, 4) else [1] * len(starts)
    _places(axes, len(shape))
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        shape[axis] = len(range(*slice(start, end, step).indices(shape[axis])))
    return [tuple(shape)]


def _squeeze(operation: Operation, inputs: Sequence[Shape], values: Values) -> list[Shape]:
    x, axes = inputs[0], _listed(operation, 1, "axes", values)
    if axes is None:
        return [tuple(size for size in x if size != 1)]
    places = _places(axes, len(x))
    if any(x[place] != 1 for place in places):
        raise ValueError
    return [tuple(size for place, size in enumerate(x) if place not in places)]


def _unsqueeze(operation: Operation, inputs: Sequence[Shape], values: Values) -> list[Shape]:
    axes = _listed(operation, 1, "axes", values)
    if axes is None:
        raise ValueError
    rank = len(inputs[0]) + len(axes)
    places = _places(axes, rank)
    sizes = iter(inputs[0])
    return [tuple(1 if place in places else next(sizes) for place in range(rank))]


def _gather(operation: Operation, inputs: Sequence[Shape], _: Values) -> list[Shape]:
    data, indices = inputs
    axis = _place(operation.attributes.get("axis", 0), len(data))
    return [data[:axis] + indices + data[axis + 1 :]]


def _gather_elements(_: Operation, inputs: Sequence[Shape], __: Values) -> list[Shape]:
    return [inputs[1]]


def _gather_nd(operation: Operation, inputs: Sequence[Shape], _: Values) -> list[Shape]:
    data, indices = inputs
    depth = operation.attributes.get("batch_dims", 0) + indices[-1]
    if not 0 < depth <= len(data):
        raise ValueError
    return [indices[:-1] + data[depth:]]


def _expand(operation: Operation, inputs: Sequence[Shape], values: Values) -> list[Shape]:
    return [broadcast([inputs[0], tuple(_integers(operation, 1, values))])]


def _tile(operation: Operation, inputs: Sequence[Shape], values: Values) -> list[Shape]:
    repeats = _integers(operation, 1, values)
    return [tuple(size * n for size, n in zip(inputs[0], repeats, strict=True))]


def _pad(operation: Operation, inputs: Sequence[Shape], values: Values) -> list[Shape]:
    shape, pads = list(inputs[0]), _listed(operation, 1, "pads", values) or []
    axes: Sequence[int] = range(len(shape))
    if _given(operation, 3):
        axes = _integers(operation, 3, values)
    if len(pads) != 2 * len(axes):
        raise ValueError
    _places(axes, len(shape))
    for i, axis in enumerate(axes):
        shape[axis] += pads[i] + pads[i + len(axes)]
    return [tuple(shape)]


def _reduce(operation: Operation, inputs: Sequence[Shape], values: Values) -> list[Shape]:
    x, axes = inputs[0], _listed(operation, 1, "axes", values)
    if not axes:
        if operation.attributes.get("noop_with_empty_axes"):
            return [x]
        axes = list(range(len(x)))
    return [_without(x, _places(axes, len(x)), operation)]


def _arg(operation: Operation, inputs: Sequence[Shape], _: Values) -> list[Shape]:
    x = inputs[0]
    return [_without(x, {_place(operation.attributes.get("axis", 0), len(x))}, operation)]


def _without(shape: Shape, places: set[int], operation: Operation) -> Shape:
    if operation.attributes.get("keepdims", 1):
        return tuple(1 if place in places else size for place, size in enumerate(shape))
    return tuple(size for place, size in enumerate(shape) if place not in places)


def _depth_to_space(operation: Operation, inputs: Sequence[Shape], _: Values) -> list[Shape]:
    (batch, channels, height, width), block = inputs[0], operation.attributes["blocksize"]
    if block < 1 or channels % (block * block):
        raise ValueError
    return [(batch, channels // (block * block), height * block, width * block)]


def _space_to_depth(operation: Operation, inputs: Sequence[Shape], _: Values) -> list[Shape]:
    (batch, channels, height, width), block = inputs[0], operation.attributes["blocksize"]
    if block < 1 or height % block or width % block:
        raise ValueError
    return [(batch, channels * block * block, height // block, width // block)]


def _constant_of_shape(operation: Operation, _: Sequence[Shape], values: Values) -> list[Shape]:
    return [tuple(_integers(operation, 0, values))]


_SAME_SHAPE = """
    Abs Acos Asin Atan BatchNormalization Cast Ceil Celu Clip Cos CumSum Dropout Elu Erf Exp Floor
    Gelu GroupNormalization HardSigmoid HardSwish Identity InstanceNormalization IsInf IsNaN LRN
    LayerNormalization LeakyRelu Log LogSoftmax LpNormalization Mish Neg Not PRelu
    RMSNormalization Reciprocal Relu Round ScatterElements ScatterND Selu Sigmoid Sign Sin Softmax
    Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu Trilu
"""
_SPREADING = """
    Add And Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Mul Or Pow Sub Sum
    Where Xor
"""
_REDUCING = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare"

_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_SAME_SHAPE.split(), _same),
    **dict.fromkeys(_SPREADING.split(), _broadcast),
    **dict.fromkeys([f"Reduce{name}" for name in _REDUCING.split()], _reduce),
    **dict.fromkeys(["ArgMax", "ArgMin"], _arg),
    **dict.fromkeys(["AveragePool", "LpPool", "MaxPool"], _pool),
    **dict.fromkeys(["GlobalAveragePool", "GlobalMaxPool"], _global_pool),
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "DepthToSpace": _depth_to_space,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Pad": _pad,
    "Reshape": _reshape,
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
