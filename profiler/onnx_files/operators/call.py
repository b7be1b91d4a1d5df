"""One call of an ONNX operator, as the functions that stand for operators see it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.onnx_files.folding import Array
from trappm.profiler.onnx_files.stored import MAX_ELEMENTS, MAX_RANK

Value = Tensor | Array | None
"""A tensor on the meta device, an array of known values, or None for an input left out."""

_TYPES: Mapping[int, torch.dtype] = {
    onnx.TensorProto.UINT8: torch.uint8,
    onnx.TensorProto.INT8: torch.int8,
    onnx.TensorProto.UINT16: torch.uint16,
    onnx.TensorProto.INT16: torch.int16,
    onnx.TensorProto.UINT32: torch.uint32,
    onnx.TensorProto.INT32: torch.int32,
    onnx.TensorProto.UINT64: torch.uint64,
    onnx.TensorProto.INT64: torch.int64,
    onnx.TensorProto.BOOL: torch.bool,
    onnx.TensorProto.COMPLEX64: torch.complex64,
    onnx.TensorProto.UINT4: torch.uint8,
    onnx.TensorProto.INT4: torch.int8,
    # The step is one in fp32, whatever the file's precision.
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.FLOAT16: torch.float32,
    onnx.TensorProto.BFLOAT16: torch.float32,
    onnx.TensorProto.DOUBLE: torch.float32,
}
_ONNX_TYPES = {dtype: kind for kind, dtype in reversed(list(_TYPES.items()))}


def torch_type(element_type: int) -> torch.dtype:
    """The type of a tensor whose ONNX element type is this; floats are all fp32.

    Raises:
        UnsupportedModelError: PyTorch has no such type, or none of a model's.
    """
    if element_type not in _TYPES:
        names = {number: name for name, number in onnx.TensorProto.DataType.items()}
        name = names.get(element_type, f"number {element_type}")
        raise UnsupportedModelError(f"tensors of type {name} are not supported")
    return _TYPES[element_type]


def onnx_type(dtype: torch.dtype) -> int:
    """The element type, of onnx.TensorProto, that stands for this one."""
    return int(_ONNX_TYPES[dtype])


def as_tensor(value: Value) -> Tensor:
    """The value as a tensor on the meta device."""
    if isinstance(value, Tensor):
        return value
    if value is None:
        raise UnsupportedModelError("a required input is left out")
    kind = torch_type(onnx.helper.np_dtype_to_tensor_dtype(value.dtype))
    return torch.empty(value.shape, dtype=kind, device="meta")


def check_shape(name: str, shape: Sequence[int]) -> None:
    """Raises UnsupportedModelError: the tensor of this name is beyond all bounds."""
    if len(shape) > MAX_RANK:
        raise UnsupportedModelError(f"tensor {name!r} would have {len(shape)} axes")
    if math.prod(shape) > MAX_ELEMENTS or min(shape, default=0) < 0:
        raise UnsupportedModelError(f"tensor {name!r} would have the shape {tuple(shape)}")


@dataclass(frozen=True)
class Call:
    """One operator with the values of its inputs."""

    operator: str
    inputs: Sequence[Value]
    attributes: Mapping[str, Any]
    outputs: int
    opset: int
    training: bool

    def value(self, place: int) -> Value:
        return self.inputs[place] if place < len(self.inputs) else None

    def has(self, place: int) -> bool:
        return self.value(place) is not None

    def tensor(self, place: int = 0) -> Tensor:
        return as_tensor(self.value(place))

    def optional(self, place: int) -> Tensor | None:
        return self.tensor(place) if self.has(place) else None

    def operand(self, place: int) -> Any:
        """A tensor, or a plain number for a constant that is one."""
        value = self.value(place)
        if isinstance(value, np.ndarray) and value.size == 1 and value.ndim <= 1:
            return value.item()
        return as_tensor(value)

    def known(self, place: int) -> Array | None:
        """The value of an input that must be known before the step runs; None if left out."""
        value = self.value(place)
        if isinstance(value, Tensor):
            raise UnsupportedModelError(f"its {self.operator} hangs on values that are not known")
        return value

    def ints(self, name: str, place: int | None = None) -> list[int] | None:
        """Integers that older opsets have as an attribute and newer ones as an input."""
        if name in self.attributes:
            return [int(i) for i in np.atleast_1d(self.attributes[name])]
        value = None if place is None else self.known(place)
        return None if value is None else [int(i) for i in value.reshape(-1)]

    def number(self, name: str, default: float) -> float:
        return float(self.attributes.get(name, default))

    def axis(self, default: int) -> int:
        return int(self.attributes.get("axis", default))


Function = Callable[[Call], Any]
