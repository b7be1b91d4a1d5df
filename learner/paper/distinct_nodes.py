"""Optional: compute each distinct node of a batch once, which saves most of the arithmetic.

Deep networks repeat their blocks. SAGEConv gives equal rows to nodes with equal features and equal
multisets of predecessors, so after k layers a row depends on the k steps before it (color
refinement: Weisfeiler and Lehman 1968; Bollen et al. 2023, "Learning graph neural networks using
exact compression"). `node_keys` numbers these classes of nodes, and `propagate` computes one row
per class. Only dropout differs in training: the members of a class share its mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from trappm.learner.interface import FloatArray, IntArray
from trappm.profiler.graphs.features import OPERATORS

MAX_DEPTH = 4
"""Layers of the deepest network, the paper's encoder."""

_WORDS = np.random.default_rng(0x7261).integers(1, 2**63, 64, dtype=np.uint64) * 2 + 1


def node_keys(features: FloatArray, edges: IntArray) -> IntArray:
    """Return a number for each node and depth that equal nodes share, (N, MAX_DEPTH + 1).

    Nodes are equal at depth 0 if their features are, and at depth k if they and their predecessors
    are at depth k - 1. The numbers are hashes of 63 bits: among a million different nodes, two
    collide with a probability of one in ten million.

    Args:
        features: Features of the nodes (N, at most 64).
        edges: Producer and consumer (E, 2).
    """
    bits = np.ascontiguousarray(features, dtype=np.float32).view(np.uint32).astype(np.uint64)
    key = _mix((_mix(bits) * _WORDS[: bits.shape[1]]).sum(axis=1, dtype=np.uint64))
    keys = [key]
    for _ in range(MAX_DEPTH):
        before = np.zeros_like(key)
        np.add.at(before, edges[:, 1], _mix(key[edges[:, 0]] ^ _WORDS[0]))
        key = _mix(key * _WORDS[1] + _mix(before))
        keys.append(key)
    return (np.stack(keys, axis=1) >> np.uint64(1)).astype(np.int64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64's finalizer (Steele et al. 2014): each bit depends on all."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class Layer:
    """Map from the classes at the depth before to the U classes at one depth."""

    roots: Tensor
    """Class of the node itself at the depth before (U)."""
    edges: Tensor
    """Edges into one node of each class: class of the predecessor, and its own (2, E)."""
    mean: Tensor
    """Sparse matrix that averages over the predecessors (U, U before)."""
    counts: Tensor
    """Number of nodes of each class (U)."""


@dataclass(frozen=True)
class Classes:
    """Distinct nodes of a batch, from depth 0 to that of a network."""

    rows: Tensor
    """One-hot operator and sizes of each class at depth 0 (U, 113)."""
    layers: tuple[Layer, ...]
    places: Tensor
    """Class of each node at the last depth (N)."""
    pool: Tensor
    """Sparse matrix that sums over the nodes of each graph (graphs, U)."""


def classes_of(batch: Batch, depth: int) -> Classes:
    """Return the distinct nodes of a batch of `to_data` for a network of `depth` layers.

    They are stored in the batch, since a small training set is a single batch.

    Raises:
        ValueError: The depth is above MAX_DEPTH.
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
    rows = one_hot(batch.x[torch.from_numpy(first)])
    layers = []
    for level in range(1, depth + 1):
        before, width = place, len(first)
        _, first, place, counts = np.unique(
            keys[:, level], return_index=True, return_inverse=True, return_counts=True
        )
        chosen = np.zeros(len(keys), dtype=bool)
        chosen[first] = True
        into = chosen[consumers]  # one node represents its class, so only its edges count
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


def one_hot(compact: Tensor) -> Tensor:
    """Return the paper's node features X (N, 113) from operator numbers and sizes (N, 16)."""
    operators = nn.functional.one_hot(compact[:, 0].long(), len(OPERATORS))
    return torch.cat([operators.to(compact.dtype), compact[:, 1:]], dim=1)


def propagate(
    classes: Classes,
    convolutions: nn.ModuleList,
    dropout: nn.Module,
    norms: nn.ModuleList | None = None,
) -> Tensor:
    """Apply SAGEConv layers, each with batch norm (optional), ReLU and dropout, to the classes.

    Returns:
        Rows of the classes at the last depth (U, width).
    """
    x = classes.rows
    for number, (convolution, layer) in enumerate(zip(convolutions, classes.layers, strict=True)):
        x = sage_conv(convolution, x, layer)
        if norms is not None:
            x = weighted_batch_norm(norms[number], x, layer.counts)
        x = dropout(torch.relu(x))
    return x


def sage_conv(convolution: nn.Module, x: Tensor, layer: Layer) -> Tensor:
    """Apply PyG's SAGEConv (mean) to classes: (U before, in) to (U, out).

    Averaging is linear, so both matrices are applied before it, where there are fewer classes.
    """
    of_predecessors = nn.functional.linear(x, convolution.lin_l.weight)  # type: ignore[arg-type, union-attr]
    own = convolution.lin_r(x)  # type: ignore[operator]
    averaged = torch.sparse.mm(layer.mean, of_predecessors)
    result: Tensor = averaged + own.index_select(0, layer.roots) + convolution.lin_l.bias  # type: ignore[union-attr]
    return result


def weighted_batch_norm(norm: nn.Module, x: Tensor, counts: Tensor) -> Tensor:
    """Apply batch norm over nodes to one row per class (U, width) with counts (U)."""
    assert isinstance(norm, nn.BatchNorm1d)  # noqa: S101
    if not norm.training:
        normed: Tensor = norm(x)
        return normed
    total = counts.sum()
    share = (counts / total)[None, :]
    mean = share @ x
    centered = x - mean
    variance = share @ centered.square()
    with torch.no_grad():
        momentum = norm.momentum
        unbiased = variance[0] * (total / (total - 1).clamp(min=1))
        norm.running_mean.lerp_(mean[0], momentum)  # type: ignore[union-attr, arg-type]
        norm.running_var.lerp_(unbiased, momentum)  # type: ignore[union-attr, arg-type]
        norm.num_batches_tracked += 1  # type: ignore[operator, assignment]
    return centered * (norm.weight * (variance + norm.eps).rsqrt()) + norm.bias


def _sparse(
    rows: IntArray, columns: IntArray, values: npt.NDArray[Any], shape: tuple[int, int]
) -> Tensor:
    """Return a sparse matrix; entries in the same place add up."""
    places = torch.from_numpy(np.stack([rows, columns]))
    entries = torch.from_numpy(values.astype(np.float32))
    return torch.sparse_coo_tensor(places, entries, shape, check_invariants=False).coalesce()
