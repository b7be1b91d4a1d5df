"""DIPPM: three GraphSAGE layers and five static features, with Huber's loss.

Panner Selvam and Brorsson, "DIPPM: a deep learning inference performance predictive model using
graph neural networks", Euro-Par 2023, section 3: SAGE layers of 512, pooled, joined with MACs,
batch size and the numbers of convolutions, dense layers and ReLUs, three fully connected layers,
dropout 0.05, Huber's loss. Its 500 epochs at a step size of 2.8e-5 are replaced by the training
that all baselines get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from research.peers.nnlqp import SageNetwork
from research.peers.sizes import LAPTOP_SIZE, Size
from trappm.learner.paper.graphs import FloatArray
from trappm.learner.paper.regressor import NetworkEstimator
from trappm.learner.workload import Workload

_COUNTED = (("Conv", "ConvTranspose"), ("Gemm", "MatMul"), ("Relu",))


def dippm(size: Size = LAPTOP_SIZE) -> NetworkEstimator:
    return NetworkEstimator(
        name="dippm",
        network=lambda width, _nodes: SageNetwork(width, size.width, layers=3, hidden_layers=3),
        vector=_static,
        training=replace(size.training, loss="huber-log"),
    )


def _static(workloads: Sequence[Workload]) -> FloatArray:
    """Logarithms of MACs, batch size, and how many operators of three kinds there are (n, 5)."""
    rows = [
        (
            graph.macs.sum(),
            graph.batch_size,
            *(sum(operator in kinds for operator in graph.operators) for kinds in _COUNTED),
        )
        for graph in (workload.graph for workload in workloads)
    ]
    return np.log1p(np.array(rows, dtype=np.float64).reshape(len(workloads), 5)).astype(np.float32)
