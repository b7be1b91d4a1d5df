"""Opens an ONNX file that anyone may have made, and hands over a small, checked model.

Nothing in the file is trusted: size, external data, validity and control flow are examined before
anything is computed from it. Large weights are replaced by graph inputs of their shape, so that a
file with weights, without them, or with its external data absent reads the same, and quickly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import external_data_helper, inliner

from profiler.errors import ModelFileError, UnsupportedModelError, one_line

BUFFERS_KEY = "trappm.buffers"
"""Metadata of files of ours: the weights that are buffers, which training does not touch (JSON)."""

MAX_BYTES = 2 << 30
"""A protobuf message cannot be larger."""
MAX_NODES = 20_000
"""Four times what the largest timm model has."""
MAX_RANK = 16
MAX_ELEMENTS = 1 << 48
"""Of one tensor; beyond it, a size is a mistake or an attack."""

_MAX_DEPTH = 64
"""Of functions that call functions."""

_SHAPE_LIKE = 64
"""Tensors of at most this many elements keep their values, which may be shapes or scales."""

_FLOATS = frozenset(
    {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.BFLOAT16,
        onnx.TensorProto.DOUBLE,
    }
)


@dataclass(frozen=True)
class CheckedModel:
    """A valid ONNX model without large tensors."""

    proto: onnx.ModelProto
    image: str
    """Name of the graph input that is the batch of images."""
    image_shape: tuple[int | None, ...]
    """Four sizes; None where the file leaves one open."""
    weights: frozenset[str]
    """Names of everything stored or to be supplied beside the image."""
    parameters: dict[str, int]
    """Number of elements of each weight that training changes."""


def load_checked(path: Path, max_bytes: int = MAX_BYTES) -> CheckedModel:
    """Reads and checks an ONNX file; external data is looked at only where it may hold a shape.

    Raises:
        ModelFileError: missing, unreadable, too large, not valid ONNX, external data that leaves
            the folder, or no image-like input.
        UnsupportedModelError: valid, but with control flow or sparse weights.
    """
    model = _parse(path, max_bytes)
    if model.functions:
        model = _inlined(path, model)
    graph = model.graph
    if not graph.node:
        raise ModelFileError(f"{path} has no nodes; is it an ONNX model?")
    if len(graph.node) > MAX_NODES:
        raise ModelFileError(f"{path} has {len(graph.node)} nodes; at most {MAX_NODES}")
    _refuse_unsupported(path, graph)
    for node in graph.node:
        if not node.output or (node.op_type == "Identity" and not node.input):
            raise ModelFileError(f"{path}: {node.op_type} {node.name!r} has no input or output")
    stored = {tensor.name for tensor in graph.initializer}
    image, image_shape = _image_input(path, graph, stored)
    sizes = dict(_weight_sizes(path, graph, image))
    # Running means and variances are updated, but not trained.
    normalizations = [node for node in graph.node if node.op_type == "BatchNormalization"]
    statistics = {name for node in normalizations for name in node.input[3:5]}
    excluded = statistics | _declared_buffers(model)
    _shrink(path, graph)
    try:
        onnx.checker.check_model(model)
    except Exception as error:
        raise ModelFileError(f"{path} is not a valid ONNX model: {one_line(error)}") from error
    return CheckedModel(
        proto=model,
        image=image,
        image_shape=image_shape,
        weights=frozenset(stored | {i.name for i in graph.input if i.name != image}),
        parameters={name: size for name, size in sizes.items() if name not in excluded},
    )


def attribute_value(attribute: onnx.AttributeProto) -> object:
    """A node's attribute as a Python value; text as str."""
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _parse(path: Path, max_bytes: int) -> onnx.ModelProto:
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise ModelFileError(f"{path} has {size:,} bytes; at most {max_bytes:,} are read")
        model: onnx.ModelProto = onnx.ModelProto.FromString(path.read_bytes())
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error
    except DecodeError as error:
        raise ModelFileError(
            f"{path} is not an ONNX file, or is cut short; export the model again"
        ) from error
    if not model.ir_version or not model.opset_import:
        raise ModelFileError(f"{path} is not an ONNX model: it has no version or no opset")
    return model


def _inlined(path: Path, model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without functions; how large it will be is found out before."""
    bodies = {(function.domain, function.name): function for function in model.functions}
    sizes: dict[tuple[str, str], int] = {}

    def size(nodes: Iterable[onnx.NodeProto], depth: int) -> int:
        if depth > _MAX_DEPTH:
            raise ModelFileError(
                f"{path}: its functions call themselves, or are more than {_MAX_DEPTH} deep"
            )
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type)
            if key in bodies and key not in sizes:
                sizes[key] = size(bodies[key].node, depth + 1)
            total += sizes.get(key, 1)
        return total

    for function in model.functions:
        _refuse_control_flow(path, function.node)
    _refuse_control_flow(path, model.graph.node)
    nodes = size(model.graph.node, 0)
    if nodes > MAX_NODES:
        raise ModelFileError(f"{path} has {nodes} nodes, functions expanded; at most {MAX_NODES}")
    try:
        return inliner.inline_local_functions(model)
    except Exception as error:
        raise ModelFileError(f"{path}: its functions are not valid: {one_line(error)}") from error


def _refuse_unsupported(path: Path, graph: onnx.GraphProto) -> None:
    if graph.sparse_initializer:
        raise UnsupportedModelError(f"{path} has sparse weights, which are not supported")
    _refuse_control_flow(path, graph.node)


def _refuse_control_flow(path: Path, nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        if any(a.type in (a.GRAPH, a.GRAPHS) for a in node.attribute):
            raise UnsupportedModelError(
                f"{path} has control flow ({node.op_type} {node.name!r}), whose cost depends on "
                "the data; export the model without it"
            )


def _image_input(
    path: Path, graph: onnx.GraphProto, stored: set[str]
) -> tuple[str, tuple[int | None, ...]]:
    """The first input of rank 4, preferring one whose batch axis is open: weights are closed."""
    candidates: list[tuple[str, tuple[int | None, ...]]] = []
    for value in graph.input:
        kind = value.type.tensor_type
        if value.name in stored or kind.elem_type not in (*_FLOATS, onnx.TensorProto.UINT8):
            continue
        shape = tuple(d.dim_value if d.dim_value > 0 else None for d in kind.shape.dim)
        if len(shape) == 4:
            candidates.append((value.name, shape))
    if not candidates:
        raise ModelFileError(
            f"{path} has no image-like input; one of four axes (batch, channels, height, width) "
            "is needed"
        )
    dynamic = [candidate for candidate in candidates if candidate[1][0] is None]
    if len(dynamic) > 1:
        names = ", ".join(name for name, _ in dynamic)
        raise UnsupportedModelError(f"{path} has several image inputs ({names}); one is supported")
    return (dynamic or candidates)[0]


def _weight_sizes(path: Path, graph: onnx.GraphProto, image: str) -> Iterator[tuple[str, int]]:
    """Elements of every floating-point weight; stored scalars are constants, not weights."""
    stored = set()
    for tensor in graph.initializer:
        stored.add(tensor.name)
        _check_size(path, tensor.name, tensor.dims)
        if tensor.data_type in _FLOATS and tensor.dims:
            yield tensor.name, math.prod(tensor.dims)
    for value in graph.input:
        if value.name in stored or value.name == image:
            continue
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        if not value.type.tensor_type.HasField("shape") or any(size < 1 for size in shape):
            raise UnsupportedModelError(
                f"{path}: input {value.name!r} beside the image {image!r} has no fixed shape; "
                "models of one image input are supported"
            )
        _check_size(path, value.name, shape)
        if value.type.tensor_type.elem_type in _FLOATS:
            yield value.name, math.prod(shape)


def _check_size(path: Path, name: str, shape: Sequence[int]) -> None:
    if len(shape) > MAX_RANK:
        raise ModelFileError(f"{path}: weight {name!r} has {len(shape)} axes; at most {MAX_RANK}")
    if any(size < 0 for size in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise ModelFileError(f"{path}: weight {name!r} has shape {list(shape)}")


def _declared_buffers(model: onnx.ModelProto) -> set[str]:
    """What our own exporter wrote down; from elsewhere it is only a list of names."""
    for entry in model.metadata_props:
        if entry.key == BUFFERS_KEY:
            try:
                names = json.loads(entry.value)
            except (ValueError, RecursionError):
                return set()
            return {n for n in names if isinstance(n, str)} if isinstance(names, list) else set()
    return set()


def _shrink(path: Path, graph: onnx.GraphProto) -> None:
    """Turns constant nodes into initializers, and large initializers into inputs."""
    nodes = []
    for node in graph.node:
        if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
            nodes.append(node)
            continue
        tensor = _constant(node)
        if tensor is None:
            raise UnsupportedModelError(f"{path}: constant {node.name!r} is not a number")
        graph.initializer.append(tensor)
    del graph.node[:]
    graph.node.extend(nodes)

    small, large = [], {}
    for tensor in graph.initializer:
        outside = external_data_helper.uses_external_data(tensor)
        if outside:
            _check_external(path, tensor)
        if math.prod(tensor.dims) > _SHAPE_LIKE or (outside and tensor.data_type in _FLOATS):
            large[tensor.name] = onnx.helper.make_tensor_value_info(
                tensor.name, tensor.data_type, list(tensor.dims)
            )
        else:
            if outside:
                _load_external(path, tensor)
            small.append(tensor)
    del graph.initializer[:]
    graph.initializer.extend(small)
    inputs = [value for value in graph.input if value.name not in large]
    del graph.input[:]
    graph.input.extend([*inputs, *large.values()])


def _constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    values = {a.name: a for a in node.attribute}
    output = node.output[0]
    tensor: onnx.TensorProto | None = None
    if "value" in values:
        tensor = onnx.TensorProto()
        tensor.CopyFrom(values["value"].t)
        tensor.name = output
    elif "value_float" in values:
        kind = onnx.TensorProto.FLOAT
        tensor = onnx.helper.make_tensor(output, kind, [], [values["value_float"].f])
    elif "value_int" in values:
        kind = onnx.TensorProto.INT64
        tensor = onnx.helper.make_tensor(output, kind, [], [values["value_int"].i])
    elif "value_floats" in values:
        floats = values["value_floats"].floats
        tensor = onnx.helper.make_tensor(output, onnx.TensorProto.FLOAT, [len(floats)], floats)
    elif "value_ints" in values:
        ints = values["value_ints"].ints
        tensor = onnx.helper.make_tensor(output, onnx.TensorProto.INT64, [len(ints)], ints)
    return tensor


def _check_external(path: Path, tensor: onnx.TensorProto) -> None:
    location = {entry.key: entry.value for entry in tensor.external_data}.get("location", "")
    relative = PurePosixPath(location)
    if (
        not location
        or "\\" in location
        or relative.is_absolute()
        or ".." in relative.parts
        or not (path.parent / location).resolve().is_relative_to(path.parent.resolve())
    ):
        raise ModelFileError(
            f"{path}: the data of {tensor.name!r} lie outside its folder ({location!r}); refused"
        )


def _load_external(path: Path, tensor: onnx.TensorProto) -> None:
    try:
        external_data_helper.load_external_data_for_tensor(tensor, str(path.parent))
    except Exception as error:
        raise ModelFileError(
            f"{path}: the external data of {tensor.name!r} cannot be read; keep the data file "
            f"beside the model ({one_line(error)})"
        ) from error
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.DEFAULT
