"""The regressor of the TraPPM paper: the network inside each head.

SAGEConv layers over the nodes, sum pool, the pooled vector joined with the frozen encoder's
embedding and the static features, fully connected layers, a linear output. It predicts a logarithm,
in units of a scale that the caller keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch_geometric.data import Batch

from trappm.learner.networks.distinct import DistinctSAGEConv, Dropout, classes_of
from trappm.learner.networks.presets import HeadPreset
from trappm.profiler.graphs.features import NODE_FEATURES


class HeadNetwork(nn.Module):
    """One output; the vector of a graph is its embedding and static features."""

    mean_nodes: Tensor

    def __init__(self, preset: HeadPreset, vector_width: int, mean_nodes: float = 1.0) -> None:
        super().__init__()
        inputs = (NODE_FEATURES, *preset.widths[:-1])
        self.convolutions = nn.ModuleList(
            DistinctSAGEConv(before, after)
            for before, after in zip(inputs, preset.widths, strict=True)
        )
        self.joined_width = preset.widths[-1] + vector_width
        before_layers = (self.joined_width, *preset.hidden[:-1])
        self.layers = nn.ModuleList(
            nn.Linear(before, after)
            for before, after in zip(before_layers, preset.hidden, strict=True)
        )
        self.output = nn.Linear(preset.hidden[-1], 1)
        # The network starts as "nothing to add".
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        self.dropout = Dropout(preset.dropout)
        self.register_buffer("mean_nodes", torch.tensor(mean_nodes))

    def forward(self, data: Batch) -> Tensor:
        """(graphs, 1) for a batch of `learner.networks.dataset.to_data` with vectors."""
        classes = classes_of(data, len(self.convolutions))
        x = classes.rows
        for convolution, layer in zip(self.convolutions, classes.layers, strict=True):
            x = self.dropout(F.relu(convolution(x, layer)))
        # A sum, as in the paper; the constant divisor only brings its magnitude near one.
        pooled = torch.sparse.mm(classes.pool, x) / self.mean_nodes
        joined = torch.cat([pooled, data.vector], dim=1)
        for linear in self.layers:
            joined = self.dropout(F.relu(linear(joined)))
        output: Tensor = self.output(joined)
        return output
