"""An estimator around any network over graphs: one training loop for the paper's and the baselines.

    log y = centre + scale * network(graph, vector)

What differs between methods is the network, the vector of whole-graph features that joins it, and
the loss; all of them learn the logarithm, with features scaled over the training set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from trappm.learner.estimator import Estimate, Model, Targets
from trappm.learner.networks.dataset import FloatArray, Scaler, fit_node_scaler, to_data
from trappm.learner.networks.presets import Training
from trappm.learner.networks.randomness import torch_seeded
from trappm.learner.networks.regressor import OnEpoch, last_layer, network_outputs, train_network
from trappm.learner.workload import Workload
from trappm.profiler.errors import InputError
from trappm.profiler.records import Graph

Array = npt.NDArray[np.float64]
LogLoss = Callable[[Tensor], Tensor]
"""A number from log(prediction / measured) of each sample (k)."""
Vector = Callable[[Sequence[Graph]], FloatArray]
"""Features of whole graphs (n, v), not scaled."""

LEAST_LABELS = 2
"""A round number: of one label there is no spread."""


def squared_log(log_ratio: Tensor) -> Tensor:
    """The mean squared error of the logarithm: relative, and the same for half and double."""
    return log_ratio.square().mean()


def relative_squared(log_ratio: Tensor) -> Tensor:
    """The mean of (prediction / measured - 1)^2, as NNLQP has it.

    Beyond e times the measurement it goes on with the slope reached there: the exponential of an
    early mistake would be too large to learn from.
    """
    ratio = torch.where(log_ratio < 1, log_ratio.clamp(max=1).exp(), log_ratio * np.e)
    return (ratio - 1).square().mean()


def huber_log(log_ratio: Tensor) -> Tensor:
    """Huber's loss of the logarithm: linear beyond an error of about 10 %."""
    return nn.functional.huber_loss(log_ratio, torch.zeros_like(log_ratio), delta=0.1)


@dataclass(frozen=True, eq=False)
class NetworkModel:
    """A trained network with the scales of its inputs and output."""

    network: nn.Module
    vector: Vector
    node_scaler: Scaler
    vector_scaler: Scaler
    centre: float
    """Mean and deviation of log(value) over the training set."""
    scale: float
    batch_nodes: int

    def predict(self, workloads: Sequence[Workload]) -> Estimate:
        if not len(workloads):
            return Estimate(np.zeros(0))
        outputs = network_outputs(self.network, self._data(workloads), self.batch_nodes)[:, 0]
        return Estimate(np.exp(self.centre + self.scale * outputs))

    def gradients(self, workloads: Sequence[Workload]) -> FloatArray:
        """Of the output by the weights of the last layer (n, width)."""
        return last_layer(self.network, self._data(workloads), self.batch_nodes)

    def _data(self, workloads: Sequence[Workload]) -> list[Data]:
        graphs = [workload.graph for workload in workloads]
        vectors = self.vector_scaler.apply(self.vector(graphs))
        return [
            to_data(g, self.node_scaler, vector=v) for g, v in zip(graphs, vectors, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class NetworkEstimator:
    """Trains a network of its own for each metric and device."""

    name: str
    network: Callable[[int], nn.Module]
    """Makes one for this width of the vector; from a batch of graphs to (graphs, 1)."""
    vector: Vector
    loss: LogLoss
    training: Training
    on_epoch: OnEpoch = lambda done, total: None
    least_labels: ClassVar[int] = LEAST_LABELS

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> NetworkModel:
        """As `learner.estimator.Estimator`; labels of which only a bound is known are left out."""
        chosen, values = labelled(workloads, targets)
        graphs = [workload.graph for workload in chosen]
        logs, vectors = np.log(values), self.vector(graphs)
        if start is None:
            node_scaler, vector_scaler = fit_node_scaler(graphs), Scaler.fit(vectors)
            centre, scale = float(logs.mean()), max(float(logs.std()), 0.02)
        elif isinstance(start, NetworkModel):
            node_scaler, vector_scaler = start.node_scaler, start.vector_scaler
            # How much faster or larger the new device is altogether needs no network.
            level = np.median(logs - np.log(start.predict(chosen).median))
            centre, scale = start.centre + float(level), start.scale
        else:
            raise InputError(f"{self.name} cannot start from the weights of another method")
        units = (logs - centre) / scale
        data = [
            to_data(graph, node_scaler, vector=vector, target=unit)
            for graph, vector, unit in zip(
                graphs, vector_scaler.apply(vectors), units[:, None], strict=True
            )
        ]
        with torch_seeded(generator):
            network = self.network(vectors.shape[1])
            if isinstance(start, NetworkModel):
                network.load_state_dict(start.network.state_dict())
            train_network(
                network,
                data,
                training=self.training,
                fine_tune=start is not None,
                generator=generator,
                on_epoch=self.on_epoch,
                loss=lambda output, target: self.loss(scale * (output - target)),
            )
        return NetworkModel(
            network=network,
            vector=self.vector,
            node_scaler=node_scaler,
            vector_scaler=vector_scaler,
            centre=centre,
            scale=scale,
            batch_nodes=self.training.batch_nodes,
        )


def labelled(workloads: Sequence[Workload], targets: Targets) -> tuple[list[Workload], Array]:
    """The workloads with a value, and the values: what methods learn from that know no bounds.

    Raises:
        InputError: too few, shapes that differ, or values that are not positive.
    """
    if targets.values.shape != (len(workloads),):
        raise InputError(f"{len(workloads)} workloads have labels of shape {targets.values.shape}")
    known = np.flatnonzero(~np.isnan(targets.values)).tolist()
    values = targets.values[known]
    if len(known) < LEAST_LABELS:
        raise InputError(f"{len(known)} labels are too few to learn from; give {LEAST_LABELS}")
    if not np.all((values > 0) & np.isfinite(values)):
        raise InputError("a label is zero, negative or infinite")
    return [workloads[i] for i in known], values
