"""Each different node of a batch once: what saves most of the arithmetic of our graph networks.

Deep networks repeat their blocks, and families share theirs. A SAGEConv layer gives the same row to
nodes of the same features and the same multiset of predecessors, so after k layers a node's row
follows from what stands at most k steps before it (colour refinement: Weisfeiler and Lehman 1968;
Bollen et al. 2023, "Learning graph neural networks using exact compression", use it to train).
`node_keys` numbers these classes, the same in every graph, and a layer computes one row for each
class in a batch. Of a frozen network that is exact. In training it is too, but for dropout, whose
mask the members of a class share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from trappm.profiler.graphs.features import OPERATORS

IntArray = npt.NDArray[np.int64]

MAX_DEPTH = 4
"""Layers of the deepest network, the paper's encoder."""

_WORDS = np.random.default_rng(0x7261).integers(1, 2**63, 64, dtype=np.uint64) * 2 + 1


def node_keys(features: npt.NDArray[np.float32], edges: IntArray) -> IntArray:
    """For each node and depth 0 to MAX_DEPTH, a number that equal nodes share (N, MAX_DEPTH + 1).

    Nodes are equal at depth 0 if their features are, and at the next depth if they and their
    predecessors are at this one. The numbers are hashes of 63 bits: two different nodes of a
    million have the same one with a probability of one in ten million.

    Args:
        features: rows of equal length (N, at most 64).
        edges: producer and consumer (E, 2).
    """
    bits = np.ascontiguousarray(features, dtype=np.float32).view(np.uint32).astype(np.uint64)
    key = _mixed((_mixed(bits) * _WORDS[: bits.shape[1]]).sum(axis=1, dtype=np.uint64))
    keys = [key]
    for _ in range(MAX_DEPTH):
        before = np.zeros_like(key)
        np.add.at(before, edges[:, 1], _mixed(key[edges[:, 0]] ^ _WORDS[0]))
        key = _mixed(key * _WORDS[1] + _mixed(before))
        keys.append(key)
    return (np.stack(keys, axis=1) >> np.uint64(1)).astype(np.int64)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele et al. 2014): each bit depends on all."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class Layer:
    """How the classes at one depth follow from those at the depth before."""

    roots: Tensor
    """The class of the node itself, at the depth before (U)."""
    edges: Tensor
    """Of one node of each class: the predecessor's class before, and its own (2, E)."""
    mean: Tensor
    """Sparse: averages the classes of the predecessors (U, U before)."""
    counts: Tensor
    """Nodes that each class stands for (U)."""


@dataclass(frozen=True)
class Classes:
    """The distinct nodes of a batch, from depth 0 to that of a network."""

    rows: Tensor
    """One-hot operator and sizes of each class at depth 0 (U, 113)."""
    layers: tuple[Layer, ...]
    places: Tensor
    """The class of every node at the last depth (N)."""
    pool: Tensor
    """Sparse: sums over the nodes of each graph (graphs, U)."""


def classes_of(batch: Batch, depth: int) -> Classes:
    """The distinct nodes of a batch of `to_data` for a network of so many layers.

    They are kept as long as the batch, which small training sets are one of.

    Raises:
        ValueError: the depth is above MAX_DEPTH.
    """
    if not 0 <= depth <= MAX_DEPTH:
        raise ValueError(f"keys reach to depth {MAX_DEPTH}, not {depth}")
    if "classes_by_depth" not in batch:
        batch.classes_by_depth = {}
    by_depth: dict[int, Classes] = batch.classes_by_depth
    if depth not in by_depth:
        by_depth[depth] = _classes_of(batch, depth)
    return by_depth[depth]


def _classes_of(batch: Batch, depth: int) -> Classes:
    keys = batch.keys_by_depth.numpy()
    producers, consumers = batch.edge_index.numpy()
    _, first, place = np.unique(keys[:, 0], return_index=True, return_inverse=True)
    rows = expanded(batch.x[torch.from_numpy(first)])
    layers = []
    for level in range(1, depth + 1):
        before, width = place, len(first)
        _, first, place, counts = np.unique(
            keys[:, level], return_index=True, return_inverse=True, return_counts=True
        )
        chosen = np.zeros(len(keys), dtype=bool)
        chosen[first] = True
        into = chosen[consumers]  # one node stands for its class, so only its edges count
        target = place[consumers[into]]
        source = before[producers[into]]
        degree = np.bincount(target, minlength=len(first))
        layers.append(
            Layer(
                roots=torch.from_numpy(before[first]),
                edges=torch.from_numpy(np.stack([source, target])),
                mean=_sparse(target, source, 1 / degree[target], (len(first), width)),
                counts=torch.from_numpy(counts.astype(np.float32)),
            )
        )
    graph = batch.batch.numpy()
    pool = _sparse(graph, place, np.ones(len(graph)), (batch.num_graphs, len(first)))
    return Classes(rows, tuple(layers), torch.from_numpy(place), pool)


def expanded(compact: Tensor) -> Tensor:
    """Rows of operator number and sizes (U, 16) as the paper's one-hot and sizes (U, 113)."""
    one_hot = torch.nn.functional.one_hot(compact[:, 0].long(), len(OPERATORS))
    return torch.cat([one_hot.to(compact.dtype), compact[:, 1:]], dim=1)


class DistinctSAGEConv(nn.Module):
    """PyG's SAGEConv (mean), with its weights by name, over classes of nodes.

    Since averaging is linear, both matrices are applied before it, where classes are fewer.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.lin_l = nn.Linear(in_channels, out_channels)
        self.lin_r = nn.Linear(in_channels, out_channels, bias=False)

    def forward(self, x: Tensor, layer: Layer) -> Tensor:
        """Rows of the classes before (U before, in) to rows of the classes (U, out)."""
        from_predecessors = nn.functional.linear(x, self.lin_l.weight)
        own: Tensor = self.lin_r(x)
        averaged = torch.sparse.mm(layer.mean, from_predecessors)
        result: Tensor = averaged + own.index_select(0, layer.roots) + self.lin_l.bias
        return result


class Dropout(nn.Module):
    """Dropout whose mask comes from NumPy's generator, several times as fast as torch's on CPUs.

    It follows from torch's seed, and the share is rounded to 1/256.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        dropped = round(256 * self.p)
        if not self.training or not dropped:
            return x
        generator = np.random.default_rng(int(torch.randint(2**62, ())))
        draws = torch.from_numpy(generator.integers(0, 256, x.shape, dtype=np.uint8))
        return x * (draws >= dropped).to(x.dtype).mul_(256 / (256 - dropped))


def weighted_batch_norm(norm: nn.Module, x: Tensor, counts: Tensor) -> Tensor:
    """Batch norm over nodes, given one row for each class of them (U, width) and counts (U)."""
    assert isinstance(norm, nn.BatchNorm1d)  # noqa: S101
    if not norm.training:
        normed: Tensor = norm(x)
        return normed
    total = counts.sum()
    share = (counts / total)[None, :]
    mean = share @ x
    centred = x - mean
    variance = share @ centred.square()
    with torch.no_grad():
        momentum = norm.momentum
        unbiased = variance[0] * (total / (total - 1).clamp(min=1))
        norm.running_mean.lerp_(mean[0], momentum)  # type: ignore[union-attr, arg-type]
        norm.running_var.lerp_(unbiased, momentum)  # type: ignore[union-attr, arg-type]
        norm.num_batches_tracked += 1  # type: ignore[operator, assignment]
    return centred * (norm.weight * (variance + norm.eps).rsqrt()) + norm.bias


def _sparse(
    rows: IntArray, columns: IntArray, values: npt.NDArray[Any], shape: tuple[int, int]
) -> Tensor:
    """A sparse matrix; entries in the same place add up."""
    places = torch.from_numpy(np.stack([rows, columns]))
    entries = torch.from_numpy(values.astype(np.float32))
    return torch.sparse_coo_tensor(places, entries, shape, check_invariants=False).coalesce()
