"""Numbers of a whole graph beyond the paper's six: what makes memory and time predictable.

All are computed from the Graph alone; the bytes that autograd keeps for the backward pass need the
model itself (`profiler.step_profile`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from profiler.graph_nodes import BYTES_PER_ELEMENT
from profiler.records import Graph, IntArray

CONVOLUTIONS = frozenset({"CausalConvWithState", "Conv", "ConvTranspose", "DeformConv"})
PRODUCTS = frozenset(
    {"Attention", "Einsum", "GRU", "Gemm", "LSTM", "LinearAttention", "MatMul", "RNN"}
)

RICH_FEATURES: tuple[str, ...] = (
    "activation_bytes", "largest_tensor_bytes", "bytes_moved", "convolution_macs",
    "product_macs", "other_macs", "critical_path_nodes", "parameters",
)  # fmt: skip
"""Names of the rich features, in order."""


def rich_features(graph: Graph) -> npt.NDArray[np.float64]:
    """The rich features of a graph (8), raw: sizes in fp32 bytes, of one forward pass.

    Activation bytes are all outputs of all nodes; bytes moved are what each node reads (its inputs
    and weights) and writes; the critical path is the longest chain of nodes.
    """
    activations = graph.memory_bytes - BYTES_PER_ELEMENT * graph.parameters
    convolution = np.array([o in CONVOLUTIONS for o in graph.operators], dtype=bool)
    product = np.array([o in PRODUCTS for o in graph.operators], dtype=bool)
    return np.array(
        [
            activations.sum(),
            activations.max(initial=0),
            graph.memory_bytes.sum() + BYTES_PER_ELEMENT * _elements_read(graph),
            graph.macs[convolution].sum(),
            graph.macs[product].sum(),
            graph.macs[~(convolution | product)].sum(),
            critical_path_nodes(graph),
            graph.parameters.sum(),
        ],
        dtype=np.float64,
    )


def critical_path_nodes(graph: Graph) -> int:
    """The number of nodes on the longest path: what cannot run side by side."""
    length = np.ones(graph.node_count, dtype=np.int64)
    for source, target in graph.edges[np.argsort(graph.edges[:, 1], kind="stable")].tolist():
        length[target] = max(length[target], length[source] + 1)
    return int(length.max(initial=0))


def _elements_read(graph: Graph) -> int:
    """Each edge moves its producer's first output; nodes without producers read the images."""
    fed = np.zeros(graph.node_count, dtype=bool)
    fed[graph.edges[:, 1]] = True
    from_edges = _elements(graph.output_shapes)[graph.edges[:, 0]].sum()
    return int(from_edges + _elements(graph.input_shapes)[~fed].sum())


def _elements(shapes: IntArray) -> IntArray:
    """Elements of padded shapes; a shape of zeros only is a scalar."""
    elements: IntArray = np.where(shapes == 0, 1, shapes).prod(axis=1)
    return elements
