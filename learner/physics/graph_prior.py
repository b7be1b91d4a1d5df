"""Prior of step time and power from terms of the graph alone.

It is for workloads without kernels, devices outside the catalogue, and power on CPU cores.

Prior deviations are judgments: a factor of two (0.7) for the share of a peak that kernels of one
kind reach, of three for launches, of twenty (3.0) for how devices differ altogether.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from trappm.learner.interface import Array, IntArray, Workload, cache_on_first
from trappm.learner.physics.prior import OPERATORS, PriorSpec, TermPrior, operator_shares
from trappm.profiler.graphs.nodes import BYTES_PER_ELEMENT
from trappm.profiler.records import Graph, MemoryFormat, Phase

FORWARD_SHARE = 1 / 3
"""Forward share of a training step: the backward pass has two products per forward product."""
# The reference device: 1 TFLOP/s, 100 GB/s and 100 W. A training step does about three forward
# passes, and each multiply-accumulate is two operations; 20 us for a node are for launches.
# Round numbers: labels move all of them.
MS_PER_MAC = 3 * 2 / 1e12 * 1e3
MS_PER_BYTE = 3 / 1e11 * 1e3
MS_PER_NODE = 0.02
MS_PER_STEP = 1.0

NORMS = frozenset({"BatchNormalization", "LayerNormalization", "GroupNormalization",
                   "InstanceNormalization", "RMSNormalization", "LpNormalization"})  # fmt: skip
PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "Attention"})
VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout", "Shape"})
MOVES = frozenset({"Transpose", "Concat", "Slice", "Split", "Gather", "Pad", "Expand", "Resize",
                   "DepthToSpace", "ScatterND", "GatherND", "GatherElements"})  # fmt: skip

# Launching, arithmetic by kind of kernel (they reach very different shares of the peak), and
# traffic by kind of operator; devices differ by orders of magnitude, mostly in common. A spread of
# 0.7 is a factor of two, of 1.5 one of five: round numbers, since labels decide.
_WORK = PriorSpec(
    {
        "step": 1.5,
        "launch": 1.5,
        "macs_dense": 0.7,
        "macs_pointwise": 0.7,
        "macs_matmul": 0.7,
        "macs_grouped": 1.0,
        "traffic_product": 0.7,
        "traffic_norm": 0.7,
        "traffic_elementwise": 0.7,
        "traffic_move": 0.7,
        "traffic_weights": 0.7,
    },
    common_spread=3.0,
)

PRIORS: dict[str, PriorSpec] = {
    "step_time_ms": _WORK,
    # Idle power, and more of it the busier arithmetic and memory are.
    "power_w": PriorSpec(
        {
            "idle": 0.5,
            "arithmetic": 0.5,
            "traffic": 0.5,
            "occupancy": 0.5,
        },
        common_spread=1.5,
    ),
}
"""Terms of each metric in the order of `term_matrix`."""


def term_matrix(graphs: Sequence[Graph], metric: str) -> Array:
    """Return the terms of each graph in the metric's unit on the reference device (n, k)."""
    rows = np.array([list(_TERMS[metric](_totals(graph))) for graph in graphs], dtype=np.float64)
    return rows.reshape(len(graphs), len(PRIORS[metric].spreads))


class GraphPrior(TermPrior):
    """Prior of step time or power from terms of the graph."""

    def __init__(self, metric: str, log_constants: Array | None = None) -> None:
        """Raise KeyError for a metric without terms."""
        super().__init__(PRIORS[metric], log_constants)
        self.metric = metric

    @property
    def feature_groups(self) -> tuple[int, ...]:
        return (4, len(self.spec.spreads), len(OPERATORS), 5)

    def with_constants(self, log_constants: Array) -> Self:
        return type(self)(self.metric, log_constants)

    def terms(self, workloads: Sequence[Workload]) -> Array:
        terms = term_matrix([workload.graph for workload in workloads], self.metric)
        if self.metric == "step_time_ms":  # inference does the forward pass only
            infers = np.array([w.phase is Phase.INFER for w in workloads], dtype=bool)
            terms[infers] *= FORWARD_SHARE
        return terms

    def features_of(self, workloads: Sequence[Workload], logs: Array, shares: Array) -> Array:
        """Size, the terms' shares, the operators' shares of the nodes, and the configuration."""
        return settings_and_operators(workloads, logs, shares)

    def tensors(self) -> dict[str, Tensor]:
        name = torch.tensor(list(self.metric.encode()), dtype=torch.uint8)
        return {**super().tensors(), "metric": name}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        metric = bytes(tensors["metric"].tolist()).decode()
        return cls(metric, tensors["log_constants"].numpy())


def settings_and_operators(workloads: Sequence[Workload], sizes: Array, shares: Array) -> Array:
    """Features of workloads: sizes (n), a prior's shares (n, k), operators and settings (n, f)."""
    rows = []
    for workload, size, parts in zip(workloads, sizes, shares, strict=True):
        graph = workload.graph
        nodes = graph.node_count
        image = float(np.prod(np.maximum(graph.input_shapes[0, 1:], 1))) if nodes else 1.0
        rows.append(
            [
                size,
                np.log(graph.batch_size),
                np.log(max(nodes, 1)),
                np.log(image),
                *parts,
                *operator_shares(graph),
                not workload.precision.is_fp32,
                workload.memory_format is MemoryFormat.CHANNELS_LAST,
                workload.phase is Phase.INFER,
                workload.optimizer.states_per_parameter == 1,
                workload.optimizer.states_per_parameter == 2,
            ]
        )
    width = 4 + shares.shape[1] + len(OPERATORS) + 5
    return np.array(rows, dtype=np.float64).reshape(len(workloads), width)


@dataclass(frozen=True)
class _Totals:
    """Sums over the nodes of a graph, by kind of operator."""

    batch_size: int
    nodes: int
    macs: dict[str, float]
    traffic: dict[str, float]
    """Bytes of inputs and outputs."""
    parameters: float


@cache_on_first
def _totals(graph: Graph) -> _Totals:
    elements_in = _elements(graph.input_shapes)
    elements_out = _elements(graph.output_shapes)
    out_bytes = np.maximum(
        graph.memory_bytes - BYTES_PER_ELEMENT * graph.parameters, 0
    ).astype(np.float64)  # fmt: skip
    traffic = BYTES_PER_ELEMENT * elements_in + out_bytes
    kinds = np.array([_KIND_OF.get(operator, "elementwise") for operator in graph.operators])
    per_output = graph.macs / np.maximum(elements_out, 1.0)
    channels = graph.input_shapes[:, 1].astype(np.float64)
    is_convolution = np.isin(graph.operators, ("Conv", "ConvTranspose"))
    # A dense k x k convolution costs channels * k^2 per output, a grouped one less than channels
    # as soon as it has more groups than k^2.
    grouped = is_convolution & (per_output < channels)
    pointwise = is_convolution & (per_output == channels)
    dense = is_convolution & (per_output > channels)
    macs = graph.macs.astype(np.float64)
    return _Totals(
        batch_size=graph.batch_size,
        nodes=int(np.sum(kinds != "view")),
        macs={
            "grouped": float(macs[grouped].sum()),
            "pointwise": float(macs[pointwise].sum()),
            "dense": float(macs[dense].sum()),
            "matmul": float(macs[~is_convolution].sum()),
        },
        traffic={kind: float(traffic[kinds == kind].sum()) for kind in _KINDS},
        parameters=float(graph.parameters.sum()),
    )


_KINDS = ("product", "norm", "elementwise", "move")


_KIND_OF = {
    operator: kind
    for kind, members in (("product", PRODUCTS), ("norm", NORMS), ("view", VIEWS), ("move", MOVES))
    for operator in members
}


def _elements(shapes: IntArray) -> Array:
    """Elements of each padded shape (N); a node without a shape has none."""
    sizes = np.where(shapes > 0, shapes, 1).astype(np.float64)
    return np.where((shapes > 0).any(axis=1), sizes.prod(axis=1), 0.0)


def _step_time(t: _Totals) -> list[float]:
    return [
        MS_PER_STEP,
        MS_PER_NODE * t.nodes,
        MS_PER_MAC * t.macs["dense"],
        MS_PER_MAC * t.macs["pointwise"],
        MS_PER_MAC * t.macs["matmul"],
        MS_PER_MAC * t.macs["grouped"] * 10,
        MS_PER_BYTE * t.traffic["product"],
        MS_PER_BYTE * t.traffic["norm"],
        MS_PER_BYTE * t.traffic["elementwise"],
        MS_PER_BYTE * t.traffic["move"],
        MS_PER_BYTE * BYTES_PER_ELEMENT * t.parameters,
    ]


def _power(t: _Totals) -> list[float]:
    arithmetic = MS_PER_MAC * sum(t.macs.values())
    traffic = MS_PER_BYTE * sum(t.traffic.values())
    waiting = MS_PER_STEP + MS_PER_NODE * t.nodes
    total = arithmetic + traffic + waiting
    return [20.0, 100 * arithmetic / total, 100 * traffic / total,
            50 * t.batch_size / (t.batch_size + 16)]  # fmt: skip


_TERMS = {
    "step_time_ms": _step_time,
    "power_w": _power,
}
