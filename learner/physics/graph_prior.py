"""The prior of any metric from the graph alone: the terms of `learner.physics.graph_terms` by node.

For metrics that nothing simulates (power, energy), and for step time where a workload's kernels
have not been traced. A new metric is an entry in `graph_terms.PRIORS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trappm.learner.physics.graph_terms import PRIORS, term_matrix
from trappm.learner.physics.term_prior import TermPrior
from trappm.learner.residual.graph_features import OPERATORS, operator_shares
from trappm.learner.workload import Workload
from trappm.profiler.records import MemoryFormat, Optimizer, Phase, Precision

Array = npt.NDArray[np.float64]

FORWARD_SHARE = 1 / 3
"""Of a training step: the backward pass computes two products for each one of the forward pass."""
WORK = frozenset({"step_time_ms", "energy_j"})
"""Metrics that are sums of work, of which inference does the forward pass only."""


class GraphPrior(TermPrior):
    """The terms of one metric with their constants; see `learner.physics.prior.Prior`."""

    def __init__(self, metric: str, log_constants: Array | None = None) -> None:
        """Raises KeyError for a metric without terms."""
        super().__init__(PRIORS[metric], log_constants)
        self.metric = metric

    @property
    def feature_groups(self) -> tuple[int, ...]:
        return (4, len(self.spec.terms), len(OPERATORS), 5)

    def with_constants(self, log_constants: Array) -> Self:
        return type(self)(self.metric, log_constants)

    def terms(self, workloads: Sequence[Workload]) -> Array:
        terms = term_matrix([workload.graph for workload in workloads], self.metric)
        if self.metric in WORK:
            infers = np.array([w.phase is Phase.INFER for w in workloads], dtype=bool)
            terms[infers] *= FORWARD_SHARE
        return terms

    def features_of(self, workloads: Sequence[Workload], logs: Array, shares: Array) -> Array:
        """Size, the terms' shares, the operators' shares of the nodes, and the configuration."""
        return settings_and_operators(workloads, logs, shares)

    def tensors(self) -> dict[str, Tensor]:
        name = torch.tensor(list(self.metric.encode()), dtype=torch.uint8)
        return {**super().tensors(), "metric": name}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        metric = bytes(tensors["metric"].tolist()).decode()
        return cls(metric, tensors["log_constants"].numpy())


def settings_and_operators(workloads: Sequence[Workload], sizes: Array, shares: Array) -> Array:
    """Features of workloads: sizes (n), a prior's shares (n, k), operators and settings (n, f)."""
    rows = []
    for workload, size, parts in zip(workloads, sizes, shares, strict=True):
        graph = workload.graph
        nodes = graph.node_count
        image = float(np.prod(np.maximum(graph.input_shapes[0, 1:], 1))) if nodes else 1.0
        rows.append(
            [
                size,
                np.log(graph.batch_size),
                np.log(max(nodes, 1)),
                np.log(image),
                *parts,
                *operator_shares(graph),
                workload.precision is not Precision.FP32,
                workload.memory_format is MemoryFormat.CHANNELS_LAST,
                workload.phase is Phase.INFER,
                workload.optimizer is Optimizer.MOMENTUM,
                workload.optimizer.is_adam,
            ]
        )
    width = 4 + shares.shape[1] + len(OPERATORS) + 5
    return np.array(rows, dtype=np.float64).reshape(len(workloads), width)
