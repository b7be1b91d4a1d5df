"""What is held out together, and folds that never divide it.

Batch sizes of an architecture are near-copies of each other, some architectures have two names
(timm's beit and beitv2 differ in how weights were trained), and a transformer has one for each way
to train it (`hf:gpt2`, `hf:gpt2,lora=16`): who holds one of them out and learns from the other has
held nothing out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from trappm.learner.workload import Workload
from trappm.profiler.models.known_names import model_of
from trappm.profiler.records import Graph
from trappm.profiler.records.graph import graph_hash

CLUSTER_STEPS = 30
"""Of k-means: a round number, with which it has come to rest."""

_HASHES: WeakKeyDictionary[Graph, str] = WeakKeyDictionary()


def layers_hash(graph: Graph) -> str:
    """Equal for graphs of the same layers, at whatever batch and input size.

    It goes by operators, edges and weights. Strides and padding stay out: what differs in these
    alone is a near-copy, too.
    """
    if graph not in _HASHES:
        _HASHES[graph] = graph_hash(graph.operators, graph.edges, graph.parameters[:, None])
    return _HASHES[graph]


def content_groups(architectures: Sequence[str], workloads: Sequence[Workload]) -> list[str]:
    """What each of n labels is held out with: the first name of all that are the same model.

    Args:
        architectures: of each label (n).
        workloads: of each label (n); the first of each architecture is looked at.
    """
    workload_of = dict(zip(reversed(architectures), reversed(workloads), strict=True))
    first: dict[str, str] = {}
    group: dict[str, str] = {}
    for name, workload in sorted(workload_of.items(), key=lambda item: item[0]):
        same = first.setdefault(_content(workload) or name, name)
        group[name] = first.setdefault(f"model {model_of(name)}", same)
    return [group[name] for name in architectures]


def _content(workload: Workload) -> str | None:
    """A hash of the layers, or of the kernels where nothing else is known of them."""
    if workload.graph.node_count:
        return layers_hash(workload.graph)
    if workload.kernels is not None:
        return hashlib.sha256(workload.kernels.to_bytes()).hexdigest()
    return None


def grouped_folds(
    groups: Sequence[str], count: int, generator: np.random.Generator
) -> npt.NDArray[np.int64]:
    """The fold of each of n labels (n): architectures dealt out at random, none divided.

    Labels of one single architecture are dealt out one by one: near-copies are better than nothing.

    Args:
        groups: the architecture of each label (n).
        count: of folds, as long as there are so many architectures.
        generator: deals them out.
    """
    if not len(groups):
        return np.zeros(0, np.int64)
    names, number = np.unique(np.array(groups), return_inverse=True)
    if len(names) == 1:
        number = np.arange(len(groups))
    order = generator.permutation(int(number.max()) + 1)
    folds: npt.NDArray[np.int64] = (order[number] % min(count, len(order))).astype(np.int64)
    return folds


def cluster_folds(
    points: npt.NDArray[np.float64],
    groups: Sequence[str],
    count: int,
    generator: np.random.Generator,
) -> npt.NDArray[np.int64]:
    """The fold of each of n labels (n): clusters of architectures that are like each other.

    Who is held out with all that is like it is far from what is left, as a new family is. By
    k-means, begun far apart (Arthur and Vassilvitskii 2007, "k-means++").

    Args:
        points: of each label (n, c), near where labels are alike.
        groups: the architecture of each label (n); it lies at the mean of its labels.
        count: of clusters, at most; fewer where architectures coincide.
        generator: begins them.
    """
    if not len(groups):
        return np.zeros(0, np.int64)
    _, number, labels = np.unique(np.array(groups), return_inverse=True, return_counts=True)
    middles = np.zeros((len(labels), points.shape[1]))
    np.add.at(middles, number, points)
    middles /= labels[:, None]

    def squares(centres: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.stack([((middles - centre) ** 2).sum(axis=1) for centre in centres], axis=1)

    centres = middles[[generator.integers(len(middles))]]
    while len(centres) < count and (nearest := squares(centres).min(axis=1)).sum() > 0:
        chosen = generator.choice(len(middles), p=nearest / nearest.sum())
        centres = np.vstack([centres, middles[chosen]])
    for _ in range(CLUSTER_STEPS):
        own = squares(centres).argmin(axis=1)
        members = [middles[own == place] for place in range(len(centres))]
        pairs = zip(members, centres, strict=True)
        centres = np.array([m.mean(axis=0) if len(m) else centre for m, centre in pairs])
    folds: npt.NDArray[np.int64] = squares(centres).argmin(axis=1)[number]
    return folds


def drawn_rows(count: int, most: int) -> npt.NDArray[np.int64]:
    """Which of so many rows stand for all: at most `most`, rising, the same ones at every call.

    Drawn, as rows at even distances would all have the same batch size where labels are sorted.
    """
    drawn = np.random.default_rng(0).permutation(count)[:most]
    return np.sort(drawn).astype(np.int64)
