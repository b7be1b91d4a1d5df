"""An estimator around any network over graphs: one training for the paper's and the baselines.

    log y = centre + scale * mean over members of network(graph, vector)

What differs between methods is the network, the vector of whole-graph features that joins it, and
the loss; all of them learn the logarithm, with features scaled over the training set. Each network
is blind to one fold of the architectures, by which its training is judged (`training`), and whose
errors tell how wide an interval must be: the wider, the less a graph's operators are like those of
labelled ones. Several networks are a deep ensemble (Lakshminarayanan et al. 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from trappm.learner.estimator import Estimate, Model, Targets
from trappm.learner.networks.dataset import (
    FloatArray,
    Scaler,
    batches,
    fit_node_scaler,
    to_data,
)
from trappm.learner.networks.presets import Training
from trappm.learner.networks.randomness import torch_seeded
from trappm.learner.networks.training import train
from trappm.learner.residual.graph_features import OPERATORS, operator_shares
from trappm.learner.stats.calibration import Calibration, Familiarity, UnseenErrors
from trappm.learner.stats.folds import grouped_folds
from trappm.learner.stats.student_t import robust_deviation
from trappm.learner.tensors import with_prefix
from trappm.learner.workload import Workload
from trappm.profiler.errors import InputError
from trappm.profiler.progress import OnProgress

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Vector = Callable[[Sequence[Workload]], FloatArray]
"""Features of whole workloads (n, v), not scaled."""
Tokens = Callable[[Sequence[Workload]], IntArray]
"""Tokens of a text about each workload (n, t), padded with -1."""

LEAST_LABELS = 2
"""A round number: of one label there is no spread."""
FOLDS = 5
"""Of architectures; each network is blind to one."""
LEAST_SCALE, LEAST_NOISE = 0.02, 0.005
"""Of the logarithm: labels that hardly differ make no unit, and few errors no certainty."""


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


LOSSES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "squared-log": squared_log,
    "relative-squared": relative_squared,
    "huber-log": huber_log,
}
"""A number from log(prediction / measured) of each sample (k)."""


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
    """Deviation of the errors of log(value) on architectures that a network was blind to, but for
    when its training ended, which makes them a little too small."""
    calibration: Calibration
    """Of these errors, in units of the deviation that was stated."""
    familiarity: Familiarity
    """Of the labelled graphs by their operators: networks do not know what they have not seen."""
    batch_nodes: int
    tokens: Tokens | None = None
    """For networks that read a text beside the graph."""

    def predict(self, workloads: Sequence[Workload]) -> Estimate:
        """Raises InputError for workloads whose vectors are not as wide as those learned from."""
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
        """Of the outputs by the weights of the networks' last layers (n, networks x width)."""
        data = self._data(workloads)
        rows = [_last_layer(network, data, self.batch_nodes) for network in self.networks]
        return np.hstack(rows) / np.float32(len(rows) ** 0.5)

    def _logs(self, data: Sequence[Data]) -> Array:
        """log(value) according to each network (networks, n)."""
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
            to_data(w.graph, self.node_scaler, vector=v, tokens=t)
            for w, v, t in zip(workloads, scaled, _texts(self.tokens, workloads), strict=True)
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
        """With networks for this width of the vector.

        Raises:
            KeyError, ValueError, RuntimeError: tensors that are not those of such networks.
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
    """Trains networks of its own for each metric and device."""

    name: str
    network: Callable[[int, float], nn.Module]
    """Makes one for this width of the vector and mean number of nodes; from a batch of graphs to
    (graphs, 1)."""
    vector: Vector
    training: Training
    on_step: OnProgress = lambda done, total: None
    tokens: Tokens | None = None
    least_labels: ClassVar[int] = LEAST_LABELS

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> NetworkModel:
        """As `learner.estimator.Estimator`; labels of which only a bound is known are left out."""
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
            # How much faster or larger the new device is altogether needs no network.
            level = np.median(logs - np.log(start.predict(chosen).median))
            centre, scale = start.centre + float(level), start.scale
        else:
            raise InputError(f"{self.name} cannot start from the weights of another method")
        units = ((logs - centre) / scale)[:, None]
        scaled, texts = vector_scaler.apply(vectors), _texts(self.tokens, chosen)
        data = [
            to_data(graph, node_scaler, vector=vector, target=unit, tokens=text)
            for graph, vector, unit, text in zip(graphs, scaled, units, texts, strict=True)
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
            tokens=self.tokens,
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


def labelled(workloads: Sequence[Workload], targets: Targets) -> tuple[list[int], Array]:
    """The rows with a value, and the values: what methods learn from that know no bounds.

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
    return known, values


def _operators(workloads: Sequence[Workload]) -> Array:
    """What distances are told by: the operators' shares of each graph (n, operators)."""
    shares = [operator_shares(workload.graph) for workload in workloads]
    return np.array(shares, dtype=np.float64).reshape(len(workloads), len(OPERATORS))


def _texts(tokens: Tokens | None, workloads: Sequence[Workload]) -> Sequence[IntArray | None]:
    return [None] * len(workloads) if tokens is None else list(tokens(workloads))


def _of(data: Sequence[Data], rows: npt.NDArray[np.bool_]) -> list[Data]:
    return [data[i] for i in np.flatnonzero(rows).tolist()]


def _last_layer(network: nn.Module, data: Sequence[Data], max_nodes: int) -> FloatArray:
    """What the last linear layer of a frozen network sees of these graphs (n, width).

    These are the output's derivatives by that layer's weights.
    """
    seen: list[Tensor] = []
    last = [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1]
    hook = last.register_forward_pre_hook(lambda _layer, inputs: seen.append(inputs[0]))
    try:
        _outputs(network, data, max_nodes)
    finally:
        hook.remove()
    return torch.cat(seen).numpy()


def _outputs(network: nn.Module, data: Sequence[Data], max_nodes: int) -> Array:
    """Outputs of a frozen network for these graphs (n)."""
    with torch.no_grad():
        outputs: list[Any] = [
            network(batch).numpy()[:, 0] for batch in batches(data, max_nodes, range(len(data)))
        ]
    return np.concatenate([np.zeros(0), *outputs])
