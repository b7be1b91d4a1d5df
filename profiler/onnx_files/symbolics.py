"""ONNX forms of operators that timm's models use and PyTorch's TorchScript exporter cannot write.

Each form computes what the operator computes, from operators of opset 17.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.onnx import symbolic_helper
from torch.onnx.utils import register_custom_op_symbolic, unregister_custom_op_symbolic

from trappm.profiler.errors import TrappmError

_SINCE_OPSET = 9


@contextlib.contextmanager
def extra_symbolics() -> Iterator[None]:
    """Inside, the exporter knows these forms."""
    forms: dict[str, Callable[..., Any]] = {
        "aten::adaptive_avg_pool2d": _adaptive_avg_pool2d,
        "aten::rms_norm": _rms_norm,
    }
    for name, form in forms.items():
        register_custom_op_symbolic(name, form, _SINCE_OPSET)
    try:
        yield
    finally:
        for name in forms:
            unregister_custom_op_symbolic(name, _SINCE_OPSET)


def _adaptive_avg_pool2d(g: Any, images: Any, output_size: Any) -> Any:
    """Pooling by the operators for it where the sizes divide, else as the linear map that it is."""
    target = symbolic_helper._get_const(output_size, "is", "output_size")  # type: ignore[no-untyped-call]
    if list(target) == [1, 1]:
        return g.op("GlobalAveragePool", images)
    sizes = symbolic_helper._get_tensor_sizes(images)[2:]
    if None in sizes:
        raise TrappmError("adaptive pooling of an image whose size is not known")
    if all(size % wanted == 0 for size, wanted in zip(sizes, target, strict=True)):
        kernel = [size // wanted for size, wanted in zip(sizes, target, strict=True)]
        return g.op("AveragePool", images, kernel_shape_i=kernel, strides_i=kernel)
    rows, columns = (
        g.op("Constant", value_t=_pooling_matrix(size, wanted))
        for size, wanted in zip(sizes, target, strict=True)
    )
    transposed = g.op("Transpose", columns, perm_i=[1, 0])
    return g.op("MatMul", g.op("MatMul", rows, images), transposed)


def _pooling_matrix(size: int, wanted: int) -> torch.Tensor:
    """The matrix (wanted, size) whose rows average the windows of adaptive pooling."""
    matrix = torch.zeros(wanted, size)
    for i in range(wanted):
        start, end = i * size // wanted, -(-(i + 1) * size // wanted)
        matrix[i, start:end] = 1.0 / (end - start)
    return matrix


def _rms_norm(g: Any, x: Any, normalized_shape: Any, weight: Any, epsilon: Any) -> Any:
    """x / sqrt(mean(x^2) + epsilon) * weight, over the last axes."""
    axes = symbolic_helper._get_const(normalized_shape, "is", "normalized_shape")  # type: ignore[no-untyped-call]
    value = symbolic_helper._maybe_get_const(epsilon, "f")
    if not isinstance(value, float):  # torch takes the precision of the type by default
        value = torch.finfo(torch.float32).eps
    square = g.op("Mul", x, x)
    mean = g.op("ReduceMean", square, axes_i=list(range(-len(axes), 0)), keepdims_i=1)
    shifted = g.op("Add", mean, g.op("Constant", value_t=torch.tensor(value)))
    normal = g.op("Div", x, g.op("Sqrt", shifted))
    return normal if symbolic_helper._is_none(weight) else g.op("Mul", normal, weight)
