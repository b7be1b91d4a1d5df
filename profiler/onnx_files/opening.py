"""Opens an untrusted ONNX file and returns a small, checked model.

Size, external data, validity and control flow are checked before anything is computed. `stored`
reads the tensors in the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import inliner

from trappm.profiler.errors import InputError, ModelFileError, UnsupportedModelError, one_line
from trappm.profiler.files.plain_files import read_plain
from trappm.profiler.onnx_files.stored import (
    FLOATS,
    INTEGERS,
    Kind,
    Operation,
    Stored,
    check_size,
    constant,
)

# Nothing in ONNX says so. A weight is recognised by its use: it is the kernel of a convolution, the
# scale of a normalisation, the matrix that the features are multiplied by. Any other input is
# something that a model is given when it runs, and a model of several inputs is refused: its cost
# would be wrong.

_WEIGHT_SLOTS: Mapping[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2, 3, 4),
    "CausalConvWithState": (1, 2),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "DeformConv": (1, 3),
    "GRU": (1, 2, 3),
    "Gemm": (2,),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LSTM": (1, 2, 3),
    "LayerNormalization": (1, 2),
    "PRelu": (1,),
    "RMSNormalization": (1,),
    "RNN": (1, 2, 3),
    "RotaryEmbedding": (1, 2),
}
"""Indices of a node's inputs that only weights take."""

_PRODUCTS = frozenset(["Einsum", "Gemm", "MatMul"])
"""Products; a factor that does not depend on the image is a weight."""


def image_input(path: Path, graph: onnx.GraphProto, stored: Stored) -> onnx.ValueInfoProto:
    """Return the first input of rank 4, if possible with an open batch axis.

    Raises:
        ModelFileError: There is none.
        UnsupportedModelError: There are several with an open batch axis.
    """
    candidates: list[onnx.ValueInfoProto] = [
        value
        for value in graph.input
        if value.type.tensor_type.elem_type in (*FLOATS, onnx.TensorProto.UINT8)
        and len(value.type.tensor_type.shape.dim) == 4
        and value.name not in stored.weights
        and value.name not in stored.constants
    ]
    if not candidates:
        raise ModelFileError(
            f"{path} has no image-like input; one of four axes (batch, channels, height, width) "
            "is needed"
        )
    dynamic = [candidate for candidate in candidates if image_shape(candidate)[0] is None]
    if len(dynamic) > 1:
        names = ", ".join(value.name for value in dynamic)
        raise UnsupportedModelError(f"{path} has several image inputs ({names}); one is supported")
    return (dynamic or candidates)[0]


def image_shape(value: onnx.ValueInfoProto) -> tuple[int | None, ...]:
    """Return the sizes of an input; None for open ones."""
    axes = value.type.tensor_type.shape.dim
    return tuple(axis.dim_value if axis.dim_value > 0 else None for axis in axes)


def supplied_weights(
    path: Path, values: Sequence[onnx.ValueInfoProto], image: str
) -> dict[str, Kind]:
    """Return type and shape of the inputs, except the image, without stored values.

    Raises:
        UnsupportedModelError: One has no fixed shape, so it is not a weight.
        ModelFileError: One is too large.
    """
    supplied = {}
    for value in values:
        kind = value.type.tensor_type
        shape = tuple(axis.dim_value for axis in kind.shape.dim)
        if not kind.HasField("shape") or min(shape, default=1) < 1:
            raise UnsupportedModelError(
                f"{path}: input {value.name!r} besides the image {image!r} has no fixed shape; "
                "models of one image input are supported"
            )
        check_size(path, value.name, shape)
        supplied[value.name] = kind.elem_type, shape
    return supplied


def refuse_what_is_no_weight(
    path: Path,
    operations: Sequence[Operation],
    image: onnx.ValueInfoProto,
    supplied: Mapping[str, Kind],
    stored: Collection[str],
) -> None:
    """Check that the inputs without stored values are used as weights.

    A file without its weights may add or scale by some of them (position tables, layer scale). So
    an input outside of weight slots is a weight if inputs fill all slots.

    Args:
        path: The file.
        operations: Its operations.
        image: Input of the images.
        supplied: Inputs without stored values, except the image.
        stored: Names of stored weights.

    Raises:
        UnsupportedModelError: An input is not a weight.
    """
    in_slots = _in_weight_slots(operations, image.name)
    left_out = not supplied.keys().isdisjoint(in_slots) and in_slots.isdisjoint(stored)
    used = {name for operation in operations for name in operation.inputs}
    images = image_shape(image)
    for name, (_, shape) in supplied.items():
        second = len(shape) == 4 and (shape[0], *shape[2:]) == (images[0], *images[2:])
        if name in used and (second or not (left_out or name in in_slots)):
            raise UnsupportedModelError(
                f"{path}: input {name!r} of shape {list(shape)} besides the image {image.name!r} "
                "is not a weight; models of one image input are supported"
            )


def _in_weight_slots(operations: Iterable[Operation], image: str) -> set[str]:
    """Return the names of tensors in weight slots, and of all they are computed from."""
    depends = {image}  # on the pixels
    folded: dict[str, Operation] = {}  # by output
    names: list[str] = []
    for operation in operations:
        inputs, operator = operation.inputs, operation.operator
        if operator not in ("Shape", "Size") and not depends.isdisjoint(inputs):
            depends.update(filter(None, operation.outputs))
            if operator in _PRODUCTS:
                names.extend(inputs)
        else:
            folded.update((name, operation) for name in operation.outputs if name)
        names.extend(inputs[slot] for slot in _WEIGHT_SLOTS.get(operator, ()) if slot < len(inputs))
    weights: set[str] = set()
    while names:
        name = names.pop()
        if name and name not in depends and name not in weights:
            weights.add(name)
            if name in folded:
                names.extend(folded[name].inputs)
    return weights


_SETTINGS = {"Clip": (1, 2), "Dropout": (1,), "OneHot": (2,), "Pad": (2,), "Resize": (1, 2)}
"""Indices of a node's inputs that are settings."""


def not_trained(operations: Iterable[Operation]) -> set[str]:
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
"""Metadata of our own files: weights that are buffers, as JSON."""

MAX_BYTES = 2 << 30
"""Largest protobuf message."""
MAX_NODES = 20_000
"""Twice the number of the largest timm model."""

MAX_CONNECTIONS = 200_000
"""Inputs and outputs of all nodes; ten times the number of the largest timm model."""

_STANDARD = ("", "ai.onnx")
_MAX_DEPTH = 64
"""Depth of functions that call functions."""
_MAX_NAME = 1000
"""Length of a tensor's name in a file with functions, which copy it."""
_MAX_EXPANDED_BYTES = 64 << 20
"""Bytes that function calls may add to a file."""


@dataclass(frozen=True)
class CheckedModel:
    """A valid ONNX model without large tensors."""

    operations: list[Operation]
    """In topological order, without constants."""
    image: str
    """Name of the input of images."""
    image_kind: int
    """Its element type (of onnx.TensorProto)."""
    image_shape: tuple[int | None, ...]
    """Four sizes; None for open ones."""
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

    Raises:
        ModelFileError: It is missing, unreadable, too large, or not valid ONNX, has external data
            outside of its folder, or no image-like input.
        UnsupportedModelError: It has control flow or sparse weights.
    """
    model = _parse(path)
    for name in _names(model):
        if not isinstance(name, str):  # protobuf hands out bytes instead
            raise ModelFileError(f"{path} is not a valid ONNX model: {name!r:.60} is not UTF-8")
    del model.training_info[:]
    if model.functions:
        model = _inlined(path, model)
    graph = model.graph
    if not graph.node:
        raise ModelFileError(f"{path} has no nodes; is it an ONNX model?")
    _check_counts(path, len(graph.node), sum(map(_connections, graph.node)))
    _check_nodes(path, graph.node)
    if graph.sparse_initializer:
        raise UnsupportedModelError(f"{path} has sparse weights, which are not supported")
    stored = Stored(path)
    parameters = _elements(path, graph, FLOATS)
    quantized = _elements(path, graph, INTEGERS)
    for tensor in graph.initializer:
        stored.add(tensor.name, tensor)
    image = image_input(path, graph, stored)
    known = {image.name, *stored.weights, *stored.constants}
    others = [value for value in graph.input if value.name not in known]
    supplied = supplied_weights(path, others, image.name)
    stored.weights.update(supplied)
    operations = list(_operations(path, graph, stored))
    if supplied and not _is_ours(model):
        refuse_what_is_no_weight(path, operations, image, supplied, parameters.keys())
    for name, (kind, shape) in supplied.items():
        if kind in FLOATS:
            parameters[name] = math.prod(shape)
    for name in _declared_buffers(model) | not_trained(operations):
        parameters.pop(name, None)
    del graph.value_info[:]
    try:
        onnx.checker.check_model(model)
    except Exception as error:
        raise ModelFileError(f"{path} is not a valid ONNX model: {one_line(error)}") from error
    return CheckedModel(
        operations=operations,
        image=image.name,
        image_kind=image.type.tensor_type.elem_type,
        image_shape=image_shape(image),
        outputs=[output.name for output in graph.output],
        constants=stored.constants,
        weights=stored.weights,
        parameters=parameters,
        quantized=quantized,
        source=model,
    )


def image_sizes(path: Path, model: CheckedModel, input_size: int | None) -> tuple[int, ...]:
    """Return channels, height and width, or the file's other order of them.

    Raises:
        ModelFileError: A size is open in the file and in `input_size`.
        InputError: `input_size` contradicts the file.
    """
    sizes = []
    for size in model.image_shape[1:]:
        chosen = input_size if size is None else size
        if chosen is None:
            raise ModelFileError(
                f"{path} leaves its image size open {model.image_shape}; give an input size"
            )
        sizes.append(chosen)
    if input_size is not None and input_size not in sizes:
        raise InputError(f"{path} takes images of {model.image_shape[1:]}, not {input_size} px")
    return tuple(sizes)


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


def _names(model: onnx.ModelProto) -> Iterator[str | bytes]:
    """Yield all names in a file that are used as keys."""
    graph = model.graph
    for thing in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        yield thing.name
    for function in model.functions:
        yield from (function.name, function.domain, function.overload)
        yield from (*function.input, *function.output, *function.attribute)
    for nodes in (graph.node, *(function.node for function in model.functions)):
        for node in nodes:
            yield from (node.name, node.op_type, node.domain, node.overload)
            yield from (*node.input, *node.output)
            yield from (attribute.name for attribute in node.attribute)


def _inlined(path: Path, model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without functions; its size is computed before they are expanded."""
    bodies = {_key(f.domain, f.name, f.overload): f for f in model.functions}
    sizes: dict[tuple[str, str, str], tuple[int, int, int]] = {}
    everywhere = [model.graph.node, *(function.node for function in model.functions)]
    for function in model.functions:
        _check_attributes(path, function.name, function.attribute_proto)
    for nodes in everywhere:
        _check_nodes(path, nodes)
    heaviest, longest = _handed_on(model, bodies.keys())
    if longest > _MAX_NAME:
        raise ModelFileError(f"{path}: a tensor's name has more than {_MAX_NAME:,} letters")

    def size(nodes: Iterable[onnx.NodeProto], depth: int) -> tuple[int, int, int]:
        """Nodes, their inputs and outputs, and at most so many bytes of it all."""
        if depth > _MAX_DEPTH:
            raise ModelFileError(
                f"{path}: its functions call themselves, or are more than {_MAX_DEPTH} deep"
            )
        count = connections = n_bytes = 0
        for node in nodes:
            key = _key(node.domain, node.op_type, node.overload)
            if key in bodies and key not in sizes:
                sizes[key] = size(bodies[key].node, depth + 1)
            inside = sizes.get(key, (1, 0, 0))
            count += inside[0]
            connections += inside[1] + _connections(node)
            n_bytes += inside[2] + node.ByteSize()
            if depth:
                taken = sum(bool(attribute.ref_attr_name) for attribute in node.attribute)
                n_bytes += taken * heaviest + _connections(node) * longest
        return count, connections, n_bytes

    count, connections, n_bytes = size(model.graph.node, 0)
    _check_counts(path, count, connections, " (functions expanded)")
    if n_bytes > model.ByteSize() + _MAX_EXPANDED_BYTES:
        raise ModelFileError(f"{path}: its functions expand to {n_bytes >> 20:,} MiB")
    try:
        return inliner.inline_local_functions(model)
    except Exception as error:
        raise ModelFileError(f"{path}: its functions are not valid: {one_line(error)}") from error


def _handed_on(
    model: onnx.ModelProto, functions: Collection[tuple[str, str, str]]
) -> tuple[int, int]:
    """Return bytes of the largest attribute and length of the longest name that calls pass on."""
    heaviest, longest = 0, 0
    for function in model.functions:
        heaviest = max([heaviest, *(a.ByteSize() for a in function.attribute_proto)])
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in nodes:
            longest = max([longest, *map(len, node.input), *map(len, node.output)])
            if _key(node.domain, node.op_type, node.overload) in functions:
                heaviest = max([heaviest, *(a.ByteSize() for a in node.attribute)])
    return heaviest, longest


def _key(domain: str, name: str, overload: str) -> tuple[str, str, str]:
    """Return the key of a function call; ONNX's own domain has two names."""
    return "" if domain == "ai.onnx" else domain, name, overload


def _connections(node: onnx.NodeProto) -> int:
    return len(node.input) + len(node.output)


def _check_counts(path: Path, nodes: int, connections: int, how: str = "") -> None:
    if nodes > MAX_NODES:
        raise ModelFileError(f"{path} has {nodes} nodes{how}; at most {MAX_NODES}")
    if connections > MAX_CONNECTIONS:
        raise ModelFileError(
            f"{path}: its nodes have {connections} inputs and outputs{how}; at most "
            f"{MAX_CONNECTIONS}"
        )


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


def _operations(path: Path, graph: onnx.GraphProto, stored: Stored) -> Iterator[Operation]:
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
    """Return the buffers that our exporter or PyTorch's declared."""
    by_pytorch = {
        value.name
        for value in (*model.graph.input, *model.graph.value_info)
        for entry in value.metadata_props
        if entry.key == _TORCH_KIND_KEY and entry.value == "BUFFER"
    }
    return by_pytorch | _listed_buffers(model)


_TORCH_KIND_KEY = "pkg.torch.export.graph_signature.InputSpec.kind"


def _is_ours(model: onnx.ModelProto) -> bool:
    """Return whether our exporter wrote the file: then all inputs but one are weights."""
    return any(entry.key == BUFFERS_KEY for entry in model.metadata_props)


def _listed_buffers(model: onnx.ModelProto) -> set[str]:
    """Return the buffers in the metadata, which is untrusted text."""
    for entry in model.metadata_props:
        if entry.key == BUFFERS_KEY:
            try:
                names = json.loads(entry.value)
            except (ValueError, RecursionError):
                return set()
            return {n for n in names if isinstance(n, str)} if isinstance(names, list) else set()
    return set()
