"""Published graph networks, with the same training as all baselines.

NNLQP: GraphSAGE over operators, four static features, and a relative squared error.

Liu et al., "NNLQP: a multi-platform neural network latency query and prediction system with an
evolving database", ICPP 2022, sections 4 and 5: two SAGE layers of 512, sum pooling, joined with
batch size, FLOPs, parameters and memory access, fully connected layers, a head for each platform
(here: a model for each device and metric), and the loss mse(prediction / truth, 1). Its node
features are operator, attributes and output shape; attributes of operators, such as kernel sizes,
enter here through the MACs and parameters that follow from them.

DIPPM: three GraphSAGE layers and five static features, with Huber's loss.

Panner Selvam and Brorsson, "DIPPM: a deep learning inference performance predictive model using
graph neural networks", Euro-Par 2023, section 3: SAGE layers of 512, pooled, joined with MACs,
batch size and the numbers of convolutions, dense layers and ReLUs, three fully connected layers,
dropout 0.05, Huber's loss. Its 500 epochs at a step size of 2.8e-5 are replaced by the training
that all baselines get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch_geometric.data import Batch
from torch_geometric.nn import SAGEConv

from trappm.learner.interface import FloatArray, Workload
from trappm.learner.paper.distinct_nodes import classes_of, propagate
from trappm.learner.paper.graphs import log_static_features
from trappm.learner.paper.presets import LAPTOP, PAPER, Training
from trappm.learner.paper.regressor import Regressor
from trappm.profiler.graphs.features import NODE_FEATURES, STATIC_FEATURES


@dataclass(frozen=True, kw_only=True)
class NetworkSize:
    """Width of every hidden layer, and the training settings of all baselines of this size."""

    width: int
    training: Training


LAPTOP_SIZE = NetworkSize(width=64, training=replace(LAPTOP.head, weight_decay=1e-4))
PAPER_SIZE = NetworkSize(width=512, training=PAPER.head)
SIZES = {"laptop": LAPTOP_SIZE, "paper": PAPER_SIZE}
DROPOUT = 0.05
NNLQP_FEATURES = ("batch_size", "macs", "parameters", "memory_bytes")
DIPPM_OPERATORS = (("Conv", "ConvTranspose"), ("Gemm", "MatMul"), ("Relu",))


class SageNetwork(nn.Module):
    """SAGE layers, a sum over nodes, joined with the vector, fully connected layers, one output."""

    def __init__(self, vector_width: int, width: int, layers: int, hidden_layers: int) -> None:
        super().__init__()
        inputs = (NODE_FEATURES, *[width] * (layers - 1))
        self.convolutions = nn.ModuleList(SAGEConv(before, width) for before in inputs)
        self.norm = nn.LayerNorm(width)
        hidden = (width + vector_width, *[width] * (hidden_layers - 1))
        self.layers = nn.ModuleList(nn.Linear(before, width) for before in hidden)
        self.output = nn.Linear(width, 1)

    def forward(self, data: Batch) -> Tensor:
        """Return outputs, shape (graphs, 1), for a batch with nodes and `vector`."""
        classes = classes_of(data, len(self.convolutions))
        x = propagate(classes, self.convolutions, nn.Dropout(DROPOUT).train(self.training))
        # A sum over hundreds of nodes is far from the scale that the next layers learn at.
        pooled = self.norm(torch.sparse.mm(classes.pool, x))
        joined = torch.cat([pooled, data.vector], dim=1)
        for linear in self.layers:
            joined = F.dropout(F.relu(linear(joined)), DROPOUT, self.training)
        output: Tensor = self.output(joined)
        return output


def nnlqp(size: NetworkSize = LAPTOP_SIZE) -> Regressor:
    columns = [STATIC_FEATURES.index(name) for name in NNLQP_FEATURES]

    def vector(workloads: Sequence[Workload]) -> FloatArray:
        chosen: FloatArray = np.ascontiguousarray(log_static_features(workloads)[:, columns])
        return chosen

    return Regressor(
        name="nnlqp",
        network=lambda width, _nodes: SageNetwork(width, size.width, layers=2, hidden_layers=2),
        vector=vector,
        training=replace(size.training, loss="relative-squared"),
    )


def dippm(size: NetworkSize = LAPTOP_SIZE) -> Regressor:
    return Regressor(
        name="dippm",
        network=lambda width, _nodes: SageNetwork(width, size.width, layers=3, hidden_layers=3),
        vector=_dippm_vector,
        training=replace(size.training, loss="huber-log"),
    )


def _dippm_vector(workloads: Sequence[Workload]) -> FloatArray:
    """Return logarithms of MACs, batch size and counts of 3 kinds of operators, shape (n, 5)."""
    rows = [
        (
            graph.macs.sum(),
            graph.batch_size,
            *(sum(operator in kinds for operator in graph.operators) for kinds in DIPPM_OPERATORS),
        )
        for graph in (workload.graph for workload in workloads)
    ]
    return np.log1p(np.array(rows, dtype=np.float64).reshape(len(workloads), 5)).astype(np.float32)
