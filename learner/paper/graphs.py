"""Graphs as PyTorch Geometric data, and scales of their features over the data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from trappm.learner.interface import FloatArray, IntArray, Workload, cache_on_first
from trappm.learner.paper.distinct_nodes import node_keys
from trappm.profiler.errors import InputError
from trappm.profiler.graphs.features import NODE_FEATURES, OPERATORS, node_features, static_features
from trappm.profiler.records import Graph

CLIP = 6.0
"""Largest distance of a scaled feature from the mean in standard deviations (round number)."""


@dataclass(frozen=True, eq=False)
class Scaler:
    """Mean and deviation of each column over a data set, both of shape (columns)."""

    mean: FloatArray
    deviation: FloatArray

    @classmethod
    def fit(cls, values: npt.NDArray[Any]) -> Self:
        """Fit to rows (n, columns); a constant column is only centered."""
        mean = values.mean(axis=0, dtype=np.float64)
        deviation = values.std(axis=0, dtype=np.float64)
        deviation[deviation < 1e-6] = 1.0
        return cls(mean.astype(np.float32), deviation.astype(np.float32))

    def apply(self, values: npt.NDArray[Any]) -> FloatArray:
        scaled = (values - self.mean) / self.deviation
        clipped: FloatArray = np.clip(scaled, -CLIP, CLIP).astype(np.float32)
        return clipped

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        return {
            f"{prefix}.mean": torch.from_numpy(self.mean.copy()),
            f"{prefix}.deviation": torch.from_numpy(self.deviation.copy()),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], prefix: str) -> Self:
        return cls(tensors[f"{prefix}.mean"].numpy(), tensors[f"{prefix}.deviation"].numpy())


def log_static_features(workloads: Sequence[Workload]) -> FloatArray:
    """Return log(1 + x) of the six static features of each graph (n, 6), not scaled."""
    rows = [np.log1p(static_features(workload.graph)) for workload in workloads]
    return np.array(rows, dtype=np.float32).reshape(len(workloads), 6)


def join_vectors(workloads: Sequence[Workload], embeddings: FloatArray) -> FloatArray:
    """Return embeddings and logarithms of the static features (n, width + 6), not scaled."""
    return np.hstack([embeddings, log_static_features(workloads)])


def fit_node_scaler(graphs: Sequence[Graph]) -> Scaler:
    """Return the scale of the sizes of all nodes of these graphs (15)."""
    count, total, squares = 0, np.zeros(_SIZES), np.zeros(_SIZES)
    for graph in graphs:  # a sum at a time: all nodes of a pool would not fit into memory
        table = _node_table(graph)[0][:, 1:].astype(np.float64)
        count += len(table)
        total += table.sum(axis=0)
        squares += (table**2).sum(axis=0)
    mean = total / max(count, 1)
    deviation = np.sqrt(np.maximum(squares / max(count, 1) - mean**2, 0.0))
    deviation[deviation < 1e-6] = 1.0
    return Scaler(mean.astype(np.float32), deviation.astype(np.float32))


def to_data(
    graph: Graph,
    scaler: Scaler,
    *,
    vector: npt.NDArray[Any] | None = None,
    target: npt.NDArray[Any] | None = None,
) -> Data:
    """Return a graph as PyG data: `x` (N, 16), `edge_index` (2, E), `vector` (1, v), `y` (1, m).

    `x` is the operator's number and 15 scaled sizes; `distinct_nodes.one_hot` expands it to the
    paper's 113 columns. `keys_by_depth` marks equal nodes.

    Raises:
        InputError: The graph has no nodes, or vector or target is not one row.
    """
    if not graph.node_count:
        raise InputError("a graph without nodes cannot be learned from")
    table, keys = _node_table(graph)
    data = Data(
        x=torch.from_numpy(np.hstack([table[:, :1], scaler.apply(table[:, 1:])])),
        keys_by_depth=torch.from_numpy(keys),
        edge_index=torch.from_numpy(np.ascontiguousarray(graph.edges.T, dtype=np.int64)),
    )
    for name, row in (("vector", vector), ("y", target)):
        if row is None:
            continue
        if row.ndim != 1:
            raise InputError(f"the {name} of one graph has shape {row.shape}; it must be one row")
        # The leading 1 makes a batch of them (B, v) and (B, m), never one long row.
        data[name] = torch.from_numpy(np.asarray(row, dtype=np.float32))[None, :]
    return data


_SIZES = NODE_FEATURES - len(OPERATORS)


@cache_on_first
def _node_table(graph: Graph) -> tuple[FloatArray, IntArray]:
    """Return operator number and unscaled sizes (N, 16), and the keys of `distinct_nodes`."""
    features = node_features(graph)
    operators = features[:, : len(OPERATORS)].argmax(axis=1).astype(np.float32)[:, None]
    table = np.hstack([operators, features[:, len(OPERATORS) :]])
    return table, node_keys(table, graph.edges)


def batches(data: Sequence[Data], max_nodes: int, order: Sequence[int]) -> Iterator[Batch]:
    """Yield batches of at most `max_nodes` nodes in this order; a larger graph is alone."""
    waiting: list[Data] = []
    nodes = 0
    for index in order:
        size = int(data[index].x.shape[0])
        if waiting and nodes + size > max_nodes:
            yield Batch.from_data_list(waiting)
            waiting, nodes = [], 0
        waiting.append(data[index])
        nodes += size
    if waiting:
        yield Batch.from_data_list(waiting)
