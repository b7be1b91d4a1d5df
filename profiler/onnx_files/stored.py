"""The tensors stored in an ONNX file: small ones are kept, of large ones only type and shape.

A small tensor may be a shape or a scale; a large one is a weight, of which a graph needs its size
alone. So a file with weights, without them, or with its external data absent reads the same.
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
    """One node of the file, or several that were put together to one operator."""

    operator: str
    """With its domain in front, if that is not ONNX's own: it is another operator then."""
    inputs: tuple[str, ...]
    """Names; empty for one left out."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    node: onnx.NodeProto | None = None
    """As the file has it; None for what was put together."""


MAX_RANK = 16
MAX_ELEMENTS = 1 << 48
"""Of one tensor; beyond it, a size is a mistake or an attack."""

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
"""Of the weights of quantised models."""

Kind = tuple[int, tuple[int, ...]]
"""Element type (of onnx.TensorProto) and shape of a tensor."""

_SHAPE_LIKE = 64
"""Tensors of at most this many elements keep their values, which may be shapes or scales."""

_OF_SHAPES = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
"""Element types of shapes; of tensors outside the file only these are read."""
_MAX_OUTSIDE = 1 << 24
"""Numbers of a shape are smaller; four letters of text, read as a number, are not."""
_ENDS = frozenset({(1 << 63) - 1, -(1 << 63), (1 << 31) - 1, -(1 << 31)})
"""What a slice to the very end is written as."""

_PLAIN: dict[int, npt.DTypeLike] = {
    onnx.TensorProto.BOOL: "?",
    onnx.TensorProto.FLOAT: "<f4",
    onnx.TensorProto.INT32: "<i4",
    onnx.TensorProto.INT64: "<i8",
}
"""Element types whose raw bytes NumPy reads as they are."""


class Stored:
    """What a file stores, by the name of the tensor.

    Args:
        path: the file, for messages and to find external data.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.constants: dict[str, onnx.TensorProto] = {}
        """Small tensors, with their values."""
        self.weights: dict[str, Kind] = {}
        """All others."""

    def add(self, name: str, tensor: onnx.TensorProto) -> None:
        """Takes a tensor; a large one is emptied, so that no later step carries it along.

        Raises:
            ModelFileError: a size beyond all bounds, or external data that leave the folder or
                cannot be read though their values matter.
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
    """The number of elements of a stored tensor.

    Raises:
        ModelFileError: it is beyond all bounds.
    """
    if len(shape) > MAX_RANK:  # before they are multiplied: there may be a million
        raise ModelFileError(f"{path}: weight {name!r} has {len(shape)} axes; at most {MAX_RANK}")
    elements = math.prod(shape)
    if elements > MAX_ELEMENTS or (shape and min(shape) < 0):
        raise ModelFileError(f"{path}: weight {name!r} has shape {list(shape)}")
    return elements


def constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The tensor of a Constant node, or None if it holds text or a sparse tensor."""
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
    """The value of a small stored tensor.

    Raises:
        UnsupportedModelError: it cannot be read.
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
            raise OSError(f"{location!r} is no plain file")  # a pipe would be waited for
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
            f"beside the model ({one_line(error)})"
        ) from error
