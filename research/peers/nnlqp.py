"""NNLQP: GraphSAGE over operators, four static features, and a relative squared error.

Liu et al., "NNLQP: a multi-platform neural network latency query and prediction system with an
evolving database", ICPP 2022, sections 4 and 5: two SAGE layers of 512, sum pooling, joined with
batch size, FLOPs, parameters and memory access, fully connected layers, a head for each platform
(here: a model for each device and metric), and the loss mse(prediction / truth, 1). Its node
features are operator, attributes and output shape; attributes of operators, such as kernel sizes,
enter here through the MACs and parameters that follow from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch_geometric.data import Batch

from research.peers.sizes import LAPTOP_SIZE, Size
from trappm.learner.paper.distinct_nodes import DistinctSAGEConv, classes_of
from trappm.learner.paper.graphs import FloatArray, log_static_features
from trappm.learner.paper.regressor import NetworkEstimator
from trappm.learner.workload import Workload
from trappm.profiler.graphs.features import NODE_FEATURES, STATIC_FEATURES

DROPOUT = 0.05
_KEPT = [STATIC_FEATURES.index(n) for n in ("batch_size", "macs", "parameters", "memory_bytes")]


class SageNetwork(nn.Module):
    """SAGE layers, a sum over nodes, joined with the vector, fully connected layers, one output."""

    def __init__(self, vector_width: int, width: int, layers: int, hidden_layers: int) -> None:
        super().__init__()
        inputs = (NODE_FEATURES, *[width] * (layers - 1))
        self.convolutions = nn.ModuleList(DistinctSAGEConv(before, width) for before in inputs)
        self.norm = nn.LayerNorm(width)
        hidden = (width + vector_width, *[width] * (hidden_layers - 1))
        self.layers = nn.ModuleList(nn.Linear(before, width) for before in hidden)
        self.output = nn.Linear(width, 1)

    def forward(self, data: Batch) -> Tensor:
        """(graphs, 1) for a batch with nodes and `vector`."""
        classes = classes_of(data, len(self.convolutions))
        x = classes.rows
        for convolution, layer in zip(self.convolutions, classes.layers, strict=True):
            x = F.dropout(F.relu(convolution(x, layer)), DROPOUT, self.training)
        # A sum over hundreds of nodes is far from the scale that the next layers learn at.
        pooled = self.norm(torch.sparse.mm(classes.pool, x))
        joined = torch.cat([pooled, data.vector], dim=1)
        for linear in self.layers:
            joined = F.dropout(F.relu(linear(joined)), DROPOUT, self.training)
        output: Tensor = self.output(joined)
        return output


def nnlqp(size: Size = LAPTOP_SIZE) -> NetworkEstimator:
    return NetworkEstimator(
        name="nnlqp",
        network=lambda width, _nodes: SageNetwork(width, size.width, layers=2, hidden_layers=2),
        vector=_static,
        training=replace(size.training, loss="relative-squared"),
    )


def _static(workloads: Sequence[Workload]) -> FloatArray:
    chosen: FloatArray = np.ascontiguousarray(log_static_features(workloads)[:, _KEPT])
    return chosen
