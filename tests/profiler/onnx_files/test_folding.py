"""Small tensors of a file are computed; large, overflowing and undefined ones are not."""

import numpy as np
import onnx
import pytest

from trappm.profiler.onnx_files.folding import fold
from trappm.profiler.onnx_files.opening import Operation


def folded(operator, *inputs, opset=17, **attributes):
    names = [f"i{place}" for place in range(len(inputs))]
    node = onnx.helper.make_node(operator, names, ["y"], **attributes)
    operation = Operation(operator, tuple(names), ("y",), attributes, node)
    values = [None if value is None else np.array(value, np.int64) for value in inputs]
    return [value.tolist() for value in fold(operation, values, opset)]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (lambda: folded("Mul", [3, 4], [2]), [6, 8]),
        (lambda: folded("Div", [-7], [2]), [-3]),  # toward zero
        (lambda: folded("Clip", [5], None, 3), [3]),
        (lambda: folded("Gather", [3, 4, 5], 1), 4),
        (lambda: folded("Slice", [1, 2, 3, 4], [1], [2**63 - 1], [0], [1]), [2, 3, 4]),
        (lambda: folded("Unsqueeze", [3], opset=11, axes=[0]), [[3]]),
        (lambda: folded("Unsqueeze", [3], [0]), [[3]]),
    ],
)
def test_small_tensors_are_those_of_onnx(result, expected):
    assert result() == [expected]


@pytest.mark.parametrize(
    "result",
    [
        lambda: folded("Div", [5], [0]),
        lambda: folded("Range", 0, 2**40, 1),
        lambda: folded("Range", -(2**31), 2**31 - 1, 1),
        lambda: folded("Expand", [1], [2**20, 2**20]),
        lambda: folded("Tile", [1], [2**20]),
        lambda: folded("ConstantOfShape", [2**40]),
        lambda: folded("Gather", list(range(1000)), list(range(1000)) * 2),
        lambda: folded("Softmax", [1, 2]),
    ],
)
def test_everything_else_is_unknown(result):
    assert result() == []
