"""The graph autoencoder of the TraPPM paper: pre-training on graphs without labels.

Notation:

    X     node features (N, 113): one-hot operator, shapes, MACs, parameters, memory
    A     adjacency matrix (N, N), given as edges (2, E) from producer to consumer
    Z     node embeddings (N, 512): Z = encoder(X, A)
    A'    reconstruction sigmoid(Z Z^T) (N, N); the loss is its binary cross-entropy on edges and on
          as many negative pairs (Kipf and Welling 2016, non-variational graph autoencoder)

The encoder is then frozen, and a graph's embedding is the sum of the rows of Z.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch_geometric.data import Batch
from torch_geometric.nn import SAGEConv, global_add_pool

from trappm.learner.interface import FloatArray, with_prefix
from trappm.learner.paper.distinct_nodes import classes_of, one_hot, propagate
from trappm.learner.paper.graphs import Scaler, batches, fit_node_scaler, to_data
from trappm.learner.paper.presets import EncoderPreset
from trappm.learner.paper.training import seed_torch, train
from trappm.learner.stats.folds import grouped_folds, layers_hash
from trappm.profiler.errors import InputError
from trappm.profiler.graphs.features import NODE_FEATURES
from trappm.profiler.records import Graph, OnProgress

FORMAT = 4
"""Version of the training, so that cached encoders of older versions are not used."""
HELD_OUT_FOLDS = 10
"""Folds of the architectures (round number); one of them ends the training."""


class EncoderNetwork(nn.Module):
    """SAGEConv layers, each followed by batch norm, ReLU and dropout."""

    def __init__(self, preset: EncoderPreset) -> None:
        super().__init__()
        inputs = (NODE_FEATURES, *preset.widths[:-1])
        self.convolutions = nn.ModuleList(map(SAGEConv, inputs, preset.widths))
        self.norms = nn.ModuleList(map(nn.BatchNorm1d, preset.widths))
        self.dropout = nn.Dropout(preset.dropout)
        self.distinct = preset.distinct

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return Z (N, width) for X (N, 113) and edges (2, E)."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = self.dropout(F.relu(norm(convolution(x, edge_index))))
        return x

    def nodes(self, batch: Batch) -> Tensor:
        """Return Z (N, width) of a batch of `to_data`."""
        if not self.distinct:
            return self.forward(one_hot(batch.x), batch.edge_index)
        classes = classes_of(batch, len(self.convolutions))
        return propagate(classes, self.convolutions, self.dropout, self.norms)[classes.places]


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
            # A few graphs at a time: the features of a whole pool do not fit into memory.
            for start in range(0, len(graphs), 256):
                data = [to_data(graph, self.scaler) for graph in graphs[start : start + 256]]
                rows += [
                    global_add_pool(self.network.nodes(batch), batch.batch).numpy()
                    for batch in batches(data, self.preset.batch_nodes, range(len(data)))
                ]
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
    connected = [graph for graph in graphs if graph.edge_count]
    if not connected:
        raise InputError("the encoder learns from edges, and there are no graphs with any")
    scaler = fit_node_scaler(graphs)
    data = [to_data(graph, scaler) for graph in connected]
    held_out = grouped_folds([layers_hash(g) for g in connected], HELD_OUT_FOLDS, generator) == 0
    with seed_torch(generator):
        network = EncoderNetwork(preset)
        train(
            network,
            lambda batch: reconstruction_loss(network.nodes(batch), batch),
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


def reconstruction_loss(z: Tensor, batch: Batch) -> Tensor:
    """Return the binary cross-entropy of A' = sigmoid(Z Z^T) on edges and on negative pairs.

    Args:
        z: Node embeddings Z (N, width).
        batch: Batch of graphs with N nodes.
    """
    edges = F.softplus(-edge_logits(z, batch.edge_index)).mean()
    negative = sample_negatives(batch)
    return edges + F.softplus(edge_logits(z, negative)).mean() if negative.shape[1] else edges


def edge_logits(z: Tensor, pairs: Tensor) -> Tensor:
    """Return the entries of Z Z^T for pairs of nodes (2, P), shape (P)."""
    return (z.index_select(0, pairs[0]) * z.index_select(0, pairs[1])).sum(dim=-1)


def sample_negatives(batch: Batch) -> Tensor:
    """Draw one pair (2, at most E) for the producer of each edge that no edge joins.

    Both nodes are in one graph, since pairs across graphs are too easy. A draw that hits an
    edge is dropped.
    """
    source, target = batch.edge_index
    graph = batch.batch[source]
    first, size = batch.ptr[graph], (batch.ptr[1:] - batch.ptr[:-1])[graph]
    drawn = first + (torch.rand(len(source)) * size).long().clamp(max=size - 1)
    n = int(batch.num_nodes)
    taken = torch.cat([source * n + target, target * n + source])
    keep = (source != drawn) & ~torch.isin(source * n + drawn, taken)
    return torch.stack([source[keep], drawn[keep]])


def random_encoder(
    graphs: Sequence[Graph], preset: EncoderPreset, generator: np.random.Generator
) -> Encoder:
    """Return an untrained encoder with scaled inputs, the paper's ablation "random encoder"."""
    with seed_torch(generator):
        network = EncoderNetwork(preset).eval().requires_grad_(False)
    return Encoder(preset, network, fit_node_scaler(graphs))


class EncoderCache(Protocol):
    """Place that keeps files of trained encoders by name, such as a registry."""

    def read_file(self, name: str) -> bytes | None: ...

    def cache(self, name: str, data: bytes) -> None: ...


def make_encoder(
    graphs: Sequence[Graph],
    architectures: Sequence[str],
    preset: EncoderPreset,
    *,
    pretrained: bool,
    seed: int,
    cache: EncoderCache,
    on_progress: OnProgress = lambda done, total: None,
) -> Encoder:
    """Train an encoder on graphs, or read the one trained before with the same inputs.

    Pre-training uses no labels, so as in the paper it may use graphs whose labels are held out.

    Args:
        graphs, architectures: All graphs, and the architecture of each (n).
        preset, seed: Sizes and training settings; seed of everything random.
        pretrained: Whether to train it; if not, the encoder is random.
        cache: Trained encoders; one that is damaged is trained again and replaced.
        on_progress: Called with the number of steps done and the largest number of steps.
    """
    generator = np.random.default_rng(seed)
    if preset.one_batch_size:
        graphs = _one_of_each(graphs, architectures, generator)
    if not pretrained:
        return random_encoder(graphs, preset, generator)
    name = f"encoder-{_key(graphs, preset, seed)}.safetensors"
    if (data := cache.read_file(name)) is not None:
        with contextlib.suppress(SafetensorError, KeyError, RuntimeError, ValueError):
            return Encoder.from_tensors(preset, load(data))
    encoder = train_encoder(graphs, preset, generator, on_progress)
    cache.cache(name, save({k: v.contiguous() for k, v in encoder.tensors().items()}))
    return encoder


def _one_of_each(
    graphs: Sequence[Graph], architectures: Sequence[str], generator: np.random.Generator
) -> list[Graph]:
    """Draw one graph of each architecture."""
    variants: dict[str, dict[Graph, None]] = {}
    for graph, name in zip(graphs, architectures, strict=True):
        variants.setdefault(name, {})[graph] = None
    drawn = (list(variants[name]) for name in sorted(variants))
    return [own[int(generator.integers(len(own)))] for own in drawn]


def _key(graphs: Sequence[Graph], preset: EncoderPreset, seed: int) -> str:
    digest = hashlib.sha256(repr((FORMAT, preset, seed)).encode())
    for graph in graphs:
        digest.update(repr(graph.operators).encode())
        for array in (graph.edges, graph.input_shapes, graph.output_shapes, graph.macs,
                      graph.parameters, graph.memory_bytes):  # fmt: skip
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:32]
