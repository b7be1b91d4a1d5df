"""DNNPerf: attention over predecessors, with features of edges that are learned along.

Gao et al., "Runtime performance prediction for deep learning models with graph neural network",
ICSE-SEIP 2023, the section on the attention-based node-edge encoder (ANEE). In each layer

    e'_uv = ReLU(W_e [h_u, e_uv, h_v])          an edge sees both of its ends
    a_uv  = softmax over u of LeakyReLU(w [h_u, e'_uv, h_v])
    h'_v  = ReLU(W_s h_v + sum over u of a_uv W_n [h_u, e'_uv])

then nodes are summed and fully connected layers follow. An edge starts as the size of the tensor
that it carries, which its producer's row has. The code is not public: widths and the form of the
attention follow the paper's description, and the features are those of all baselines here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch_geometric.data import Batch
from torch_geometric.utils import scatter, softmax

from research.peers.sizes import LAPTOP_SIZE, Size
from trappm.learner.paper.distinct_nodes import Layer, classes_of
from trappm.learner.paper.graphs import log_static_features
from trappm.learner.paper.regressor import NetworkEstimator
from trappm.profiler.graphs.features import NODE_FEATURES, OPERATORS
from trappm.profiler.records import SHAPE_LENGTH

LAYERS = 3
_OUTPUT_SHAPE = slice(len(OPERATORS) + SHAPE_LENGTH, len(OPERATORS) + 2 * SHAPE_LENGTH)


class NodeEdgeLayer(nn.Module):
    """One layer of the node-edge encoder, over the distinct nodes of a batch."""

    def __init__(self, node_width: int, edge_width: int, width: int) -> None:
        super().__init__()
        self.edge = nn.Linear(2 * node_width + edge_width, width)
        self.attention = nn.Linear(2 * node_width + width, 1)
        self.neighbour = nn.Linear(node_width + width, width)
        self.own = nn.Linear(node_width, width)

    def forward(self, x: Tensor, carried: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        """Rows of classes and of edges (U before, w), (E, v) to those after the layer."""
        source, target = layer.edges
        own = x[layer.roots]
        producer, consumer = x[source], own[target]
        edge = F.relu(self.edge(torch.cat([producer, carried, consumer], dim=1)))
        score = F.leaky_relu(self.attention(torch.cat([producer, edge, consumer], dim=1)))
        weight = softmax(score, target, num_nodes=len(own))
        message = weight * self.neighbour(torch.cat([producer, edge], dim=1))
        gathered = scatter(message, target, dim=0, dim_size=len(own), reduce="sum")
        return F.relu(self.own(own) + gathered), edge


class DnnPerfNetwork(nn.Module):
    """Node-edge layers, a sum over nodes, joined with the vector, two fully connected layers."""

    def __init__(self, vector_width: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            NodeEdgeLayer(NODE_FEATURES if i == 0 else width, SHAPE_LENGTH, width)
            for i in range(LAYERS)
        )
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Sequential(
            nn.Linear(width + vector_width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.output = nn.Linear(width, 1)

    def forward(self, data: Batch) -> Tensor:
        """(graphs, 1) for a batch with nodes and `vector`."""
        classes = classes_of(data, LAYERS)
        x, tensors = classes.rows, classes.rows[:, _OUTPUT_SHAPE]
        for layer, connection in zip(self.layers, classes.layers, strict=True):
            # An edge of a class may split at the next depth, so what it carries is read anew.
            x, _ = layer(x, tensors[connection.edges[0]], connection)
            tensors = tensors[connection.roots]
        pooled = self.norm(torch.sparse.mm(classes.pool, x))
        output: Tensor = self.output(self.hidden(torch.cat([pooled, data.vector], dim=1)))
        return output


def dnnperf(size: Size = LAPTOP_SIZE) -> NetworkEstimator:
    return NetworkEstimator(
        name="dnnperf",
        network=lambda width, _nodes: DnnPerfNetwork(width, size.width),
        vector=log_static_features,
        training=size.training,
    )
