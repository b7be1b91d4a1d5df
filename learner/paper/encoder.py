"""The graph autoencoder of the TraPPM paper: pre-training on graphs without labels.

An encoder of SAGEConv layers computes node embeddings Z so that sigmoid(Z Z^T) predicts the edges
(Kipf and Welling 2016, non-variational graph autoencoder). The encoder is then frozen, and the sum
of a graph's node embeddings is the graph's embedding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch_geometric.data import Batch

from trappm.learner.paper.distinct_nodes import (
    Classes,
    DistinctSAGEConv,
    Dropout,
    classes_of,
    weighted_batch_norm,
)
from trappm.learner.paper.graphs import (
    FloatArray,
    Scaler,
    batches,
    fit_node_scaler,
    to_data,
)
from trappm.learner.paper.presets import EncoderPreset
from trappm.learner.paper.training import torch_seeded, train
from trappm.learner.stats.folds import grouped_folds, layers_hash
from trappm.learner.tensors import with_prefix
from trappm.profiler.errors import InputError
from trappm.profiler.graphs.features import NODE_FEATURES
from trappm.profiler.progress import OnProgress
from trappm.profiler.records import Graph

FORMAT = 3
"""Version of the training, so that cached encoders of older versions are not used."""
HELD_OUT_FOLDS = 10
"""Folds of the architectures (round number); one of them ends the training."""


class EncoderNetwork(nn.Module):
    """SAGEConv layers, each followed by batch norm, ReLU and dropout: (U, 113) to (U, width).

    U is the number of distinct nodes of a batch.
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
    """Frozen encoder with the scale of its inputs."""

    preset: EncoderPreset
    network: EncoderNetwork
    scaler: Scaler

    @property
    def width(self) -> int:
        return self.preset.widths[-1]

    def embed(self, graphs: Sequence[Graph]) -> FloatArray:
        """Return the sum of the node embeddings of each graph (n, width), unscaled."""
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
        """Return everything learned, by name; `from_tensors` is the inverse."""
        state = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        return {**state, **self.scaler.tensors("scaler")}

    @classmethod
    def from_tensors(cls, preset: EncoderPreset, tensors: Mapping[str, Tensor]) -> Self:
        """Return the encoder that `tensors` describes.

        Raises:
            KeyError, RuntimeError: The tensors are not those of this preset.
        """
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
    """Train the autoencoder on graphs and return its frozen encoder.

    A fold of the architectures is held out to end the training.

    Args:
        graphs: Graphs without labels (n).
        preset: Sizes and training settings.
        generator: Source of all randomness.
        on_progress: Called with the number of steps done and the largest number of steps.

    Raises:
        InputError: There are no graphs, or none has an edge.
    """
    rows = [i for i, graph in enumerate(graphs) if graph.edge_count]
    if not rows:
        raise InputError("the encoder learns from edges, and there are no graphs with any")
    scaler = fit_node_scaler(graphs)
    data = [to_data(graphs[i], scaler) for i in rows]
    groups = [layers_hash(graphs[i]) for i in rows]
    held_out = grouped_folds(groups, HELD_OUT_FOLDS, generator) == 0
    with torch_seeded(generator):
        network = EncoderNetwork(preset)

        def loss(batch: Batch) -> Tensor:
            classes = network.classes(batch)
            return reconstruction_loss(network(classes), classes.places, batch)

        train(
            network,
            loss,
            # A single graph is both trained on and judged by.
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


def reconstruction_loss(rows: Tensor, places: Tensor, batch: Batch) -> Tensor:
    """Return the binary cross-entropy of sigmoid(Z Z^T) on all edges and on negative samples.

    Edges between the same distinct nodes are scored once, with one negative pair, weighted by their
    number: the expectation of scoring every edge with a negative pair of its own.

    Args:
        rows: Embeddings of the distinct nodes (U, width).
        places: Distinct node of each node (N).
        batch: Batch of graphs with N nodes.
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
    """Return the decoder's logits of pairs (2, P): entries of Z Z^T, shape (P)."""
    return (nodes.index_select(0, pairs[0]) * nodes.index_select(0, pairs[1])).sum(dim=-1)


def sample_negatives(batch: Batch, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a negative pair in the graph of each chosen edge (C).

    Pairs across graphs would be too easy. A draw that hits an edge is dropped.

    Returns:
        The pairs (2, P), and a mask of the edges that have one (C).
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


def random_encoder(
    graphs: Sequence[Graph], preset: EncoderPreset, generator: np.random.Generator
) -> Encoder:
    """Return an untrained encoder with scaled inputs, the paper's ablation "random encoder"."""
    with torch_seeded(generator):
        network = EncoderNetwork(preset).eval().requires_grad_(False)
    return Encoder(preset, network, fit_node_scaler(graphs))


def make_encoder(
    graphs: Sequence[Graph],
    architectures: Sequence[str],
    preset: EncoderPreset,
    *,
    pretrained: bool,
    seed: int,
    cache: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Encoder:
    """Train an encoder on graphs, or read the one trained before with the same inputs.

    Pre-training uses no labels, so as in the paper it may use graphs whose labels are held out.

    Args:
        graphs: All graphs (n).
        architectures: Architecture of each graph (n).
        preset: Sizes and training settings.
        pretrained: Whether to train it; if not, the encoder is random.
        seed: Seed of everything random.
        cache: Folder of trained encoders.
        on_progress: Called with the number of steps done and the largest number of steps.
    """
    generator = np.random.default_rng(seed)
    if preset.one_batch_size:
        graphs = _one_of_each(graphs, architectures, generator)
    if not pretrained:
        return random_encoder(graphs, preset, generator)
    path = cache / f"encoder-{_name(graphs, preset, seed)}.safetensors"
    try:
        return Encoder.from_tensors(preset, load_file(path))
    except (OSError, SafetensorError, KeyError, RuntimeError):
        encoder = train_encoder(graphs, preset, generator, on_progress)
    cache.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({k: v.contiguous() for k, v in encoder.tensors().items()}, part)
    part.replace(path)
    return encoder


def _one_of_each(
    graphs: Sequence[Graph], architectures: Sequence[str], generator: np.random.Generator
) -> list[Graph]:
    variants: dict[str, dict[Graph, None]] = {}
    for graph, name in zip(graphs, architectures, strict=True):
        variants.setdefault(name, {})[graph] = None
    drawn = (list(variants[name]) for name in sorted(variants))
    return [alike[int(generator.integers(len(alike)))] for alike in drawn]


def _name(graphs: Sequence[Graph], preset: EncoderPreset, seed: int) -> str:
    digest = hashlib.sha256(repr((FORMAT, preset, seed)).encode())
    for graph in graphs:
        digest.update(repr(graph.operators).encode())
        for array in (graph.edges, graph.input_shapes, graph.output_shapes, graph.macs,
                      graph.parameters, graph.memory_bytes):  # fmt: skip
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:32]
