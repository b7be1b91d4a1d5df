"""The regressor of the TraPPM paper: one metric from a graph, as a deep ensemble.

    h_0 = X,  h_k = dropout(ReLU(SAGEConv(h_(k-1), A)))           two layers (N, 512)
    v   = [sum of h_2 over nodes; embedding of the encoder; static features]    (1030)
    y   = linear(two fully connected layers with ReLU and dropout (v))
    log metric = center + scale * mean over members of y

Each member is trained without one fold of the architectures. The errors on that fold end its
training and give the width of intervals. The spread of the members is the uncertainty that
`learner.acquisition.embedding_space` uses (Lakshminarayanan et al. 2017). Published baselines have
another network, vector or loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch_geometric.data import Batch, Data
from torch_geometric.nn import SAGEConv, global_add_pool

from trappm.learner.interface import (
    Array,
    BoolArray,
    Estimate,
    FloatArray,
    Model,
    Targets,
    Workload,
    join_tensors,
    with_prefix,
)
from trappm.learner.paper.distinct_nodes import classes_of, one_hot, propagate
from trappm.learner.paper.graphs import Scaler, batches, fit_node_scaler, to_data
from trappm.learner.paper.presets import HeadPreset, Training
from trappm.learner.paper.training import seed_torch, train
from trappm.learner.physics.prior import OPERATORS, operator_shares
from trappm.learner.stats.calibration import Calibration, Familiarity, UnseenErrors
from trappm.learner.stats.folds import grouped_folds
from trappm.learner.stats.student_t import robust_deviation
from trappm.profiler.errors import InputError
from trappm.profiler.graphs.features import NODE_FEATURES
from trappm.profiler.records import OnProgress

Vector = Callable[[Sequence[Workload]], FloatArray]
"""Returns unscaled features of whole workloads (n, v)."""
MakeNetwork = Callable[[int, float], nn.Module]
"""Makes a network, from a batch of graphs to (graphs, 1), for a width of the vector and a mean
number of nodes."""

MIN_LABELS = 2
"""Least number of labels (round number): one has no spread."""
FOLDS = 5
"""Folds of architectures; each network is trained without one."""
MIN_SCALE, MIN_NOISE = 0.02, 0.005
"""Least values of the logarithm's scale and of the noise."""


def relative_squared(log_ratio: Tensor) -> Tensor:
    """Return the mean of (prediction / measured - 1)^2, as in NNLQP; linear beyond e times."""
    ratio = torch.where(log_ratio < 1, log_ratio.clamp(max=1).exp(), log_ratio * np.e)
    return (ratio - 1).square().mean()


def huber_log(log_ratio: Tensor) -> Tensor:
    """Return Huber's loss of the logarithm, linear beyond an error of about 10 %."""
    return F.huber_loss(log_ratio, torch.zeros_like(log_ratio), delta=0.1)


LOSSES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "squared-log": lambda log_ratio: log_ratio.square().mean(),
    "relative-squared": relative_squared,
    "huber-log": huber_log,
}
"""Losses of log(prediction / measured) of k samples."""


class HeadNetwork(nn.Module):
    """SAGEConv layers, sum pooling, concatenation with the graph's vector, and linear layers."""

    mean_nodes: Tensor

    def __init__(self, preset: HeadPreset, vector_width: int, mean_nodes: float = 1.0) -> None:
        super().__init__()
        inputs = (NODE_FEATURES, *preset.widths[:-1])
        self.convolutions = nn.ModuleList(map(SAGEConv, inputs, preset.widths))
        self.joined_width = preset.widths[-1] + vector_width
        self.layers = nn.ModuleList(
            map(nn.Linear, (self.joined_width, *preset.hidden[:-1]), preset.hidden)
        )
        self.output = nn.Linear(preset.hidden[-1], 1)
        # Training starts from a prediction of the mean.
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        self.dropout = nn.Dropout(preset.dropout)
        self.distinct = preset.distinct
        self.register_buffer("mean_nodes", torch.tensor(mean_nodes))

    def forward(self, data: Batch) -> Tensor:
        """Return outputs (graphs, 1) for a batch of `to_data` with vectors."""
        # The paper's sum; the constant divisor brings its magnitude near one.
        joined = torch.cat([self._pool(data) / self.mean_nodes, data.vector], dim=1)
        for linear in self.layers:
            joined = self.dropout(F.relu(linear(joined)))
        output: Tensor = self.output(joined)
        return output

    def _pool(self, data: Batch) -> Tensor:
        if self.distinct:
            classes = classes_of(data, len(self.convolutions))
            x = propagate(classes, self.convolutions, self.dropout)
            pooled: Tensor = torch.sparse.mm(classes.pool, x)
            return pooled
        x = one_hot(data.x)
        for convolution in self.convolutions:
            x = self.dropout(F.relu(convolution(x, data.edge_index)))
        summed: Tensor = global_add_pool(x, data.batch)
        return summed


@dataclass(frozen=True, eq=False)
class Scales:
    """Scales of the inputs and of the output of networks."""

    nodes: Scaler
    vector: Scaler
    center: float
    """Mean of log(value) over the training set."""
    scale: float
    """Deviation of log(value) over the training set."""

    def data(
        self, workloads: Sequence[Workload], vectors: FloatArray, units: Array | None = None
    ) -> list[Data]:
        """Return scaled graphs (n) with vectors (n, v) and labels (n)."""
        scaled = self.vector.apply(vectors)
        return [
            to_data(
                workload.graph,
                self.nodes,
                vector=vector,
                target=None if units is None else units[i : i + 1],
            )
            for i, (workload, vector) in enumerate(zip(workloads, scaled, strict=True))
        ]


@dataclass(frozen=True, eq=False)
class NetworkModel:
    """Trained networks with the scales of their inputs and output, for one metric."""

    networks: tuple[nn.Module, ...]
    vector: Vector
    scales: Scales
    noise: float
    """Deviation of the errors of log(value) on the fold without which a network was trained. The
    fold ended its training, so it is slightly too small."""
    calibration: Calibration
    """Quantiles of these errors in units of the predicted deviation."""
    familiarity: Familiarity
    """Distances from the labelled graphs, by shares of operators."""
    batch_nodes: int

    def predict(self, workloads: Sequence[Workload]) -> Estimate:
        """Predict n workloads.

        Raises:
            InputError: The vectors' width differs from that in training.
        """
        data = self._data(workloads)
        outputs = np.stack([_outputs(network, data, self.batch_nodes) for network in self.networks])
        logs = self.scales.center + self.scales.scale * outputs
        middle, disagreement = logs.mean(axis=0), logs.std(axis=0)
        distance = self.familiarity.distance(_operators(workloads))
        deviation = self.familiarity.widened(np.hypot(self.noise, disagreement), distance)
        low, high = self.calibration.interval()
        return Estimate(
            median=np.exp(middle),
            low=np.exp(middle + low * deviation),
            high=np.exp(middle + high * deviation),
            log_quantiles=self.calibration.log_quantiles(middle, deviation),
            log_std=deviation,
            log_std_of_mean=disagreement if len(self.networks) > 1 else None,
            outside=self.familiarity.outside(distance),
        )

    def _data(self, workloads: Sequence[Workload]) -> list[Data]:
        if not len(workloads):
            return []
        vectors = self.vector(workloads)
        if vectors.shape[1:] != self.scales.vector.mean.shape:
            raise InputError(
                f"vectors of graphs have shape {vectors.shape}; the networks were trained on "
                f"{len(self.scales.vector.mean)} columns, so take the encoder that they came with"
            )
        return self.scales.data(workloads, vectors)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything learned, by name; `from_tensors` is the inverse."""
        numbers = [self.scales.center, self.scales.scale, self.noise]
        tensors = {
            **self.scales.nodes.tensors("nodes"),
            **self.scales.vector.tensors("vector"),
            "numbers": torch.tensor(numbers, dtype=torch.float64),
        }
        for i, network in enumerate(self.networks):
            tensors |= {f"network{i}.{name}": v for name, v in network.state_dict().items()}
        return tensors | join_tensors(
            {"calibration": self.calibration, "familiarity": self.familiarity}
        )

    @classmethod
    def from_tensors(
        cls,
        network: MakeNetwork,
        vector: Vector,
        training: Training,
        tensors: Mapping[str, Tensor],
    ) -> Self:
        """Return the model that `tensors` describes.

        Args:
            network: Makes a network.
            vector: Computes the vectors of workloads.
            training: Training settings.
            tensors: Everything learned, by name.

        Raises:
            KeyError, ValueError, RuntimeError: The tensors are not those of such networks.
        """
        center, scale, noise = tensors["numbers"].tolist()
        nodes, vectors = (Scaler.from_tensors(tensors, name) for name in ("nodes", "vector"))
        networks: list[nn.Module] = []
        while state := with_prefix(tensors, f"network{len(networks)}."):
            with torch.device("meta"):  # no memory for weights that are replaced at once
                empty = network(len(vectors.mean), 1.0)
            empty.load_state_dict(state, assign=True)
            networks.append(empty.eval().requires_grad_(False))
        if not networks:
            raise ValueError("there are no networks")
        return cls(
            networks=tuple(networks),
            vector=vector,
            scales=Scales(nodes, vectors, center, scale),
            noise=noise,
            calibration=Calibration.from_tensors(with_prefix(tensors, "calibration.")),
            familiarity=Familiarity.from_tensors(with_prefix(tensors, "familiarity.")),
            batch_nodes=training.batch_nodes,
        )


@dataclass(frozen=True, eq=False)
class Regressor:
    """Recipe that trains networks for one metric on one device (`learner.interface.Estimator`)."""

    least_labels: ClassVar[int] = MIN_LABELS

    name: str
    network: MakeNetwork
    vector: Vector
    training: Training
    on_step: OnProgress = lambda done, total: None

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> NetworkModel:
        """Train networks from random weights, or fine-tune those of another device (Table V).

        Labels with only a bound are left out. The common factor between two devices needs no
        training: it shifts the center. All weights are then trained at a smaller learning rate.

        Raises:
            InputError: As `select_labelled`, or `start` is a model of another method.
        """
        rows, logs = select_labelled(workloads, targets)
        chosen, groups = [workloads[i] for i in rows], [targets.groups[i] for i in rows]
        if start is None:
            scales = Scales(
                fit_node_scaler([workload.graph for workload in chosen]),
                Scaler.fit(self.vector(chosen)),
                float(logs.mean()),
                max(float(logs.std()), MIN_SCALE),
            )
            rate = self.training.learning_rate
            return self._train(chosen, logs, groups, generator, scales, (), rate)
        if not isinstance(start, NetworkModel):
            raise InputError(f"{self.name} cannot start from the weights of another method")
        shift = float(np.median(logs - np.log(start.predict(chosen).median)))
        scales = replace(start.scales, center=start.scales.center + shift)
        rate = self.training.fine_tune_learning_rate
        return self._train(chosen, logs, groups, generator, scales, start.networks, rate)

    def _train(
        self,
        chosen: Sequence[Workload],
        logs: Array,
        groups: Sequence[str],
        generator: np.random.Generator,
        scales: Scales,
        start: Sequence[nn.Module],
        learning_rate: float,
    ) -> NetworkModel:
        """Train each member without one fold of the architectures, from the networks in `start`."""
        units = (logs - scales.center) / scales.scale
        data = scales.data(chosen, self.vector(chosen), units)
        mean_nodes = float(np.mean([workload.graph.node_count for workload in chosen]))
        folds = grouped_folds(groups, FOLDS, generator)
        count = min(self.training.members, int(folds.max()) + 1)
        networks, errors = [], np.full(len(data), np.nan)
        with seed_torch(generator):
            for number in range(count):
                network = self.network(len(scales.vector.mean), mean_nodes)
                if start:
                    network.load_state_dict(start[number % len(start)].state_dict())
                unseen = folds == number
                held_out = _at(data, unseen)
                train(
                    network,
                    lambda batch, network=network: LOSSES[self.training.loss](  # type: ignore[misc]
                        scales.scale * (network(batch) - batch.y)
                    ),
                    _at(data, ~unseen),
                    held_out,
                    steps=self.training.steps,
                    learning_rate=learning_rate,
                    weight_decay=self.training.weight_decay,
                    batch_nodes=self.training.batch_nodes,
                    generator=generator,
                    on_step=lambda done, total, n=number: self.on_step(  # type: ignore[misc]
                        n * total + done, count * total
                    ),
                )
                outputs = _outputs(network, held_out, self.training.batch_nodes)
                errors[unseen] = scales.scale * (units[unseen] - outputs)
                networks.append(network)
        judged = ~np.isnan(errors)
        noise = max(robust_deviation(errors[judged]), MIN_NOISE)
        familiarity, deviations = Familiarity.fit(_operators(chosen), groups).fit_widening(
            [UnseenErrors(errors, np.full(len(errors), noise), folds)], noise, groups, judged
        )
        own = [groups[i] for i in np.flatnonzero(judged).tolist()]
        calibration = Calibration.fit(errors[judged], deviations[judged], own)
        return NetworkModel(
            tuple(networks), self.vector, scales, noise, calibration, familiarity,
            self.training.batch_nodes,
        )  # fmt: skip


def select_labelled(workloads: Sequence[Workload], targets: Targets) -> tuple[list[int], Array]:
    """Return the rows with a value, and the logarithms of the values.

    Raises:
        InputError: Too few values, shapes that differ, or values that are not positive.
    """
    if targets.values.shape != (len(workloads),):
        raise InputError(f"{len(workloads)} workloads have labels of shape {targets.values.shape}")
    known = np.flatnonzero(~np.isnan(targets.values)).tolist()
    values = targets.values[known]
    if len(known) < MIN_LABELS:
        raise InputError(f"{len(known)} labels are too few to learn from; give {MIN_LABELS}")
    if not np.all((values > 0) & np.isfinite(values)):
        raise InputError("a label is zero, negative or infinite")
    return known, np.log(values)


def _operators(workloads: Sequence[Workload]) -> Array:
    """Return the operators' shares of each graph's nodes (n, operators)."""
    shares = [operator_shares(workload.graph) for workload in workloads]
    return np.array(shares, dtype=np.float64).reshape(len(workloads), len(OPERATORS))


def _at(data: Sequence[Data], rows: BoolArray) -> list[Data]:
    return [data[i] for i in np.flatnonzero(rows).tolist()]


def _outputs(network: nn.Module, data: Sequence[Data], max_nodes: int) -> Array:
    """Return the outputs of a frozen network for these graphs (n)."""
    with torch.no_grad():
        outputs: list[Any] = [
            network(batch).numpy()[:, 0] for batch in batches(data, max_nodes, range(len(data)))
        ]
    return np.concatenate([np.zeros(0), *outputs])
