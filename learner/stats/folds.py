"""What is held out together, and folds that never divide it.

Batch sizes of an architecture are near-copies of each other, and some architectures have two names
(timm's beit and beitv2 differ in how weights were trained): who holds one of them out and learns
from the other has held nothing out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from trappm.learner.workload import Workload
from trappm.profiler.records import Graph
from trappm.profiler.records.content_hash import graph_hash

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
    """What each of n labels is held out with: the first name of all that have the same content.

    Args:
        architectures: of each label (n).
        workloads: of each label (n); the first of each architecture is looked at.
    """
    workload_of = dict(zip(reversed(architectures), reversed(workloads), strict=True))
    first: dict[str, str] = {}
    group = {
        name: first.setdefault(_content(workload) or name, name)
        for name, workload in sorted(workload_of.items(), key=lambda item: item[0])
    }
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
