"""The regressor of the TraPPM paper, and its training, which the published baselines share.

    log y = centre + scale * mean over members of network(graph, vector)

`HeadNetwork` is the paper's network; a baseline has another network, vector of whole-graph features
or loss. Each network is trained without one fold of the architectures: their errors end its
training (`training`) and give the width of intervals, which grows where a graph's operators are
unlike those of the labels. Several networks are a deep ensemble (Lakshminarayanan et al. 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch_geometric.data import Batch, Data

from trappm.learner.estimator import Estimate, Model, Targets
from trappm.learner.paper.distinct_nodes import DistinctSAGEConv, Dropout, classes_of
from trappm.learner.paper.encoder import Encoder
from trappm.learner.paper.graphs import (
    FloatArray,
    Scaler,
    batches,
    fit_node_scaler,
    join_vectors,
    to_data,
)
from trappm.learner.paper.presets import HeadPreset, Training
from trappm.learner.paper.training import torch_seeded, train
from trappm.learner.residual.graph_features import OPERATORS, operator_shares
from trappm.learner.stats.calibration import Calibration, Familiarity, UnseenErrors
from trappm.learner.stats.folds import grouped_folds
from trappm.learner.stats.student_t import robust_deviation
from trappm.learner.tensors import with_prefix
from trappm.learner.workload import Workload
from trappm.profiler.errors import InputError
from trappm.profiler.graphs.features import NODE_FEATURES
from trappm.profiler.progress import OnProgress
from trappm.profiler.records import Graph

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Vector = Callable[[Sequence[Workload]], FloatArray]
"""Unscaled features of whole workloads (n, v)."""

LEAST_LABELS = 2
"""Least number of labels (round number): one has no spread."""
FOLDS = 5
"""Folds of architectures; each network is trained without one."""
LEAST_SCALE, LEAST_NOISE = 0.02, 0.005
"""Least values of the logarithm's scale and of the noise."""


def squared_log(log_ratio: Tensor) -> Tensor:
    """Return the mean squared error of the logarithm."""
    return log_ratio.square().mean()


def relative_squared(log_ratio: Tensor) -> Tensor:
    """Return the mean of (prediction / measured - 1)^2, as in NNLQP; linear beyond e times."""
    ratio = torch.where(log_ratio < 1, log_ratio.clamp(max=1).exp(), log_ratio * np.e)
    return (ratio - 1).square().mean()


def huber_log(log_ratio: Tensor) -> Tensor:
    """Return Huber's loss of the logarithm, linear beyond an error of about 10 %."""
    return nn.functional.huber_loss(log_ratio, torch.zeros_like(log_ratio), delta=0.1)


LOSSES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "squared-log": squared_log,
    "relative-squared": relative_squared,
    "huber-log": huber_log,
}
"""Losses of log(prediction / measured) of k samples."""


class HeadNetwork(nn.Module):
    """SAGEConv layers, sum pooling, concatenation with the graph's vector, and linear layers.

    The vector is the frozen encoder's embedding and the static features. The output is a scaled
    logarithm.
    """

    mean_nodes: Tensor

    def __init__(self, preset: HeadPreset, vector_width: int, mean_nodes: float = 1.0) -> None:
        super().__init__()
        inputs = (NODE_FEATURES, *preset.widths[:-1])
        self.convolutions = nn.ModuleList(
            DistinctSAGEConv(before, after)
            for before, after in zip(inputs, preset.widths, strict=True)
        )
        self.joined_width = preset.widths[-1] + vector_width
        before_layers = (self.joined_width, *preset.hidden[:-1])
        self.layers = nn.ModuleList(
            nn.Linear(before, after)
            for before, after in zip(before_layers, preset.hidden, strict=True)
        )
        self.output = nn.Linear(preset.hidden[-1], 1)
        # Training starts from a prediction of the mean.
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        self.dropout = Dropout(preset.dropout)
        self.register_buffer("mean_nodes", torch.tensor(mean_nodes))

    def forward(self, data: Batch) -> Tensor:
        """(graphs, 1) for a batch of `graphs.to_data` with vectors."""
        classes = classes_of(data, len(self.convolutions))
        x = classes.rows
        for convolution, layer in zip(self.convolutions, classes.layers, strict=True):
            x = self.dropout(F.relu(convolution(x, layer)))
        # The paper's sum; the constant divisor brings its magnitude near one.
        pooled = torch.sparse.mm(classes.pool, x) / self.mean_nodes
        joined = torch.cat([pooled, data.vector], dim=1)
        for linear in self.layers:
            joined = self.dropout(F.relu(linear(joined)))
        output: Tensor = self.output(joined)
        return output


@dataclass(frozen=True, eq=False)
class NetworkModel:
    """Trained networks with the scales of their inputs and output, for one metric."""

    networks: tuple[nn.Module, ...]
    vector: Vector
    node_scaler: Scaler
    vector_scaler: Scaler
    centre: float
    """Mean and deviation of log(value) over the training set."""
    scale: float
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
        logs = self._logs(self._data(workloads))
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

    def gradients(self, workloads: Sequence[Workload]) -> FloatArray:
        """Return derivatives of outputs by the weights of the last layers (n, networks x width)."""
        data = self._data(workloads)
        rows = [_last_layer(network, data, self.batch_nodes) for network in self.networks]
        return np.hstack(rows) / np.float32(len(rows) ** 0.5)

    def _logs(self, data: Sequence[Data]) -> Array:
        """Return log(value) by each network (networks, n)."""
        rows = [_outputs(network, data, self.batch_nodes) for network in self.networks]
        return self.centre + self.scale * np.stack(rows)

    def _data(self, workloads: Sequence[Workload]) -> list[Data]:
        if not len(workloads):
            return []
        vectors = self.vector(workloads)
        if vectors.shape[1:] != self.vector_scaler.mean.shape:
            raise InputError(
                f"vectors of graphs have shape {vectors.shape}; the networks were trained on "
                f"{len(self.vector_scaler.mean)} columns, so take the encoder that they came with"
            )
        scaled = self.vector_scaler.apply(vectors)
        return [
            to_data(workload.graph, self.node_scaler, vector=vector)
            for workload, vector in zip(workloads, scaled, strict=True)
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Everything learned, by name."""
        numbers = {"centre": self.centre, "scale": self.scale, "noise": self.noise}
        return {
            **self.node_scaler.tensors("nodes"),
            **self.vector_scaler.tensors("vector"),
            **{k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()},
            **{f"calibration.{k}": v for k, v in self.calibration.tensors().items()},
            **{f"familiarity.{k}": v for k, v in self.familiarity.tensors().items()},
            **{
                f"network{number}.{name}": value
                for number, network in enumerate(self.networks)
                for name, value in network.state_dict().items()
            },
        }

    @classmethod
    def from_tensors(
        cls,
        network: Callable[[int], nn.Module],
        vector: Vector,
        training: Training,
        tensors: Mapping[str, Tensor],
    ) -> Self:
        """Return the model that `tensors` describes.

        Args:
            network: Makes a network for this width of the vector.
            vector: Computes the vectors of workloads.
            training: Training settings.
            tensors: Everything learned, by name.

        Raises:
            KeyError, ValueError, RuntimeError: The tensors are not those of such networks.
        """
        vector_scaler = Scaler.from_tensors(tensors, "vector")
        networks: list[nn.Module] = []
        while state := with_prefix(tensors, f"network{len(networks)}."):
            with torch.device("meta"):  # no memory for weights that are replaced at once
                empty = network(len(vector_scaler.mean))
            empty.load_state_dict(state, assign=True)
            networks.append(empty.eval().requires_grad_(False))
        if not networks:
            raise ValueError("there are no networks")
        return cls(
            networks=tuple(networks),
            vector=vector,
            node_scaler=Scaler.from_tensors(tensors, "nodes"),
            vector_scaler=vector_scaler,
            centre=float(tensors["centre"]),
            scale=float(tensors["scale"]),
            noise=float(tensors["noise"]),
            calibration=Calibration.from_tensors(with_prefix(tensors, "calibration.")),
            familiarity=Familiarity.from_tensors(with_prefix(tensors, "familiarity.")),
            batch_nodes=training.batch_nodes,
        )


@dataclass(frozen=True, eq=False)
class NetworkEstimator:
    """Recipe that trains networks for one metric on one device."""

    name: str
    network: Callable[[int, float], nn.Module]
    """Makes a network for this width of the vector and mean number of nodes. It maps a batch of
    graphs to (graphs, 1)."""
    vector: Vector
    training: Training
    on_step: OnProgress = lambda done, total: None
    least_labels: ClassVar[int] = LEAST_LABELS

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> NetworkModel:
        """Train networks, or fine-tune those of another device (`start`).

        Labels of which only a bound is known are left out.
        """
        rows, values = labelled(workloads, targets)
        chosen = [workloads[i] for i in rows]
        groups = [targets.groups[i] for i in rows]
        graphs = [workload.graph for workload in chosen]
        logs, vectors = np.log(values), self.vector(chosen)
        if start is None:
            node_scaler, vector_scaler = fit_node_scaler(graphs), Scaler.fit(vectors)
            centre, scale = float(logs.mean()), max(float(logs.std()), LEAST_SCALE)
        elif isinstance(start, NetworkModel):
            node_scaler, vector_scaler = start.node_scaler, start.vector_scaler
            # The common factor between the devices needs no training.
            level = np.median(logs - np.log(start.predict(chosen).median))
            centre, scale = start.centre + float(level), start.scale
        else:
            raise InputError(f"{self.name} cannot start from the weights of another method")
        units = ((logs - centre) / scale)[:, None]
        scaled = vector_scaler.apply(vectors)
        data = [
            to_data(graph, node_scaler, vector=vector, target=unit)
            for graph, vector, unit in zip(graphs, scaled, units, strict=True)
        ]
        mean_nodes = float(np.mean([graph.node_count for graph in graphs]))
        folds = grouped_folds(groups, FOLDS, generator)
        count = min(self.training.members, int(folds.max()) + 1)
        networks, errors = [], np.full(len(data), np.nan)
        with torch_seeded(generator):
            for number in range(count):
                network = self.network(vectors.shape[1], mean_nodes)
                if isinstance(start, NetworkModel):
                    source = start.networks[number % len(start.networks)]
                    network.load_state_dict(source.state_dict())
                unseen = folds == number
                self._train(
                    network, data, unseen, scale, start is not None, generator,
                    lambda done, total, n=number: self.on_step(  # type: ignore[misc]
                        n * total + done, count * total
                    ),
                )  # fmt: skip
                outputs = _outputs(network, _of(data, unseen), self.training.batch_nodes)
                errors[unseen] = scale * (units[unseen, 0] - outputs)
                networks.append(network)
        judged = ~np.isnan(errors)
        noise = max(robust_deviation(errors[judged]), LEAST_NOISE)
        familiarity, deviations = Familiarity.fit(_operators(chosen), groups).fit_widening(
            [UnseenErrors(errors, np.full(len(errors), noise), folds)], noise, groups, judged
        )
        return NetworkModel(
            networks=tuple(networks),
            vector=self.vector,
            node_scaler=node_scaler,
            vector_scaler=vector_scaler,
            centre=centre,
            scale=scale,
            noise=noise,
            calibration=Calibration.fit(
                errors[judged],
                deviations[judged],
                [groups[i] for i in np.flatnonzero(judged).tolist()],
            ),
            familiarity=familiarity,
            batch_nodes=self.training.batch_nodes,
        )

    def _train(
        self,
        network: nn.Module,
        data: Sequence[Data],
        unseen: npt.NDArray[np.bool_],
        scale: float,
        fine_tune: bool,
        generator: np.random.Generator,
        on_step: OnProgress,
    ) -> None:
        how = self.training
        loss_of = LOSSES[how.loss]

        def loss(batch: Batch) -> Tensor:
            outputs = network(batch)
            if outputs.shape != batch.y.shape:
                raise AssertionError(f"outputs {outputs.shape} against labels {batch.y.shape}")
            return loss_of(scale * (outputs - batch.y))

        train(
            network,
            loss,
            _of(data, ~unseen),
            _of(data, unseen),
            steps=how.steps,
            learning_rate=how.fine_tune_learning_rate if fine_tune else how.learning_rate,
            weight_decay=how.weight_decay,
            batch_nodes=how.batch_nodes,
            generator=generator,
            on_step=on_step,
        )


@dataclass(frozen=True, eq=False)
class TrappmAsPublished:
    """The paper's predictor over a pre-trained encoder."""

    name: str
    preset: HeadPreset
    encoder: Encoder | None = None
    """Pre-trained (`encoder.train_encoder`), or random for the ablation; None where
    workloads come with their embeddings."""
    on_step: OnProgress = lambda done, total: None
    _embeddings: WeakKeyDictionary[Graph, FloatArray] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )

    least_labels: ClassVar[int] = LEAST_LABELS

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> NetworkModel:
        """Train a regressor, or fine-tune that of another device (Table V: V100 from A100)."""
        estimator = NetworkEstimator(
            name=self.name,
            network=lambda width, nodes: HeadNetwork(self.preset, width, nodes),
            vector=embedded_vectors if self.encoder is None else self._vectors,
            training=self.preset,
            on_step=self.on_step,
        )
        return estimator.fit(workloads, targets, generator, start)

    def embed(self, graphs: Sequence[Graph]) -> FloatArray:
        """Return the encoder's embeddings (n, width), computed once per graph.

        Raises:
            InputError: There is no encoder.
        """
        if self.encoder is None:
            raise InputError(f"{self.name} has no encoder to embed graphs with")
        new = [graph for graph in dict.fromkeys(graphs) if graph not in self._embeddings]
        for graph, row in zip(new, self.encoder.embed(new), strict=True):
            self._embeddings[graph] = row
        rows = [self._embeddings[graph] for graph in graphs]
        return np.array(rows, dtype=np.float32).reshape(len(graphs), self.encoder.width)

    def _vectors(self, workloads: Sequence[Workload]) -> FloatArray:
        return join_vectors(workloads, self.embed([workload.graph for workload in workloads]))


def embedded_vectors(workloads: Sequence[Workload]) -> FloatArray:
    """Return unscaled embeddings and static features of workloads (n, width + 6).

    Raises:
        InputError: A workload has no embedding.
    """
    rows = [w.embedding for w in workloads if w.embedding is not None]
    if len(rows) != len(workloads):
        raise InputError("a workload has no embedding, which networks need; encode its graph")
    return join_vectors(workloads, np.array(rows, dtype=np.float32))


def labelled(workloads: Sequence[Workload], targets: Targets) -> tuple[list[int], Array]:
    """Return the rows with a value, and the values.

    Raises:
        InputError: Too few values, shapes that differ, or values that are not positive.
    """
    if targets.values.shape != (len(workloads),):
        raise InputError(f"{len(workloads)} workloads have labels of shape {targets.values.shape}")
    known = np.flatnonzero(~np.isnan(targets.values)).tolist()
    values = targets.values[known]
    if len(known) < LEAST_LABELS:
        raise InputError(f"{len(known)} labels are too few to learn from; give {LEAST_LABELS}")
    if not np.all((values > 0) & np.isfinite(values)):
        raise InputError("a label is zero, negative or infinite")
    return known, values


def _operators(workloads: Sequence[Workload]) -> Array:
    """Return the operators' shares of each graph's nodes (n, operators)."""
    shares = [operator_shares(workload.graph) for workload in workloads]
    return np.array(shares, dtype=np.float64).reshape(len(workloads), len(OPERATORS))


def _of(data: Sequence[Data], rows: npt.NDArray[np.bool_]) -> list[Data]:
    return [data[i] for i in np.flatnonzero(rows).tolist()]


def _last_layer(network: nn.Module, data: Sequence[Data], max_nodes: int) -> FloatArray:
    """Return the last linear layer's inputs: the output's derivatives by its weights (n, width)."""
    seen: list[Tensor] = []
    last = [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1]
    hook = last.register_forward_pre_hook(lambda _layer, inputs: seen.append(inputs[0]))
    try:
        _outputs(network, data, max_nodes)
    finally:
        hook.remove()
    return torch.cat(seen).numpy()


def _outputs(network: nn.Module, data: Sequence[Data], max_nodes: int) -> Array:
    """Return the outputs of a frozen network for these graphs (n)."""
    with torch.no_grad():
        outputs: list[Any] = [
            network(batch).numpy()[:, 0] for batch in batches(data, max_nodes, range(len(data)))
        ]
    return np.concatenate([np.zeros(0), *outputs])
