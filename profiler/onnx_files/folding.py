"""Computes the small integer tensors that exporters leave in an ONNX graph: shapes, pads, axes.

They are computed with NumPy, one node at a time, and only while they stay small: a file may ask
for a tensor of any size, and gets no memory for it. What cannot be computed is simply not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.onnx_files.stored import Operation

MAX_FOLDED_ELEMENTS = 1024
"""Larger tensors are no shapes."""

_MAX_RANK = 16
_MAX_EXACT = 1 << 53
"""Integers up to here are exact in float64, so that overflow can be noticed there."""
_MAX_SMALL = 1 << 20

Array = npt.NDArray[Any]
Attributes = Mapping[str, Any]
_Rule = Callable[[Attributes, Sequence[Array]], Sequence[Any] | Any]


class _Unknown(Exception):  # noqa: N818  (an answer, not an error)
    """The value is too large, or not one that can be computed here."""


def fold(operation: Operation, inputs: Sequence[Array]) -> list[Array]:
    """The operation's outputs, or an empty list if they cannot be computed or would be large.

    Args:
        operation: of any operator and opset from 11 on.
        inputs: the values of all its inputs; an empty array of dimension 1 for one left out.
    """
    rule = _RULES.get(operation.operator)
    if rule is None:
        return []
    for value in inputs:
        if value.size > MAX_FOLDED_ELEMENTS:
            return []
    try:
        with np.errstate(all="ignore"):
            result = rule(operation.attributes, inputs)
    except (_Unknown, ArithmeticError, ValueError, TypeError, LookupError, MemoryError):
        return []
    outputs = [np.asarray(o) for o in (result if isinstance(result, list) else [result])]
    for value in outputs:
        if value.size > MAX_FOLDED_ELEMENTS or value.ndim > _MAX_RANK or value.dtype.hasobject:
            return []
    return outputs if len(outputs) == len(operation.outputs) else []


def _bounded(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape, if a tensor of it may be made."""
    sizes = tuple(int(size) for size in shape)
    if (
        len(sizes) > _MAX_RANK
        or any(s < 0 for s in sizes)
        or math.prod(sizes) > MAX_FOLDED_ELEMENTS
    ):
        raise _Unknown
    return sizes


def _check_spread(inputs: Sequence[Array]) -> None:
    """Whether these may be spread to one shape; lists, as short as they are, always may."""
    if any(value.ndim > 1 for value in inputs):
        _bounded(np.broadcast_shapes(*(value.shape for value in inputs)))


def _elementwise(function: Callable[..., Any]) -> _Rule:
    def rule(_: Attributes, inputs: Sequence[Array]) -> Any:
        _check_spread(inputs)
        result = function(*inputs)
        if result.dtype.kind in "iu" and not all(_is_small(value) for value in inputs):
            exact = function(*(value.astype(np.float64) for value in inputs))
            if not np.all(np.abs(exact) < _MAX_EXACT):
                raise _Unknown
        return result

    return rule


def _is_small(value: Array) -> bool:
    """Whether it is one number of which neither the sum nor the product with another overflows."""
    return not value.ndim and -_MAX_SMALL < value.item() < _MAX_SMALL


def _truth(function: Callable[..., Any]) -> _Rule:
    def rule(_: Attributes, inputs: Sequence[Array]) -> Any:
        _check_spread(inputs)
        return function(*inputs)

    return rule


def _div(_: Attributes, inputs: Sequence[Array]) -> Any:
    dividend, divisor = inputs
    _check_spread(inputs)
    if dividend.dtype.kind not in "iu":
        return dividend / divisor
    if not divisor.all():
        raise _Unknown
    quotient = np.abs(dividend) // np.abs(divisor)  # towards zero, as in C
    return (quotient * np.sign(dividend) * np.sign(divisor)).astype(dividend.dtype)


def _mod(attributes: Attributes, inputs: Sequence[Array]) -> Any:
    _check_spread(inputs)
    if inputs[0].dtype.kind in "iu" and not inputs[1].all():
        raise _Unknown
    return (np.fmod if attributes.get("fmod") else np.mod)(*inputs)


def _cast(attributes: Attributes, inputs: Sequence[Array]) -> Any:
    kind = onnx.helper.tensor_dtype_to_np_dtype(attributes["to"])
    if inputs[0].dtype.kind == "f" and not np.all(np.abs(inputs[0]) < _MAX_EXACT):
        raise _Unknown
    return inputs[0].astype(kind)


def _clip(_: Attributes, inputs: Sequence[Array]) -> Any:
    low, high = (*inputs[1:], np.zeros(0), np.zeros(0))[:2]
    return np.clip(inputs[0], low if low.size else None, high if high.size else None)


def _axes(attributes: Attributes, inputs: Sequence[Array]) -> tuple[int, ...] | None:
    """From the second input, or from the attribute of older opsets."""
    if len(inputs) > 1 and inputs[1].size:
        return tuple(inputs[1].ravel().tolist())
    return tuple(attributes["axes"]) if attributes.get("axes") else None


def _unsqueeze(attributes: Attributes, inputs: Sequence[Array]) -> Any:
    axes = _axes(attributes, inputs)
    data = inputs[0]
    if axes is None or data.ndim + len(axes) > _MAX_RANK:
        raise _Unknown
    if not data.ndim and axes in ((0,), (-1,)):  # by far the most frequent
        return data.reshape(1)
    return np.expand_dims(data, axes)


def _reshape(attributes: Attributes, inputs: Sequence[Array]) -> Any:
    data, shape = inputs[0], inputs[1].tolist()
    if not attributes.get("allowzero"):
        shape = [data.shape[i] if size == 0 else size for i, size in enumerate(shape)]
    return data.reshape(shape)


def _slice(_: Attributes, inputs: Sequence[Array]) -> Any:
    data, starts, ends = inputs[0], inputs[1].tolist(), inputs[2].tolist()
    given = [value.tolist() if value.size else None for value in inputs[3:]]
    axes, steps = (*given, None, None)[:2]
    cuts = [slice(None)] * data.ndim
    for axis, start, end, step in zip(
        axes or range(len(starts)), starts, ends, steps or [1] * len(starts), strict=True
    ):
        # Going backwards to the very beginning is written as an end far below zero.
        stop = None if step < 0 and end < -data.shape[axis] else end
        cuts[axis] = slice(start, stop, step)
    return data[tuple(cuts)]


def _gather(attributes: Attributes, inputs: Sequence[Array]) -> Any:
    data, indices = inputs
    axis = attributes.get("axis", 0)
    rest = math.prod(data.shape) // data.shape[axis]
    if rest * indices.size > MAX_FOLDED_ELEMENTS:
        raise _Unknown
    return np.take(data, indices, axis)


def _range(_: Attributes, inputs: Sequence[Array]) -> Any:
    start, limit, delta = (value.item() for value in inputs)
    count = max(0, math.ceil((limit - start) / delta))
    _bounded([count])
    return (start + delta * np.arange(count)).astype(inputs[0].dtype)


def _constant_of_shape(attributes: Attributes, inputs: Sequence[Array]) -> Any:
    value = attributes.get("value")
    filler = np.zeros(1, np.float32) if value is None else onnx.numpy_helper.to_array(value)
    return np.full(_bounded(inputs[0].tolist()), filler.ravel()[0])


def _expand(_: Attributes, inputs: Sequence[Array]) -> Any:
    shape = np.broadcast_shapes(inputs[0].shape, _bounded(inputs[1].tolist()))
    return np.broadcast_to(inputs[0], _bounded(shape))


def _tile(_: Attributes, inputs: Sequence[Array]) -> Any:
    repeats = inputs[1].tolist()
    _bounded([size * n for size, n in zip(inputs[0].shape, repeats, strict=True)])
    return np.tile(inputs[0], repeats)


def _reduce(function: Callable[..., Any]) -> _Rule:
    def rule(attributes: Attributes, inputs: Sequence[Array]) -> Any:
        axes = _axes(attributes, inputs)
        if axes is None and attributes.get("noop_with_empty_axes"):
            return inputs[0]
        keep = bool(attributes.get("keepdims", 1))
        exact = function(inputs[0].astype(np.float64), axis=axes, keepdims=keep)
        if not np.all(np.abs(exact) < _MAX_EXACT):
            raise _Unknown
        return function(inputs[0], axis=axes, keepdims=keep).astype(inputs[0].dtype)

    return rule


def _split(attributes: Attributes, inputs: Sequence[Array]) -> Any:
    axis = attributes.get("axis", 0)
    sizes = inputs[1].tolist() if len(inputs) > 1 else attributes.get("split")
    if not sizes or min(sizes) < 0 or sum(sizes) != inputs[0].shape[axis]:
        raise _Unknown
    return np.split(inputs[0], np.cumsum(sizes)[:-1], axis)


def _shape(attributes: Attributes, inputs: Sequence[Array]) -> Any:
    return shape_value(attributes, inputs[0].shape)


def shape_value(attributes: Attributes, shape: Sequence[int]) -> Array:
    """What the operator Shape gives for a tensor of this shape.

    Raises:
        UnsupportedModelError: its attributes are no whole numbers.
    """
    start, end = attributes.get("start", 0), attributes.get("end")
    if not isinstance(start, int) or not isinstance(end, int | None):
        raise UnsupportedModelError(f"a Shape from {start!r:.60} to {end!r:.60}")
    return np.array(shape, np.int64)[start:end]


_RULES: Mapping[str, _Rule] = {
    "Abs": _elementwise(np.abs),
    "Add": _elementwise(np.add),
    "And": _truth(np.logical_and),
    "Cast": _cast,
    "Ceil": _elementwise(np.ceil),
    "Clip": _clip,
    "Concat": lambda a, i: np.concatenate(i, a["axis"]),
    "ConstantOfShape": _constant_of_shape,
    "Div": _div,
    "Equal": _truth(np.equal),
    "Expand": _expand,
    "Floor": _elementwise(np.floor),
    "Gather": _gather,
    "Greater": _truth(np.greater),
    "GreaterOrEqual": _truth(np.greater_equal),
    "Identity": lambda a, i: i[0],
    "Less": _truth(np.less),
    "LessOrEqual": _truth(np.less_equal),
    "Max": _elementwise(lambda *values: np.max(np.broadcast_arrays(*values), axis=0)),
    "Min": _elementwise(lambda *values: np.min(np.broadcast_arrays(*values), axis=0)),
    "Mod": _mod,
    "Mul": _elementwise(np.multiply),
    "Neg": _elementwise(np.negative),
    "Not": _truth(np.logical_not),
    "Or": _truth(np.logical_or),
    "Range": _range,
    "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min),
    "ReduceProd": _reduce(np.prod),
    "ReduceSum": _reduce(np.sum),
    "Reshape": _reshape,
    "Round": _elementwise(np.round),
    "Shape": _shape,
    "Size": lambda a, i: np.array(i[0].size, np.int64),
    "Slice": _slice,
    "Split": _split,
    "Sqrt": _elementwise(np.sqrt),
    "Squeeze": lambda a, i: np.squeeze(i[0], _axes(a, i)),
    "Sub": _elementwise(np.subtract),
    "Tile": _tile,
    "Transpose": lambda a, i: np.transpose(i[0], a.get("perm")),
    "Unsqueeze": _unsqueeze,
    "Where": _truth(np.where),
}
