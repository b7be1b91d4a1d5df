"""Computes the small integer tensors that exporters leave in an ONNX graph: shapes, pads, axes.

ONNX's reference implementation computes them, one node at a time. A file may ask for a tensor of
any size, so operators that enlarge tensors run only if their result is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trappm.extensions.onnx.checked_model import MAX_RANK, Operation
from trappm.profiler.errors import UnsupportedModelError

MAX_FOLDED_ELEMENTS = 1024
"""Larger tensors are not shapes."""

Array = npt.NDArray[Any]
Inputs = Sequence[Array | None]

_ELEMENTWISE = frozenset(
    {"Abs", "Add", "And", "Cast", "Ceil", "Clip", "Div", "Equal", "Floor", "Greater",
     "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not",
     "Or", "Round", "Sqrt", "Sub", "Where"}
)  # fmt: skip
_NEVER_LARGER = frozenset(
    {"Concat", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Shape", "Size",
     "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}
)  # fmt: skip


def fold(operation: Operation, inputs: Inputs, opset: int) -> list[Array]:
    """Return the outputs of an operation, or an empty list if they are unknown or large.

    Args:
        operation: Of any operator.
        inputs: Values of all its inputs; None for one that is left out.
        opset: Version of ONNX's own operators in the file.
    """
    if operation.node is None:
        return []
    try:
        if not _is_small(operation, inputs):
            return []
        from onnx.reference.ops import load_op

        run = load_op("", operation.operator, opset)
        parameters = {"log": lambda *_: None, "opsets": {"": opset}, "new_ops": None}
        with np.errstate(all="ignore", divide="raise"):
            outputs = [*map(np.asarray, run(operation.node, parameters).run(*inputs))]
    except Exception:  # the file may have any attributes and any values
        return []
    small = all(_fits(value.shape) and not value.dtype.hasobject for value in outputs)
    return outputs if small and len(outputs) == len(operation.outputs) else []


def _is_small(operation: Operation, inputs: Inputs) -> bool:
    """Return whether the operation can be folded, and makes no large tensor of small ones."""
    given = [value for value in inputs if value is not None]
    if any(value.size > MAX_FOLDED_ELEMENTS for value in given):
        return False
    operator = operation.operator
    if operator in _ELEMENTWISE:
        return _fits(np.broadcast_shapes(*(value.shape for value in given)))
    if operator in _NEVER_LARGER:
        return True
    size = _SIZES.get(operator)
    return size is not None and _fits(size(operation.attributes, given))


def _fits(shape: Sequence[int]) -> bool:
    elements = math.prod(map(int, shape))  # Python's integers do not overflow
    return len(shape) <= MAX_RANK and 0 <= elements <= MAX_FOLDED_ELEMENTS


def _gather_shape(attributes: Mapping[str, Any], inputs: Sequence[Array]) -> list[int]:
    data, places = inputs
    return [*np.delete(data.shape, attributes.get("axis", 0)).tolist(), places.size]


def _expand_bound(_: Mapping[str, Any], inputs: Sequence[Array]) -> list[int]:
    # At least as large as the shape that both are broadcast to.
    return [inputs[0].size, *inputs[1].tolist()]


def _range_shape(_: Mapping[str, Any], inputs: Sequence[Array]) -> list[int]:
    start, limit, delta = (value.item() for value in inputs)
    return [max(0, math.ceil((limit - start) / delta))]


_SIZES: Mapping[str, Callable[[Mapping[str, Any], Sequence[Array]], Sequence[int]]] = {
    "ConstantOfShape": lambda _, inputs: inputs[0].tolist(),
    "Expand": _expand_bound,
    "Gather": _gather_shape,
    "Range": _range_shape,
    "Tile": lambda _, inputs: [inputs[0].size, *inputs[1].tolist()],
}
"""Shapes of results by operator, or of tensors that are at least as large."""


def shape_value(attributes: Mapping[str, Any], shape: Sequence[int]) -> Array:
    """Return what the operator Shape gives for a tensor of this shape.

    Raises:
        UnsupportedModelError: Its attributes are not whole numbers.
    """
    start, end = attributes.get("start", 0), attributes.get("end")
    if not isinstance(start, int) or not isinstance(end, int | None):
        raise UnsupportedModelError(f"a Shape from {start!r:.60} to {end!r:.60}")
    return np.array(shape, np.int64)[start:end]
