"""Nodes as they are collected, and the Graph that they add up to: MACs, memory, padded shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.graphs.macs import Shape, node_macs
from trappm.profiler.graphs.node_signature import Source, edge_slots, node_signature
from trappm.profiler.records import SHAPE_LENGTH, Graph, IntArray

BYTES_PER_ELEMENT = 4


class Node(NamedTuple):
    """One operator with its shapes at one batch size."""

    operator: str
    inputs: Sequence[Shape]
    """Of all inputs, weights included; () for one left out."""
    outputs: Sequence[Shape]
    parameters: int = 0
    attributes: Mapping[str, Any] = MappingProxyType({})
    sources: Sequence[Source | None] = ()
    """Of the inputs; None for weights, constants and what is left out."""


def assemble(nodes: Sequence[Node], image_type: str, batch_size: int) -> Graph:
    """The Graph of these nodes, which are in topological order.

    Args:
        nodes: with their shapes at this batch size.
        image_type: element type of the image, such as `float32`.

    Raises:
        UnsupportedModelError: attributes or shapes that do not fit the operator, or sizes beyond
            64 bits.
    """
    operators = tuple(node.operator for node in nodes)
    slots = dict(sorted(edge_slots(operators, (node.sources for node in nodes)).items()))
    signatures = []
    macs, memory = [], []
    for node in nodes:
        given = node.operator, node.attributes, node.inputs
        try:
            signatures.append(node_signature(*given, node.sources, image_type))
            macs.append(node_macs(*given, node.outputs))
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise UnsupportedModelError(
                f"cannot count {node.operator}, of these attributes and shapes: {error!r}"
            ) from error
        elements = node.parameters
        for shape in node.outputs:
            elements += math.prod(shape)
        memory.append(BYTES_PER_ELEMENT * elements)
    shapes = [_padded(node.inputs[0]) for node in nodes], [_padded(n.outputs[0]) for n in nodes]
    return Graph(
        operators=operators,
        signatures=tuple(signatures),
        edges=np.array(list(slots), dtype=np.int64).reshape(-1, 2),
        edge_slots=tuple(slots.values()),
        input_shapes=np.array(shapes[0], dtype=np.int64).reshape(-1, SHAPE_LENGTH),
        output_shapes=np.array(shapes[1], dtype=np.int64).reshape(-1, SHAPE_LENGTH),
        macs=_exact(macs),
        parameters=np.array([node.parameters for node in nodes], dtype=np.int64),
        memory_bytes=_exact(memory),
        batch_size=batch_size,
    )


def _padded(shape: Shape) -> Shape:
    """Six sizes; the axes from the sixth on are one, so that no element is lost."""
    if len(shape) > SHAPE_LENGTH:
        shape = (*shape[: SHAPE_LENGTH - 1], math.prod(shape[SHAPE_LENGTH - 1 :]))
    return shape + _PADDING[len(shape)]


_PADDING = [(0,) * (SHAPE_LENGTH - rank) for rank in range(SHAPE_LENGTH + 1)]


def _exact(values: list[int]) -> IntArray:
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as error:
        raise UnsupportedModelError("a node would need more than 2^63 operations") from error
