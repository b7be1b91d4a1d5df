"""Makes a GraphTemplate from an ONNX file.

A node belongs to the graph if what it computes depends on the pixels. Everything else (constants,
the arithmetic on shapes that exporters leave behind, what is made of weights alone) is done once or
costs next to nothing, and is folded away; its weights count at the node that uses the result.
Shapes come from ONNX's own inference and, where it cannot follow the arithmetic on shapes (Swin),
from onnx-tool.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference

from profiler.errors import (
    InputError,
    ModelFileError,
    TrappmError,
    UnsupportedModelError,
    one_line,
)
from profiler.graph_nodes import BATCH_SIZES, Node, assemble
from profiler.onnx_file import MAX_BYTES, MAX_ELEMENTS, CheckedModel, load_checked
from profiler.records import Graph, GraphTemplate

Shapes = dict[str, tuple[int, ...]]


def read_onnx(
    path: Path, *, input_size: int | None = None, max_bytes: int = MAX_BYTES
) -> GraphTemplate:
    """The graph of an image model, for every batch size if the file leaves that open.

    Args:
        path: an ONNX file with or without its weights.
        input_size: height and width in pixels, for a file that leaves them open.
        max_bytes: larger files are refused.

    Raises:
        ModelFileError: as `profiler.onnx_file.load_checked`, or a height that is left open.
        InputError: `input_size` contradicts the file.
        UnsupportedModelError: valid ONNX of which no graph can be made; the reason is told.
    """
    model = load_checked(path, max_bytes)
    sizes = _image_sizes(path, model, input_size)
    skeleton = _skeleton(model)
    if not skeleton.nodes:
        raise ModelFileError(f"{path}: no output depends on the input {model.image!r}")
    inference = _ShapeInference(model, skeleton)
    try:
        if model.image_shape[0] is not None:
            fixed = model.image_shape[0]
            return GraphTemplate.fixed(_graph(skeleton, inference, (fixed, *sizes)))
        graphs = [_graph(skeleton, inference, (batch, *sizes)) for batch in BATCH_SIZES]
        return GraphTemplate.from_graphs(*graphs)
    except (InputError, UnsupportedModelError) as error:
        raise type(error)(f"{path}: {error}") from error
    except TrappmError as error:
        raise UnsupportedModelError(f"{path}: {error}") from error


def _image_sizes(path: Path, model: CheckedModel, input_size: int | None) -> tuple[int, ...]:
    """Channels, height and width (or height, width and channels, if the file has them so)."""
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


@dataclass(frozen=True)
class _Skeleton:
    """What does not depend on the batch size."""

    nodes: list[onnx.NodeProto]
    edges: set[tuple[int, int]]
    parameters: list[int]
    outputs: list[str]
    """Graph outputs that depend on the image."""


def _skeleton(model: CheckedModel) -> _Skeleton:
    graph = model.proto.graph
    depends = {model.image}  # tensors that depend on the pixels
    alias: dict[str, str] = {}  # output of an Identity -> what it stands for
    origins: dict[str, set[str]] = {name: {name} for name in model.weights}  # of folded tensors
    computing = []
    for node in graph.node:
        if node.op_type not in ("Shape", "Size") and any(name in depends for name in node.input):
            depends.update(node.output)
            if node.op_type == "Identity":
                alias[node.output[0]] = alias.get(node.input[0], node.input[0])
            else:
                computing.append(node)
        elif node.op_type not in ("Shape", "Size"):
            used = {weight for name in node.input for weight in origins.get(name, ())}
            origins.update((name, used) for name in node.output)

    outputs = [o.name for o in graph.output if o.name in depends]
    alive = {alias.get(name, name) for name in outputs}
    nodes = []
    for node in reversed(computing):
        if any(name in alive for name in node.output):
            nodes.append(node)
            alive.update(alias.get(name, name) for name in node.input)
    nodes.reverse()

    producer = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    edges = {
        (producer[source], i)
        for i, node in enumerate(nodes)
        for source in (alias.get(name, name) for name in node.input)
        if source in producer
    }
    counted: set[str] = set()
    parameters = []
    for node in nodes:
        weights = {w for name in node.input for w in origins.get(name, ())} - counted
        counted |= weights
        parameters.append(sum(model.parameters.get(weight, 0) for weight in weights))
    return _Skeleton(
        nodes=nodes,
        edges=edges,
        parameters=parameters,
        outputs=outputs,
    )


def _graph(skeleton: _Skeleton, inference: _ShapeInference, image_shape: tuple[int, ...]) -> Graph:
    shapes = inference.at(image_shape)
    batch_size = image_shape[0]
    for name in skeleton.outputs:
        if shapes[name][:1] != (batch_size,):
            raise UnsupportedModelError(
                f"at batch size {batch_size} the output {name!r} has shape {shapes[name]}; the "
                "batch size is written into the model, or the output has no batch axis"
            )
    nodes = [
        Node(
            operator=node.op_type,
            inputs=[shapes.get(name, ()) for name in node.input],
            outputs=[shapes[name] for name in node.output if name in shapes],
            parameters=parameters,
            attributes={a.name: _attribute(a) for a in node.attribute},
            name=node.name,
        )
        for node, parameters in zip(skeleton.nodes, skeleton.parameters, strict=True)
    ]
    return assemble(nodes, skeleton.edges, batch_size)


class _ShapeInference:
    """Shapes of every tensor that a node of the skeleton reads or writes, at any batch size."""

    def __init__(self, model: CheckedModel, skeleton: _Skeleton) -> None:
        self._model = model
        self._tool_graph: Any = None
        self._wanted = {
            name
            for node in skeleton.nodes
            for name in (*node.input, node.output[0])
            if name
        }  # fmt: skip

    def at(self, image_shape: tuple[int, ...]) -> Shapes:
        shapes = self._by_onnx(image_shape)
        if not self._wanted <= shapes.keys():
            shapes = self._by_onnx_tool(image_shape) | shapes
        unknown = sorted(self._wanted - shapes.keys())
        if unknown:
            raise UnsupportedModelError(f"the shape of tensor {unknown[0]!r} cannot be inferred")
        for name, shape in shapes.items():
            if any(size < 0 for size in shape) or math.prod(shape) > MAX_ELEMENTS:
                raise UnsupportedModelError(f"tensor {name!r} would have the shape {shape}")
        return shapes

    def _by_onnx(self, image_shape: tuple[int, ...]) -> Shapes:
        proto = onnx.ModelProto()
        proto.CopyFrom(self._model.proto)
        # What the exporter wrote down holds for its own batch size only.
        del proto.graph.value_info[:]
        for output in proto.graph.output:
            output.type.tensor_type.ClearField("shape")
        for value in proto.graph.input:
            if value.name == self._model.image:
                axes = value.type.tensor_type.shape.dim
                for axis, size in zip(axes, image_shape, strict=True):
                    axis.dim_value = size
        try:
            proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
        except Exception as error:
            raise UnsupportedModelError(f"ONNX cannot infer shapes: {one_line(error)}") from error
        shapes: Shapes = {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer}
        for value in (*proto.graph.input, *proto.graph.value_info, *proto.graph.output):
            kind = value.type.tensor_type
            if kind.HasField("shape") and all(d.HasField("dim_value") for d in kind.shape.dim):
                shapes[value.name] = tuple(d.dim_value for d in kind.shape.dim)
        return shapes

    def _by_onnx_tool(self, image_shape: tuple[int, ...]) -> Shapes:
        """onnx-tool also follows arithmetic on shapes, of any operator that it knows."""
        from onnx_tool.graph import Graph as ToolGraph
        from onnx_tool.utils import ModelConfig

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an unknown operator ends in our error below
                if self._tool_graph is None:
                    self._tool_graph = ToolGraph(self._model.proto.graph, ModelConfig({}))
                    self._tool_graph.graph_reorder_nodes()
                images = np.zeros(image_shape, dtype=np.float32)
                self._tool_graph.shape_infer({self._model.image: images})
            return {
                name: tuple(int(size) for size in tensor.get_shape())
                for name, tensor in self._tool_graph.tensormap.items()
            }
        except (Exception, SystemExit) as error:
            reason = one_line(error)
            raise UnsupportedModelError(f"onnx-tool cannot infer shapes: {reason}") from error


def _attribute(attribute: onnx.AttributeProto) -> object:
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
