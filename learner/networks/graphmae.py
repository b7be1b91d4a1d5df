"""GraphMAE: an encoder that learned to guess what nodes are from what stands around them.

Hou et al., "GraphMAE: self-supervised masked graph autoencoders", KDD 2022. Half of the nodes get
one learned row in place of their features; an encoder of GIN layers (Xu et al. 2019) embeds all
nodes; those that were masked are masked again, and a decoder of one GIN layer makes their features
anew. The loss is the scaled cosine error, `(1 - cos)^gamma`, which hardly counts what is easy. The
decoder is then thrown away, as that of the graph autoencoder (`gae`) is.

Nodes that are equal with all that stands before them are computed once (`distinct`), so equal nodes
are masked together: one of them would tell what the other is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch_geometric.data import Batch

from trappm.learner.networks.distinct import (
    Classes,
    Dropout,
    Layer,
    classes_of,
    weighted_batch_norm,
)
from trappm.learner.networks.presets import EncoderPreset
from trappm.profiler.graphs.features import NODE_FEATURES

MASKED_SHARE = 0.5
GAMMA = 2.0
"""Both as in the paper's experiments on whole graphs."""


class GinLayer(nn.Module):
    """Two linear maps of `(1 + eps) own + sum of the predecessors`, batch norm between."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Linear(before, after)
        self.norm = nn.BatchNorm1d(after)
        self.second = nn.Linear(after, after)
        self.eps = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, layer: Layer) -> Tensor:
        """Rows of the classes before (U before, in) to rows of the classes (U, out)."""
        source, target = layer.edges
        own = x.index_select(0, layer.roots)
        gathered = torch.zeros_like(own).index_add(0, target, x.index_select(0, source))
        hidden = self.first((1.0 + self.eps) * own + gathered)
        output: Tensor = self.second(F.relu(weighted_batch_norm(self.norm, hidden, layer.counts)))
        return output


class GinNetwork(nn.Module):
    """GIN layers, each followed by ReLU and dropout: (U, 113) to (U, width), as `gae` has it."""

    def __init__(self, preset: EncoderPreset) -> None:
        super().__init__()
        inputs = (NODE_FEATURES, *preset.widths[:-1])
        self.layers = nn.ModuleList(map(GinLayer, inputs, preset.widths))
        self.dropout = Dropout(preset.dropout)

    def classes(self, batch: Batch) -> Classes:
        return classes_of(batch, len(self.layers))

    def forward(self, classes: Classes) -> Tensor:
        return self.embedded(classes.rows, classes.layers)

    def embedded(self, x: Tensor, layers: tuple[Layer, ...]) -> Tensor:
        """The same of other rows; layers beyond the network's are left out."""
        for gin, layer in zip(self.layers, layers, strict=False):
            x = self.dropout(F.relu(gin(x, layer)))
        return x


class MaskedAutoencoder(nn.Module):
    """The encoder with what it needs to learn."""

    def __init__(self, preset: EncoderPreset) -> None:
        super().__init__()
        width = preset.widths[-1]
        self.encoder = GinNetwork(preset)
        self.bridge = nn.Linear(width, width, bias=False)
        self.decoder = GinLayer(width, NODE_FEATURES)
        self.mask = nn.Parameter(torch.zeros(NODE_FEATURES))
        self.mask_again = nn.Parameter(torch.zeros(width))

    def loss(self, batch: Batch) -> Tensor:
        """The scaled cosine error over the masked nodes of a batch."""
        classes = classes_of(batch, len(self.encoder.layers) + 1)
        *layers, last = classes.layers
        masked = torch.rand(len(classes.rows)) < MASKED_SHARE
        x = torch.where(masked[:, None], self.mask, classes.rows)
        x = self.bridge(self.encoder.embedded(x, tuple(layers)))
        first = torch.arange(len(classes.rows))
        for layer in layers:
            first = first[layer.roots]  # the class at depth 0
        x = torch.where(masked[first][:, None], self.mask_again, x)
        first = first[last.roots]
        weight = last.counts * masked[first]
        cosine = F.cosine_similarity(self.decoder(x, last), classes.rows[first])
        return ((1.0 - cosine) ** GAMMA * weight).sum() / weight.sum().clamp(min=1.0)
