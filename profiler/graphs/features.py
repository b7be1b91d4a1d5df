"""Features of a graph: 113 for each node, 6 for the whole (TraPPM: node and static features).

One difference to the paper: its code puts raw sizes of up to 1e9 next to the one-hot operator. Here
sizes are log(1 + size), which has the one-hot's order of magnitude.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trappm.profiler.graphs.nodes import ONNX
from trappm.profiler.records import SHAPE_LENGTH, Graph

OPERATORS: tuple[str, ...] = (
    *(row.operator for row in ONNX.values() if row.is_feature),
    "Other",
)
"""ONNX operators of the one-hot in the table's order; the last is for all others."""

NODE_FEATURES = len(OPERATORS) + 2 * SHAPE_LENGTH + 3
"""113: operator, input shape, output shape, MACs, parameters, memory."""

STATIC_FEATURES: tuple[str, ...] = (
    "batch_size", "nodes", "edges", "macs", "parameters", "memory_bytes",
)  # fmt: skip
"""Names of the static features, in order."""

_PLACE = {operator: place for place, operator in enumerate(OPERATORS)}


def node_features(graph: Graph) -> npt.NDArray[np.float32]:
    """Return the features of every node (N, 113): one-hot operator (98), then log(1 + size).

    The sizes are input shape (6), output shape (6), MACs, parameters and memory in bytes.
    """
    count = graph.node_count
    one_hot = np.zeros((count, len(OPERATORS)), dtype=np.float32)
    places = [_PLACE.get(operator, len(OPERATORS) - 1) for operator in graph.operators]
    one_hot[np.arange(count), places] = 1.0
    sizes = np.column_stack(
        [
            graph.input_shapes,
            graph.output_shapes,
            graph.macs,
            graph.parameters,
            graph.memory_bytes,
        ]
    )
    return np.hstack([one_hot, np.log1p(sizes.astype(np.float64)).astype(np.float32)])


def static_features(graph: Graph) -> npt.NDArray[np.float64]:
    """Return batch size, nodes, edges, and the sums of MACs, parameters and memory (6).

    They are not scaled: a scale must come from the whole data set. The paper's code scales over the
    six numbers of one sample, so that batch 1 and batch 512 look the same.
    """
    return np.array(
        [
            graph.batch_size,
            graph.node_count,
            graph.edge_count,
            graph.macs.sum(),
            graph.parameters.sum(),
            graph.memory_bytes.sum(),
        ],
        dtype=np.float64,
    )
