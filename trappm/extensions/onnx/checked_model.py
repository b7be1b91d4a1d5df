"""Opens an untrusted ONNX file and returns a small, checked model.

Size, external data, validity and control flow are checked before anything is computed. Small
tensors are kept with their values, of large ones only type and shape: a small tensor may be a shape
or a scale, and of weights a graph needs the size alone.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import external_data_helper, inliner

from trappm.profiler.errors import (
    InputError,
    ModelFileError,
    TrappmError,
    UnsupportedModelError,
    one_line,
)
from trappm.profiler.files import read_plain


class Operation(NamedTuple):
    """One node of the file, or several that were fused to one operator."""

    operator: str
    """Operator, prefixed by its domain unless it is one of ONNX's own."""
    inputs: tuple[str, ...]
    """Names; empty for a missing one."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    node: onnx.NodeProto | None = None
    """The node in the file; None if fused."""


MAX_RANK = 16
MAX_ELEMENTS = 1 << 48
"""Elements of one tensor; larger sizes are mistakes or attacks."""

_KINDS = onnx.TensorProto
FLOATS = frozenset({_KINDS.FLOAT, _KINDS.FLOAT16, _KINDS.BFLOAT16, _KINDS.DOUBLE})
INTEGERS = frozenset({_KINDS.UINT8, _KINDS.INT8, _KINDS.UINT4, _KINDS.INT4})
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


class StoredTensors:
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


def _load_external(path: Path, name: str, tensor: onnx.TensorProto) -> None:
    """Read a small tensor that lies in another file; onnx refuses files outside of the folder."""
    try:
        location = {entry.key: entry.value for entry in tensor.external_data}["location"]
        if not stat.S_ISREG((path.parent / location).lstat().st_mode):
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
            raise ValueError(f"{location!r} holds no shape")  # messages would show its content
    except Exception as error:
        raise ModelFileError(
            f"{path}: the external data of {name!r} cannot be read; keep the data file "
            f"next to the model ({one_line(error)})"
        ) from error


class FileInput(NamedTuple):
    """One input of a file."""

    name: str
    kind: int
    """Element type (of onnx.TensorProto)."""
    sizes: tuple[int | str, ...]
    """Sizes of its axes; a name for an open one, which is empty if the file has none."""

    @property
    def is_image(self) -> bool:
        return len(self.sizes) == 4 and self.kind in (*FLOATS, onnx.TensorProto.UINT8)

    @property
    def shape_text(self) -> str:
        return f"({', '.join(str(size) or '?' for size in self.sizes)})"


def _input(path: Path, value: onnx.ValueInfoProto) -> FileInput:
    """Return an input of a file.

    Raises:
        ModelFileError: Its number of axes is missing, or its size is beyond all limits.
        UnsupportedModelError: It is not a tensor.
    """
    if value.type.WhichOneof("value") != "tensor_type":
        raise UnsupportedModelError(f"{path}: input {value.name!r} is not a tensor")
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        raise ModelFileError(
            f"{path}: input {value.name!r} has no shape; export the model with the shapes of its "
            "inputs"
        )
    sizes = tuple(
        axis.dim_value if axis.dim_value > 0 else axis.dim_param for axis in tensor.shape.dim
    )
    check_size(path, value.name, [size for size in sizes if isinstance(size, int)])
    return FileInput(value.name, tensor.elem_type, sizes)


def _inputs(path: Path, graph: onnx.GraphProto, stored: StoredTensors) -> list[FileInput]:
    """Return the inputs of a file that it stores no values of; raises as `_input`."""
    known = {*stored.weights, *stored.constants}
    inputs = [_input(path, value) for value in graph.input if value.name not in known]
    if not inputs:
        raise ModelFileError(f"{path} has no input but its weights")
    if cache := next((x.name for x in inputs if x.name.startswith("past_key")), None):
        raise UnsupportedModelError(
            f"{path} takes the cache of earlier tokens ({cache}); export the model without a cache"
        )
    return inputs


def _batch_name(inputs: Sequence[FileInput]) -> str | None:
    """Return the name of the open batch axis, or None if all first axes are fixed."""
    names = [size for entry in inputs for size in entry.sizes if isinstance(size, str)]
    named = [name for name in names if "batch" in name.lower() or name.lower() in ("n", "b", "bs")]
    first = [entry.sizes[0] for entry in inputs if entry.sizes and isinstance(entry.sizes[0], str)]
    return next(iter((*named, *first)), None)


def input_shapes(
    path: Path, model: CheckedModel, size: int | None, *, is_tokens: bool = False
) -> tuple[list[tuple[int | None, ...]], int | None]:
    """Return the shape of each input, None for the batch; and the batch size if it is fixed.

    Args:
        path: The file, for messages.
        model: The file's content.
        size: What open axes have that are not the batch.
        is_tokens: True if `size` is a number of tokens; else it may be one of pixels, too.

    Raises:
        ModelFileError: A size is open in the file and in `size`.
        InputError: `size` contradicts the file.
        UnsupportedModelError: The file leaves open both an image's size and another one.
    """
    batch = _batch_name(model.inputs)
    axes = [_batch_axis(entry, batch, model.operations) for entry in model.inputs]
    opened = [
        entry
        for entry, axis in zip(model.inputs, axes, strict=True)
        if any(isinstance(x, str) and place != axis for place, x in enumerate(entry.sizes))
    ]
    if len({entry.is_image for entry in opened}) > 1:
        raise UnsupportedModelError(
            f"{path} leaves open the sizes of {' and '.join(e.name for e in opened)}; export it "
            "with a fixed size of its images"
        )
    if any(e.is_image and not any(isinstance(x, int) for x in e.sizes) for e in opened):
        raise ModelFileError(
            f"{path} leaves all sizes of {opened[0].name!r} open, its channels as well; export it "
            "with fixed channels"
        )
    if opened and size is None:
        what = "an input size" if opened[0].is_image else "a sequence length (or input size)"
        raise ModelFileError(
            f"{path} leaves sizes of {opened[0].name!r} open {opened[0].shape_text}; give {what}"
        )
    shapes = [
        tuple(
            None if place == axis and isinstance(x, str) else size if isinstance(x, str) else x
            for place, x in enumerate(entry.sizes)
        )
        for entry, axis in zip(model.inputs, axes, strict=True)
    ]
    sizes = {
        x
        for entry, shape in zip(model.inputs, shapes, strict=True)
        if not (is_tokens and entry.is_image)
        for x in shape
    }
    if size is not None and size not in sizes:
        taken = ", ".join(f"{entry.name} {entry.shape_text}" for entry in model.inputs)
        raise InputError(f"{path} takes {taken}, not {size} {'tokens' if is_tokens else 'px'}")
    if batch is not None:
        return shapes, None
    batch_sizes = [e.sizes[a or 0] for e, a in zip(model.inputs, axes, strict=True) if e.sizes]
    if not batch_sizes:
        raise ModelFileError(f"no input of {path} has a batch axis")
    return shapes, int(batch_sizes[0])


def _batch_axis(entry: FileInput, batch: str | None, operations: Iterable[Operation]) -> int | None:
    """Return the axis of the batch: the one of its name, or the first; None if it has none."""
    if batch and batch in entry.sizes:
        return entry.sizes.index(batch)
    recurrent = any(
        o.operator in ("LSTM", "GRU", "RNN") and o.inputs[:1] == (entry.name,)
        for o in operations
        if not o.attributes.get("layout")
    )
    axis = 1 if recurrent and len(entry.sizes) == 3 else 0
    is_open = bool(entry.sizes) and isinstance(entry.sizes[axis], str)
    return axis if is_open or batch is None else None


_SETTINGS = {"Clip": (1, 2), "Dropout": (1,), "OneHot": (2,), "Pad": (2,), "Resize": (1, 2)}
"""Indices of a node's inputs that are settings."""


def find_untrained(operations: Iterable[Operation]) -> set[str]:
    """Return the stored weights that are running statistics or only settings."""
    statistics: set[str] = set()
    settings: set[str] = set()
    others: set[str] = set()
    for operation in operations:
        if operation.operator == "BatchNormalization":
            statistics.update(operation.inputs[3:5])
        places = _SETTINGS.get(operation.operator, ())
        for place, name in enumerate(operation.inputs):
            (settings if place in places else others).add(name)
    return statistics | (settings - others)


BUFFERS_KEY = "trappm.buffers"
"""Metadata of a file without weights, whose inputs but the first are weights: JSON of buffers."""

MAX_BYTES = 2 << 30
"""Largest protobuf message."""
MAX_NODES = 20_000
"""Twice the number of the largest timm model."""

_STANDARD = ("", "ai.onnx")


@dataclass(frozen=True)
class CheckedModel:
    """A valid ONNX model without large tensors."""

    operations: list[Operation]
    """Operations in topological order, without constants."""
    inputs: Sequence[FileInput]
    """Inputs that are not weights."""
    outputs: list[str]
    constants: Mapping[str, onnx.TensorProto]
    """Small tensors in the file."""
    weights: Mapping[str, Kind]
    """Type and shape of all other tensors, and of missing weights."""
    parameters: Mapping[str, int]
    """Number of elements of each trained weight."""
    quantized: Mapping[str, int]
    """Number of elements of each weight of small integers, which are not trained."""
    source: onnx.ModelProto
    """The file, with its large tensors emptied."""
    restored_norms: int = 0
    """Number of batch norms that an exporter had folded into convolutions."""


def load_checked(path: Path) -> CheckedModel:
    """Read and check an ONNX file; external data is read only for possible shapes.

    Time and memory are not limited here: a file of unknown origin belongs into a confined process
    (`trappm.prediction.models`).

    Raises:
        ModelFileError: It is missing, unreadable, too large, or not valid ONNX, has external data
            outside of its folder, or no input with a shape.
        UnsupportedModelError: It has control flow, sparse weights, or an input that is no tensor.
    """
    model = _parse(path)
    try:
        return _check_model(path, model)
    except TrappmError:
        raise
    except Exception as error:  # such as a name that is not UTF-8, which protobuf returns as bytes
        raise ModelFileError(f"{path} is not a valid ONNX model: {one_line(error)}") from error


def _check_model(path: Path, model: onnx.ModelProto) -> CheckedModel:
    del model.training_info[:]
    for function in model.functions:
        _check_attributes(path, function.name, function.attribute_proto)
        _check_nodes(path, function.node)
    _check_nodes(path, model.graph.node)
    if model.functions:
        model = inliner.inline_local_functions(model)
    graph = model.graph
    if not graph.node:
        raise ModelFileError(f"{path} has no nodes; is it an ONNX model?")
    if len(graph.node) > MAX_NODES:
        raise ModelFileError(f"{path} has {len(graph.node)} nodes; at most {MAX_NODES}")
    if graph.sparse_initializer:
        raise UnsupportedModelError(f"{path} has sparse weights, which are not supported")
    stored = StoredTensors(path)
    parameters = _elements(path, graph, FLOATS)
    quantized = _elements(path, graph, INTEGERS)
    for tensor in graph.initializer:
        stored.add(tensor.name, tensor)
    inputs = _inputs(path, graph, stored)
    buffers = _listed_buffers(model)
    if buffers is not None:
        inputs, weights = inputs[:1], inputs[1:]
        for name, kind, sizes in weights:
            shape = tuple(size if isinstance(size, int) else 0 for size in sizes)
            stored.weights[name] = kind, shape
            if kind in FLOATS:
                parameters[name] = math.prod(shape)
    operations = list(_operations(path, graph, stored))
    for name in _declared_buffers(model) | (buffers or set()) | find_untrained(operations):
        parameters.pop(name, None)
    del graph.value_info[:]
    for output in graph.output:  # a shape may be missing, and is not used
        if output.type.HasField("tensor_type"):
            output.type.tensor_type.shape.SetInParent()
    onnx.checker.check_model(model)
    return CheckedModel(
        operations=operations,
        inputs=inputs,
        outputs=[output.name for output in graph.output],
        constants=stored.constants,
        weights=stored.weights,
        parameters=parameters,
        quantized=quantized,
        source=model,
    )


def _elements(path: Path, graph: onnx.GraphProto, kinds: Collection[int]) -> dict[str, int]:
    """Return the elements of stored weights of these types; scalars are constants."""
    return {
        tensor.name: check_size(path, tensor.name, tensor.dims)
        for tensor in graph.initializer
        if tensor.data_type in kinds and tensor.dims
    }


def _attribute_value(attribute: onnx.AttributeProto) -> Any:
    """Return a node's attribute as a Python value.

    Raises:
        ValueError: It has an unknown type.
    """
    kind = attribute.type
    if kind == onnx.AttributeProto.INT:
        return attribute.i
    if kind == onnx.AttributeProto.INTS:
        return list(attribute.ints)
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _parse(path: Path) -> onnx.ModelProto:
    try:
        model: onnx.ModelProto = onnx.ModelProto.FromString(read_plain(path, MAX_BYTES))
    except InputError as error:
        raise ModelFileError(str(error)) from error
    except DecodeError as error:
        raise ModelFileError(
            f"{path} is not an ONNX file, or is cut short; export the model again"
        ) from error
    if not model.ir_version or not model.opset_import:
        raise ModelFileError(f"{path} is not an ONNX model: it has no version or no opset")
    return model


def _check_nodes(path: Path, nodes: Iterable[onnx.NodeProto]) -> None:
    """Refuse control flow, and external tensors except those of constants."""
    for node in nodes:
        if node.op_type == "Constant" and node.domain in _STANDARD and len(node.attribute) == 1:
            _check_attributes(path, "Constant", node.attribute, may_lie_outside="value")
        else:
            _check_attributes(path, f"{node.op_type} {node.name!r}", node.attribute)


def _check_attributes(
    path: Path,
    where: str,
    attributes: Iterable[onnx.AttributeProto],
    may_lie_outside: str | None = None,
) -> None:
    """Refuse graphs and external tensors; the type of an attribute is not trusted."""
    for attribute in attributes:
        if attribute.HasField("g") or attribute.graphs:
            raise UnsupportedModelError(
                f"{path} has control flow ({where}), whose cost depends on the data; export the "
                "model without it"
            )
        tensors = list(attribute.tensors)
        if attribute.HasField("t") and attribute.name != may_lie_outside:
            tensors.append(attribute.t)
        if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                tensors += [sparse.values, sparse.indices]
        if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in tensors):
            raise ModelFileError(
                f"{path}: a tensor in an attribute of {where} is external data, which only weights "
                "and constants may be"
            )


def _operations(path: Path, graph: onnx.GraphProto, stored: StoredTensors) -> Iterator[Operation]:
    """Yield all nodes except constants, which are stored."""
    for node in graph.node:
        operator, domain, outputs = node.op_type, node.domain, tuple(node.output)
        if domain == "ai.onnx":
            domain = ""
        if operator == "Constant" and not domain and outputs:
            if len(node.attribute) != 1:
                raise ModelFileError(
                    f"{path}: constant {node.name!r} has {len(node.attribute)} values"
                )
            tensor = constant(node)
            if tensor is None:
                raise UnsupportedModelError(f"{path}: constant {node.name!r} is not a number")
            stored.add(outputs[0], tensor)
            continue
        inputs = tuple(node.input)
        if not outputs or (operator == "Identity" and not inputs):
            raise ModelFileError(f"{path}: {operator} {node.name!r} has no input or output")
        try:
            attributes = {a.name: _attribute_value(a) for a in node.attribute}
        except ValueError as error:
            raise ModelFileError(
                f"{path}: an attribute of {operator} {node.name!r} cannot be read: "
                f"{one_line(error)}"
            ) from error
        full_name = f"{domain}.{operator}" if domain else operator
        yield Operation(full_name, inputs, outputs, attributes, node)


def _declared_buffers(model: onnx.ModelProto) -> set[str]:
    """Return the buffers that PyTorch's exporter declared."""
    return {
        value.name
        for value in (*model.graph.input, *model.graph.value_info)
        for entry in value.metadata_props
        if entry.key == _TORCH_KIND_KEY and entry.value == "BUFFER"
    }


_TORCH_KIND_KEY = "pkg.torch.export.graph_signature.InputSpec.kind"


def _listed_buffers(model: onnx.ModelProto) -> set[str] | None:
    """Return the buffers in the metadata of a file whose inputs but one are weights, or None."""
    for entry in model.metadata_props:
        if entry.key == BUFFERS_KEY:
            return set(json.loads(entry.value))
    return None
