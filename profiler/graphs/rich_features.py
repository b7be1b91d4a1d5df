"""Numbers of a whole graph beyond the paper's six: what makes memory and time predictable.

All are computed from the Graph alone, but what only a traced training step tells: the bytes that
autograd keeps for the backward pass, and which parameters are trained.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trappm.profiler.graphs.nodes import BYTES_PER_ELEMENT
from trappm.profiler.records import Graph, IntArray

if TYPE_CHECKING:
    from trappm.profiler.simulation.step_profile import StepProfile

CONVOLUTIONS = frozenset({"CausalConvWithState", "Conv", "ConvTranspose", "DeformConv"})
PRODUCTS = frozenset(
    {"Attention", "Einsum", "GRU", "Gemm", "LSTM", "LinearAttention", "MatMul", "RNN"}
)

MAC_CLASSES: tuple[str, ...] = (
    "pointwise_convolution", "dense_convolution", "grouped_convolution", "depthwise_convolution",
    "matrix_product", "attention", "other",
)  # fmt: skip
"""Classes of operators whose arithmetic runs at different speeds, as `mac_classes` tells them."""

RICH_FEATURES: tuple[str, ...] = (
    "activation_bytes", "largest_tensor_bytes", "bytes_moved",
    *(f"{name}_macs" for name in MAC_CLASSES), "critical_path_nodes", "parameters",
)  # fmt: skip
"""Names of the rich features of a graph, in order."""

STEP_FEATURES: tuple[str, ...] = ("saved_bytes", "trainable_parameters", "frozen_parameters")
"""Names of those that a traced training step adds, in order."""


def rich_features(graph: Graph, step: StepProfile | None = None) -> npt.NDArray[np.float64]:
    """The rich features of a graph (12), raw; with its step profile, those of the step too (15).

    Sizes are in fp32 bytes, of one forward pass. Activation bytes are all outputs of all nodes;
    bytes moved are what each node reads (its inputs and weights) and writes; the critical path is
    the longest chain of nodes; saved bytes are what autograd keeps at the graph's batch size.
    """
    activations = graph.memory_bytes - BYTES_PER_ELEMENT * graph.parameters
    macs = np.zeros(len(MAC_CLASSES), dtype=np.int64)
    np.add.at(macs, mac_classes(graph), graph.macs)
    features = [
        activations.sum(),
        activations.max(initial=0),
        graph.memory_bytes.sum() + BYTES_PER_ELEMENT * _elements_read(graph),
        *macs,
        critical_path_nodes(graph),
        graph.parameters.sum(),
    ]
    if step is not None:
        saved = step.saved_bytes.at(graph.batch_size)
        features += [saved, step.trainable_parameters, step.frozen_parameters]
    return np.array(features, dtype=np.float64)


def mac_classes(graph: Graph) -> IntArray:
    """For each node, the index of its class in `MAC_CLASSES` (N).

    A graph has shapes and MACs, no kernels and groups; of a `Conv`, what each result is made of
    (MACs per element of the output: kernel positions x input channels of its group) tells them:

    - as many as there are input channels: pointwise; a multiple of these: dense, k x k;
    - else an odd number: depthwise, as kernels have an odd number of positions and groups an even
      number of channels; all others are grouped, and so are depthwise kernels of even size.

    Other operators for convolution count as dense. Attention are `Attention`, `LinearAttention`,
    and products of two different computed tensors; all other products are with weights.
    """
    channels = graph.input_shapes[:, 1]
    made_of = graph.macs // np.maximum(_elements(graph.output_shapes), 1)
    whole = made_of % np.maximum(channels, 1) == 0
    classes = {name: index for index, name in enumerate(MAC_CLASSES)}
    convolution = np.select(
        [~_are(graph, {"Conv"}), made_of == channels, whole, made_of % 2 == 1],
        [classes[f"{n}_convolution"] for n in ("dense", "pointwise", "dense", "depthwise")],
        classes["grouped_convolution"],
    )
    sources: list[set[int]] = [set() for _ in graph.operators]
    for source, target in graph.edges.tolist():
        sources[target].add(source)
    computed = np.array([len(nodes) > 1 for nodes in sources], dtype=bool)
    attention = _are(graph, {"Attention", "LinearAttention"}) | (
        _are(graph, {"Einsum", "MatMul"}) & computed & (graph.parameters == 0)
    )
    found: IntArray = np.select(
        [_are(graph, CONVOLUTIONS), attention, _are(graph, PRODUCTS)],
        [convolution, classes["attention"], classes["matrix_product"]],
        classes["other"],
    ).astype(np.int64)
    return found


def _are(graph: Graph, operators: Collection[str]) -> npt.NDArray[np.bool_]:
    return np.array([o in operators for o in graph.operators], dtype=bool)


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
