"""Makes a GraphTemplate from an ONNX file.

A node belongs to the graph if what it computes depends on the pixels. Everything else (constants,
the arithmetic on shapes that exporters leave behind, what is made of weights alone) is done once or
costs next to nothing, and is folded away; its weights count at the node that uses the result.
Where shapes come from stands in `onnx_shapes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from trappm.profiler.errors import (
    InputError,
    ModelFileError,
    TrappmError,
    UnsupportedModelError,
)
from trappm.profiler.graphs.node_signature import IMAGE, Source
from trappm.profiler.graphs.nodes import BATCH_SIZES, Node, Structure, assemble
from trappm.profiler.onnx_files.opening import MAX_BYTES, CheckedModel, load_checked
from trappm.profiler.onnx_files.operation import Operation
from trappm.profiler.onnx_files.shapes import ShapeInference
from trappm.profiler.records import GraphTemplate


def read_onnx(
    path: Path, *, input_size: int | None = None, max_bytes: int = MAX_BYTES
) -> GraphTemplate:
    """The graph of an image model, for every batch size if the file leaves that open.

    Args:
        path: an ONNX file with or without its weights.
        input_size: height and width in pixels, for a file that leaves them open.
        max_bytes: larger files are refused.

    Raises:
        ModelFileError: as `load_checked`, or a height that is left open.
        InputError: `input_size` contradicts the file.
        UnsupportedModelError: valid ONNX of which no graph can be made; with the reason.
    """
    model = load_checked(path, max_bytes)
    sizes = _image_sizes(path, model, input_size)
    skeleton = _skeleton(model)
    if not skeleton.nodes:
        raise ModelFileError(
            f"{path}: no output depends on the input {model.image!r}, but as a copy"
        )
    try:
        wanted = {name for n in skeleton.nodes for name in (*n.inputs, n.outputs[0]) if name}
        inference = ShapeInference(model, skeleton.depends, wanted)
        if model.image_shape[0] is not None:
            fixed = model.image_shape[0]
            nodes = _nodes(skeleton, inference, (fixed, *sizes))
            return GraphTemplate.fixed(assemble(nodes, _structure(model, nodes, inference), fixed))
        graphs, structure = [], None
        for batch in BATCH_SIZES:
            nodes = _nodes(skeleton, inference, (batch, *sizes))
            structure = structure or _structure(model, nodes, inference)
            graphs.append(assemble(nodes, structure, batch))
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

    nodes: list[Operation]
    sources: list[list[Source | None]]
    """Of each node's inputs."""
    parameters: list[int]
    outputs: list[str]
    """What the graph outputs that depend on the image stand for."""
    depends: set[str]
    """Names of all tensors that depend on the image, dead ends included."""


def _skeleton(model: CheckedModel) -> _Skeleton:
    depends = {model.image}  # tensors that depend on the pixels
    alias: dict[str, str] = {}  # output of an Identity -> what it stands for
    folded: dict[str, Operation] = {}  # by output
    computing = []
    for node in model.operations:
        if node.operator in ("Shape", "Size"):
            continue
        if not depends.isdisjoint(node.inputs):
            depends.update(filter(None, node.outputs))
            if node.operator == "Identity":
                alias[node.outputs[0]] = alias.get(node.inputs[0], node.inputs[0])
            else:
                computing.append(node)
        else:
            folded.update((name, node) for name in node.outputs if name)

    # Several may stand for one tensor, or for the image itself.
    outputs = [*dict.fromkeys(alias.get(n, n) for n in model.outputs if n in depends)]
    alive = set(outputs)
    nodes = []
    for node in reversed(computing):
        if not alive.isdisjoint(node.outputs):
            nodes.append(node)
            alive.update(alias.get(name, name) for name in node.inputs)
    nodes.reverse()

    origin = {model.image: Source(IMAGE)}
    for i, node in enumerate(nodes):
        origin.update((name, Source(i, place)) for place, name in enumerate(node.outputs) if name)
    sources = [[origin.get(alias.get(name, name)) for name in node.inputs] for node in nodes]
    return _Skeleton(
        nodes=nodes,
        sources=sources,
        parameters=list(_parameters(model, nodes, folded)),
        outputs=outputs,
        depends=depends,
    )


def _parameters(
    model: CheckedModel, nodes: list[Operation], folded: dict[str, Operation]
) -> Iterator[int]:
    """Elements of the weights that each node uses, directly or through what is folded into it.

    What an earlier node has used is not followed again, so this takes one pass over the model.
    """
    followed: set[str] = set()
    for node in nodes:
        count = 0
        names = list(node.inputs)
        while names:
            name = names.pop()
            if name in followed:
                continue
            followed.add(name)
            count += model.parameters.get(name, 0) + model.quantized.get(name, 0)
            if name in folded:
                names.extend(folded[name].inputs)
        yield count


def _nodes(
    skeleton: _Skeleton, inference: ShapeInference, image_shape: tuple[int, ...]
) -> list[Node]:
    """The nodes with their shapes for images of this shape."""
    shapes = inference.at(image_shape)
    batch_size = image_shape[0]
    for name in skeleton.outputs:
        if shapes[name][:1] != (batch_size,):
            raise UnsupportedModelError(
                f"at batch size {batch_size} the output {name!r} has shape {shapes[name]}; the "
                "batch size is written into the model, or the output has no batch axis"
            )
    return [
        Node(
            node.operator,
            [shapes[name] for name in node.inputs],
            [shapes[name] for name in node.outputs if name and name in shapes],
            parameters,
            _with_axes(node, inference),
            node.name,
            sources,
        )
        for node, parameters, sources in zip(
            skeleton.nodes, skeleton.parameters, skeleton.sources, strict=True
        )
    ]


def _with_axes(node: Operation, inference: ShapeInference) -> Mapping[str, Any]:
    """The attributes; the axes that reductions take as an input from opset 13 or 18 on are one."""
    if node.operator.startswith("Reduce") and len(node.inputs) > 1:
        axes = inference.value(node.inputs[1])
        if axes is not None:
            return {**node.attributes, "axes": axes.ravel().astype(int).tolist()}
    return node.attributes


def _structure(model: CheckedModel, nodes: list[Node], inference: ShapeInference) -> Structure:
    image_type = onnx.helper.tensor_dtype_to_np_dtype(model.image_kind).name
    return Structure.of(nodes, image_type)
