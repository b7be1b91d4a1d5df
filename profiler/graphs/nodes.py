"""Nodes as the two makers of graphs collect them, and the Graph that they add up to.

Whether a node was read from an ONNX file or seen in a forward pass, its MACs, memory and padded
shapes are computed here, so that the two cannot drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.graphs.macs import Shape, node_macs
from trappm.profiler.graphs.node_signature import Source, edge_slots, node_signature
from trappm.profiler.records import SHAPE_LENGTH, Graph, IntArray

BATCH_SIZES = (2, 3, 5)
"""Shapes are taken at two batch sizes and checked at the third; 1 would hide broadcasts."""

BYTES_PER_ELEMENT = 4


class Node(NamedTuple):
    """One operator with its shapes at one batch size."""

    operator: str
    inputs: Sequence[Shape]
    """Of all inputs, weights included; () for one left out."""
    outputs: Sequence[Shape]
    parameters: int = 0
    attributes: Mapping[str, Any] = MappingProxyType({})
    name: str = ""
    """For messages."""
    sources: Sequence[Source | None] = ()
    """Of the inputs; None for weights, constants and what is left out."""


@dataclass(frozen=True)
class Structure:
    """What does not depend on the batch size."""

    operators: tuple[str, ...]
    signatures: tuple[str, ...]
    edges: IntArray
    edge_slots: tuple[str, ...]

    @classmethod
    def of(cls, nodes: Sequence[Node], image_type: str) -> Self:
        """The structure of nodes in topological order.

        Args:
            nodes: with their shapes at any batch size.
            image_type: element type of the image, such as `float32`.

        Raises:
            UnsupportedModelError: attributes that do not fit the operator.
        """
        signatures = []
        for node in nodes:
            try:
                signatures.append(
                    node_signature(
                        node.operator, node.attributes, node.inputs, node.sources, image_type
                    )
                )
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                raise UnsupportedModelError(
                    f"cannot read the attributes of {node.operator} {node.name!r}: {error!r}"
                ) from error
        operators = tuple(node.operator for node in nodes)
        slots = dict(sorted(edge_slots(operators, (node.sources for node in nodes)).items()))
        return cls(
            operators=operators,
            signatures=tuple(signatures),
            edges=np.array(list(slots), dtype=np.int64).reshape(-1, 2),
            edge_slots=tuple(slots.values()),
        )


def assemble(nodes: Sequence[Node], structure: Structure, batch_size: int) -> Graph:
    """The Graph of these nodes, which are in topological order.

    Raises:
        UnsupportedModelError: shapes that do not fit the operator, or sizes beyond 64 bits.
    """
    macs, memory = [], []
    for node in nodes:
        try:
            macs.append(node_macs(node.operator, node.attributes, node.inputs, node.outputs))
        except (IndexError, KeyError, ValueError) as error:
            raise UnsupportedModelError(
                f"cannot count the MACs of {node.operator} {node.name!r}: {error!r}"
            ) from error
        elements = node.parameters
        for shape in node.outputs:
            elements += math.prod(shape)
        memory.append(BYTES_PER_ELEMENT * elements)
    shapes = [_padded(node.inputs[0]) for node in nodes], [_padded(n.outputs[0]) for n in nodes]
    return Graph(
        operators=structure.operators,
        signatures=structure.signatures,
        edges=structure.edges,
        edge_slots=structure.edge_slots,
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
