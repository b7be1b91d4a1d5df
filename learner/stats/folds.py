"""Cross-validation groups and folds.

Near-copies must share a fold, or the held-out one leaks its label: batch sizes of an architecture,
architectures with two names (timm's beit and beitv2 differ in their weights only), and variants of
a transformer (`hf:gpt2`, `hf:gpt2,lora=16`).
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from trappm.learner.interface import Array, IntArray, Workload, cache_on_first
from trappm.profiler.models.known_names import model_of
from trappm.profiler.records import Graph, graph_hash


@cache_on_first
def layers_hash(graph: Graph) -> str:
    """Return a hash of operators, edges and parameters: equal at any batch and input size."""
    return graph_hash(graph.operators, graph.edges, graph.parameters[:, None])


def content_groups(architectures: Sequence[str], workloads: Sequence[Workload]) -> list[str]:
    """Return the group of each label (n): the first name of all that are the same model.

    Args:
        architectures: Architecture of each label (n).
        workloads: Workload of each label (n); the first of each architecture is compared.
    """
    workload_of = dict(zip(reversed(architectures), reversed(workloads), strict=True))
    first: dict[str, str] = {}
    group: dict[str, str] = {}
    for name, workload in sorted(workload_of.items(), key=lambda item: item[0]):
        same = first.setdefault(_content(workload) or name, name)
        group[name] = first.setdefault(f"model {model_of(name)}", same)
    return [group[name] for name in architectures]


def _content(workload: Workload) -> str | None:
    """Return a hash of the layers, or of the kernels of a workload without graph."""
    if workload.graph.node_count:
        return layers_hash(workload.graph)
    if workload.kernels is not None:
        table = workload.kernels.table
        arrays = (getattr(table, column.name) for column in fields(table))
        return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    return None


def grouped_folds(groups: Sequence[str], count: int, generator: np.random.Generator) -> IntArray:
    """Return a random fold of each label (n) that divides no architecture.

    Labels of a single architecture are divided, since there is nothing else to hold out.

    Args:
        groups: Architecture of each label (n).
        count: Largest number of folds.
        generator: Draws the folds.
    """
    if not len(groups):
        return np.zeros(0, np.int64)
    names, number = np.unique(np.array(groups), return_inverse=True)
    if len(names) == 1:
        number = np.arange(len(groups))
    order = generator.permutation(int(number.max()) + 1)
    folds: IntArray = (order[number] % min(count, len(order))).astype(np.int64)
    return folds


def cluster_folds(
    points: Array, groups: Sequence[str], count: int, generator: np.random.Generator
) -> IntArray:
    """Return the fold of each label (n): k-means clusters of similar architectures.

    A held-out cluster is far from the remaining labels, as a new family is.

    Args:
        points: Points of the labels (n, c).
        groups: Architecture of each label (n); it lies at the mean of its labels.
        count: Largest number of clusters; fewer where architectures coincide.
        generator: Draws the first centers (k-means++).
    """
    if not len(groups):
        return np.zeros(0, np.int64)
    _, number, labels = np.unique(np.array(groups), return_inverse=True, return_counts=True)
    middles = np.zeros((len(labels), points.shape[1]))
    np.add.at(middles, number, points)
    middles /= labels[:, None]
    count = min(count, len(np.unique(middles, axis=0)))
    if count == 1:
        return np.zeros(len(groups), np.int64)
    from scipy.cluster.vq import kmeans2  # type: ignore[import-untyped]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an empty cluster keeps its center
        _, clusters = kmeans2(middles, count, iter=30, minit="++", seed=generator)
    folds: IntArray = clusters.astype(np.int64)[number]
    return folds


def draw_rows(count: int, most: int) -> IntArray:
    """Return at most `most` sorted rows out of `count`, the same ones at every call.

    They are drawn: evenly spaced rows of sorted labels could all have the same batch size.
    """
    drawn = np.random.default_rng(0).permutation(count)[:most]
    return np.sort(drawn).astype(np.int64)
