"""The tensors in an ONNX file: small ones with values, of large ones only type and shape.

A small tensor may be a shape or a scale; of weights a graph needs the size alone. So a file with
weights, without them, or without its external data reads the same.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import external_data_helper

from trappm.profiler.errors import ModelFileError, UnsupportedModelError, one_line


class Operation(NamedTuple):
    """One node of the file, or several that were fused to one operator."""

    operator: str
    """With its domain as prefix, except for ONNX's own."""
    inputs: tuple[str, ...]
    """Names; empty for a missing one."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    node: onnx.NodeProto | None = None
    """The node in the file; None if fused."""


MAX_RANK = 16
MAX_ELEMENTS = 1 << 48
"""Elements of one tensor; larger sizes are mistakes or attacks."""

FLOATS = frozenset(
    {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.BFLOAT16,
        onnx.TensorProto.DOUBLE,
    }
)

INTEGERS = frozenset(
    {
        onnx.TensorProto.UINT8,
        onnx.TensorProto.INT8,
        onnx.TensorProto.UINT4,
        onnx.TensorProto.INT4,
    }
)
"""Types of weights of quantized models."""

Kind = tuple[int, tuple[int, ...]]
"""Element type (of onnx.TensorProto) and shape of a tensor."""

_SHAPE_LIKE = 64
"""Largest number of elements of tensors that keep their values."""

_OF_SHAPES = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
"""Element types of shapes, which alone are read from outside of the file."""
_MAX_OUTSIDE = 1 << 24
"""Numbers of a shape are smaller; four letters of text, read as a number, are not."""
_ENDS = frozenset({(1 << 63) - 1, -(1 << 63), (1 << 31) - 1, -(1 << 31)})
"""Numbers that mean the end in a slice."""

_PLAIN: dict[int, npt.DTypeLike] = {
    onnx.TensorProto.BOOL: "?",
    onnx.TensorProto.FLOAT: "<f4",
    onnx.TensorProto.INT32: "<i4",
    onnx.TensorProto.INT64: "<i8",
}
"""Element types whose raw bytes NumPy reads directly."""


class Stored:
    """Tensors of a file by name.

    Args:
        path: The file, for messages and to find external data.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.constants: dict[str, onnx.TensorProto] = {}
        """Small tensors with their values."""
        self.weights: dict[str, Kind] = {}
        """All others."""

    def add(self, name: str, tensor: onnx.TensorProto) -> None:
        """Add a tensor; a large one is emptied to save memory.

        Raises:
            ModelFileError: It is too large, or its external data is outside of the folder or
                unreadable.
        """
        shape = tuple(tensor.dims)
        elements = check_size(self._path, name, shape)
        outside = tensor.data_location == onnx.TensorProto.EXTERNAL
        if outside:
            _check_external(self._path, name, tensor)
        if elements > _SHAPE_LIKE or (outside and tensor.data_type not in _OF_SHAPES):
            self.weights[name] = tensor.data_type, shape
            empty = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0])
            tensor.CopyFrom(empty)
            return
        if outside:
            _load_external(self._path, name, tensor)
        self.constants[name] = tensor


def check_size(path: Path, name: str, shape: Sequence[int]) -> int:
    """Return the number of elements of a stored tensor.

    Raises:
        ModelFileError: It is too large.
    """
    if len(shape) > MAX_RANK:  # before they are multiplied: there may be a million
        raise ModelFileError(f"{path}: weight {name!r} has {len(shape)} axes; at most {MAX_RANK}")
    elements = math.prod(shape)
    if elements > MAX_ELEMENTS or (shape and min(shape) < 0):
        raise ModelFileError(f"{path}: weight {name!r} has shape {list(shape)}")
    return elements


def constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return the tensor of a Constant node, or None for text and sparse tensors."""
    values = {attribute.name: attribute for attribute in node.attribute}
    if "value" in values:
        tensor: onnx.TensorProto = values["value"].t
        return tensor
    make = onnx.helper.make_tensor
    for name, kind in (("float", onnx.TensorProto.FLOAT), ("int", onnx.TensorProto.INT64)):
        if f"value_{name}" in values:
            return make("", kind, [], [getattr(values[f"value_{name}"], name[0])])
        if f"value_{name}s" in values:
            numbers = getattr(values[f"value_{name}s"], f"{name}s")
            return make("", kind, [len(numbers)], numbers)
    return None


def value_of(name: str, tensor: onnx.TensorProto) -> npt.NDArray[Any]:
    """Return the value of a small stored tensor.

    Raises:
        UnsupportedModelError: It cannot be read.
    """
    try:
        plain = _PLAIN.get(tensor.data_type)
        if plain is not None and tensor.HasField("raw_data"):
            return np.frombuffer(tensor.raw_data, plain).reshape(tuple(tensor.dims))
        return onnx.numpy_helper.to_array(tensor)
    except Exception as error:
        raise UnsupportedModelError(
            f"the stored tensor {name!r} cannot be read: {one_line(error)}"
        ) from error


def _check_external(path: Path, name: str, tensor: onnx.TensorProto) -> None:
    location = {entry.key: entry.value for entry in tensor.external_data}.get("location", "")
    relative = PurePosixPath(location)
    if (
        not location
        or "\\" in location
        or "\0" in location
        or relative.is_absolute()
        or ".." in relative.parts
        or not (path.parent / location).resolve().is_relative_to(path.parent.resolve())
    ):
        raise ModelFileError(
            f"{path}: the data of {name!r} lie outside its folder ({location!r}); refused"
        )


def _load_external(path: Path, name: str, tensor: onnx.TensorProto) -> None:
    try:
        location = {entry.key: entry.value for entry in tensor.external_data}["location"]
        if not stat.S_ISREG((path.parent / location).stat().st_mode):
            raise OSError(f"{location!r} is not a plain file")  # a pipe would be waited for
        # What is small is read as such, however large the file of the others may be.
        item = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        others = [entry for entry in tensor.external_data if entry.key != "length"]
        del tensor.external_data[:]
        tensor.external_data.extend(others)
        tensor.external_data.add(key="length", value=str(math.prod(tensor.dims) * item))
        external_data_helper.load_external_data_for_tensor(tensor, str(path.parent))
        numbers = onnx.numpy_helper.to_array(tensor).ravel().tolist()
        if not all(abs(n) < _MAX_OUTSIDE or n in _ENDS for n in numbers):
            raise ValueError(f"{location!r} holds no shape")  # callers catch it
    except Exception as error:
        raise ModelFileError(
            f"{path}: the external data of {name!r} cannot be read; keep the data file "
            f"next to the model ({one_line(error)})"
        ) from error
