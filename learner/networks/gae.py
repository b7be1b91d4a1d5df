"""The graph autoencoder: it learns what computation graphs look like, from graphs without labels.

TraPPM, "pre-training": an encoder of SAGEConv layers embeds the nodes of a graph so that the inner
product of two embeddings tells whether an edge joins the nodes (Kipf and Welling 2016, the
non-variational graph autoencoder). The decoder is then thrown away, the encoder frozen, and the
sum of a graph's node embeddings is the embedding of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch_geometric.data import Batch

from trappm.learner.networks.dataset import (
    FloatArray,
    Scaler,
    batches,
    fit_node_scaler,
    to_data,
)
from trappm.learner.networks.distinct import (
    Classes,
    DistinctSAGEConv,
    Dropout,
    classes_of,
    weighted_batch_norm,
)
from trappm.learner.networks.presets import EncoderPreset
from trappm.learner.networks.randomness import torch_seeded
from trappm.learner.networks.training import train
from trappm.learner.stats.folds import grouped_folds, layers_hash
from trappm.learner.tensors import with_prefix
from trappm.profiler.errors import InputError
from trappm.profiler.graphs.features import NODE_FEATURES
from trappm.profiler.progress import OnProgress
from trappm.profiler.records import Graph

HELD_OUT_FOLDS = 10
"""Of the architectures; one of them tells when training is over. A round number."""


class EncoderNetwork(nn.Module):
    """SAGEConv layers, each followed by batch norm, ReLU and dropout: (U, 113) to (U, width).

    It computes one row for each of the U distinct nodes of a batch.
    """

    def __init__(self, preset: EncoderPreset) -> None:
        super().__init__()
        inputs = (NODE_FEATURES, *preset.widths[:-1])
        self.convolutions = nn.ModuleList(
            DistinctSAGEConv(before, after)
            for before, after in zip(inputs, preset.widths, strict=True)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in preset.widths)
        self.dropout = Dropout(preset.dropout)

    def classes(self, batch: Batch) -> Classes:
        return classes_of(batch, len(self.convolutions))

    def forward(self, classes: Classes) -> Tensor:
        x = classes.rows
        for convolution, norm, layer in zip(
            self.convolutions, self.norms, classes.layers, strict=True
        ):
            x = weighted_batch_norm(norm, convolution(x, layer), layer.counts)
            x = self.dropout(F.relu(x))
        return x


@dataclass(frozen=True, eq=False)
class Encoder:
    """A trained, frozen encoder with the scale of its inputs."""

    preset: EncoderPreset
    network: EncoderNetwork
    scaler: Scaler

    @property
    def width(self) -> int:
        return self.preset.widths[-1]

    def embed(self, graphs: Sequence[Graph]) -> FloatArray:
        """The sum of the node embeddings of each graph (n, width).

        The sum grows with the graph, as in the paper; scale it over the data set before measuring
        distances.
        """
        rows = [np.zeros((0, self.width), dtype=np.float32)]
        with torch.no_grad():
            # A few graphs at a time: the features of a whole pool would not fit into memory.
            for start in range(0, len(graphs), 256):
                data = [to_data(graph, self.scaler) for graph in graphs[start : start + 256]]
                for batch in batches(data, self.preset.batch_nodes, range(len(data))):
                    classes = self.network.classes(batch)
                    rows.append(torch.sparse.mm(classes.pool, self.network(classes)).numpy())
        return np.concatenate(rows)

    def tensors(self) -> dict[str, Tensor]:
        """Everything learned, by name; `from_tensors` is the inverse."""
        state = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        return {**state, **self.scaler.tensors("scaler")}

    @classmethod
    def from_tensors(cls, preset: EncoderPreset, tensors: Mapping[str, Tensor]) -> Self:
        """Raises KeyError or RuntimeError for tensors that are not those of this preset."""
        with torch.device("meta"):  # no memory for weights that are replaced at once
            network = EncoderNetwork(preset)
        network.load_state_dict(with_prefix(tensors, "network."), assign=True)
        return cls(
            preset, network.eval().requires_grad_(False), Scaler.from_tensors(tensors, "scaler")
        )


def train_encoder(
    graphs: Sequence[Graph],
    preset: EncoderPreset,
    generator: np.random.Generator,
    on_progress: OnProgress = lambda done, total: None,
) -> Encoder:
    """Trains the autoencoder on these graphs and returns its frozen encoder.

    A fold of the architectures is held out, to see when training is over.

    Args:
        graphs: without labels (n).
        preset: its sizes and training.
        generator: all randomness comes from it.
        on_progress: called with steps done and steps at most.

    Raises:
        InputError: there are no graphs, or none has an edge.
    """
    rows = [i for i, graph in enumerate(graphs) if graph.edge_count]
    if not rows:
        raise InputError("the encoder learns from edges, and there are no graphs with any")
    scaler = fit_node_scaler(graphs)
    data = [to_data(graphs[i], scaler) for i in rows]
    groups = [layers_hash(graphs[i]) for i in rows]
    held_out = grouped_folds(groups, HELD_OUT_FOLDS, generator) == 0
    with torch_seeded(generator):
        network, loss = _learner(preset)
        train(
            network,
            loss,
            # A single graph has none beside it to be judged by.
            [d for d, out in zip(data, held_out, strict=True) if not out or len(data) == 1],
            [d for d, out in zip(data, held_out, strict=True) if out],
            steps=preset.steps,
            learning_rate=preset.learning_rate,
            weight_decay=0.0,
            batch_nodes=preset.batch_nodes,
            generator=generator,
            on_step=on_progress,
        )
    return Encoder(preset, network, scaler)


def _learner(preset: EncoderPreset) -> tuple[EncoderNetwork, Callable[[Batch], Tensor]]:
    """Return an untrained encoder and the loss of a batch."""
    network = EncoderNetwork(preset)

    def loss(batch: Batch) -> Tensor:
        classes = network.classes(batch)
        return reconstruction_loss(network(classes), classes.places, batch)

    return network, loss


def reconstruction_loss(rows: Tensor, places: Tensor, batch: Batch) -> Tensor:
    """Binary cross-entropy of sigmoid(Z Z^T) on all edges and on pairs that are no edges.

    Edges between the same distinct nodes are scored once, together with one pair drawn in the
    graph of the first of them, and count as often as they are: with the graphs in random order, the
    expectation of scoring every edge beside a pair of its own.

    Args:
        rows: embeddings of the distinct nodes (U, width).
        places: which of them each node is (N).
        batch: of graphs with N nodes.
    """
    edges = batch.edge_index
    producers, consumers = places[edges].numpy()
    _, first, count = np.unique(
        producers * len(rows) + consumers, return_index=True, return_counts=True
    )
    chosen = torch.from_numpy(first)
    weight = torch.from_numpy(count.astype(np.float32))
    loss = (F.softplus(-edge_scores(rows, places[edges[:, chosen]])) * weight).sum() / weight.sum()
    negative, kept = sample_negatives(batch, chosen)
    if not kept.any():
        return loss
    weight = weight[kept]
    scores = edge_scores(rows, places[negative])
    return loss + (F.softplus(scores) * weight).sum() / weight.sum()


def edge_scores(nodes: Tensor, pairs: Tensor) -> Tensor:
    """The logits of the decoder for these pairs (2, P): entries of Z Z^T, shape (P)."""
    return (nodes.index_select(0, pairs[0]) * nodes.index_select(0, pairs[1])).sum(dim=-1)


def sample_negatives(batch: Batch, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """For most of the chosen edges (C), a pair of distinct nodes of its graph that no edge joins.

    Pairs across graphs would be told apart by batch size alone. A draw that hits an edge, in
    either direction, is dropped rather than drawn again.

    Returns:
        The pairs (2, P), and which of the chosen edges have one (C).
    """
    edges = batch.edge_index
    source = edges[0, chosen]
    graph = batch.batch[source]
    first, size = batch.ptr[graph], (batch.ptr[1:] - batch.ptr[:-1])[graph]
    target = first + (torch.rand(len(source)) * size).long().clamp(max=size - 1)
    count = int(batch.num_nodes)
    taken = torch.cat([edges[0] * count + edges[1], edges[1] * count + edges[0]])
    keep = (source != target) & ~torch.isin(source * count + target, taken)
    return torch.stack([source[keep], target[keep]]), keep
