"""Estimator of the papers, with the interface of `learner.interface`."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from trappm.learner.interface import FloatArray, Workload
from trappm.learner.paper.encoder import Encoder
from trappm.learner.paper.graphs import join_vectors
from trappm.learner.paper.presets import HeadPreset
from trappm.learner.paper.regressor import HeadNetwork, Regressor
from trappm.profiler.errors import InputError
from trappm.profiler.records import Graph, OnProgress


def paper_estimator(
    name: str,
    preset: HeadPreset,
    encoder: Encoder | None = None,
    on_step: OnProgress = lambda done, total: None,
) -> Regressor:
    """Return the paper's predictor.

    Args:
        name: Name of the predictor.
        preset: Sizes and training settings.
        encoder: Encoder of the graphs; None where workloads come with their embeddings.
        on_step: Called with the number of steps done and the largest number of steps.
    """
    return Regressor(
        name=name,
        network=lambda width, mean_nodes: HeadNetwork(preset, width, mean_nodes),
        vector=embed_vectors if encoder is None else _Embedded(encoder),
        training=preset,
        on_step=on_step,
    )


class _Embedded:
    """Vectors of workloads by an encoder that embeds each graph once."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._known: WeakKeyDictionary[Graph, FloatArray] = WeakKeyDictionary()

    def __call__(self, workloads: Sequence[Workload]) -> FloatArray:
        graphs = [workload.graph for workload in workloads]
        new = [graph for graph in dict.fromkeys(graphs) if graph not in self._known]
        for graph, row in zip(new, self._encoder.embed(new), strict=True):
            self._known[graph] = row
        rows = np.array([self._known[graph] for graph in graphs], dtype=np.float32)
        return join_vectors(workloads, rows.reshape(len(graphs), self._encoder.width))


def embed_vectors(workloads: Sequence[Workload]) -> FloatArray:
    """Return unscaled embeddings and static features of workloads (n, width + 6).

    Raises:
        InputError: A workload has no embedding.
    """
    rows = [w.embedding for w in workloads if w.embedding is not None]
    if len(rows) != len(workloads):
        raise InputError("a workload has no embedding, which networks need; encode its graph")
    return join_vectors(workloads, np.array(rows, dtype=np.float32))
