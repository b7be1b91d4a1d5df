"""TraPPM's networks as the heads of a device: the preset `paper`, without any physics.

Everything happens in the logarithm, so that an error is relative and no sample loses its size.
There are several networks (`regressor`; a deep ensemble, Lakshminarayanan et al. 2017).
Each is trained without one fold of the architectures, and its errors there show how wide an
interval must be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch_geometric.data import Data

from trappm.learner.heads.predictions import OTHER_START, DeviceHeads, Predictions
from trappm.learner.networks.dataset import (
    FloatArray,
    Scaler,
    fit_node_scaler,
    join_vectors,
    to_inputs,
)
from trappm.learner.networks.presets import HeadPreset
from trappm.learner.networks.randomness import torch_seeded
from trappm.learner.networks.regressor import (
    HeadNetwork,
    last_layer,
    network_outputs,
    train_network,
)
from trappm.learner.stats.calibration import COVERAGE
from trappm.learner.stats.folds import grouped_folds
from trappm.learner.stats.student_t import robust_deviation
from trappm.learner.tensors import with_prefix
from trappm.learner.workload import Workload
from trappm.profiler.errors import InputError
from trappm.profiler.progress import OnProgress
from trappm.profiler.records import METRICS, Graph

Array = npt.NDArray[np.float64]

LEAST_SCALE, LEAST_NOISE = 0.02, 0.005
"""Of the logarithm: labels that hardly differ make no unit, and few errors no certainty."""
KIND = "networks"


@dataclass(frozen=True, eq=False)
class Member:
    """A network that is blind to one fold of the architectures."""

    levels: Mapping[str, float]
    """For each metric, the median logarithm of what it was trained on."""
    network: HeadNetwork


@dataclass(frozen=True, eq=False)
class NetworkHeads:
    """The trained heads of one device."""

    preset: HeadPreset
    embedding_width: int
    metrics: tuple[str, ...]
    """The metrics that had labels, in the order of METRICS."""
    members: tuple[Member, ...]
    node_scaler: Scaler
    vector_scaler: Scaler
    scale: Mapping[str, float]
    """The unit of the networks' outputs: the deviation of the logarithm around its level."""
    noise: Mapping[str, float]
    """Deviation of the log errors on the folds that a member did not see."""
    stretch: Mapping[str, float]
    """Half the width of the interval in the logarithm, in units of `log_std`."""
    label_count: int

    needs_embeddings = True
    needs_kernels = False

    def predict(self, workloads: Sequence[Workload]) -> Predictions:
        """Raises InputError for embeddings that are missing, or not of the encoder's width."""
        graphs, embeddings = _inputs(workloads)
        _check_rows("embeddings", embeddings, (len(graphs), self.embedding_width))
        logs = self._member_logs(graphs, embeddings)
        middle, disagreement = logs.mean(axis=0), logs.std(axis=0)
        log_std = np.sqrt(disagreement**2 + self._row(self.noise) ** 2)
        half_width = self._row(self.stretch) * log_std
        return Predictions(
            metrics=self.metrics,
            median=np.exp(middle),
            low=np.exp(middle - half_width),
            high=np.exp(middle + half_width),
            log_std=log_std,
            disagreement=disagreement,
            outside=np.zeros(middle.shape, dtype=bool),
        )

    def gradients(self, workloads: Sequence[Workload]) -> FloatArray:
        """Of the members' outputs by the weights of their last layers (n, members x width)."""
        data = to_inputs(*_inputs(workloads), self.node_scaler, self.vector_scaler)
        rows = [last_layer(m.network, data, self.preset.batch_nodes) for m in self.members]
        return np.hstack(rows) / np.float32(len(rows) ** 0.5)

    def _member_logs(self, graphs: Sequence[Graph], embeddings: FloatArray) -> Array:
        """log(value) according to each member (members, n, metrics)."""
        columns = [list(METRICS).index(metric) for metric in self.metrics]
        unit = self._row(self.scale)
        data = to_inputs(graphs, embeddings, self.node_scaler, self.vector_scaler)
        logs = np.empty((len(self.members), len(graphs), len(self.metrics)))
        for number, member in enumerate(self.members):
            logs[number] = self._row(member.levels)
            if graphs:
                outputs = network_outputs(member.network, data, self.preset.batch_nodes)
                logs[number] += unit * outputs[:, columns]
        return logs

    def _row(self, values: Mapping[str, float]) -> Array:
        return np.array([values[metric] for metric in self.metrics])

    def tensors(self) -> dict[str, Tensor]:
        """Everything learned, by name; with `settings` the input of `from_tensors`."""
        tensors = {**self.node_scaler.tensors("nodes"), **self.vector_scaler.tensors("vector")}
        for number, member in enumerate(self.members):
            for name, value in member.network.state_dict().items():
                tensors[f"member{number}.network.{name}"] = value
            for metric, level in member.levels.items():
                tensors[f"member{number}.level.{metric}"] = torch.tensor(level, dtype=torch.float64)
        return tensors

    def settings(self) -> dict[str, Any]:
        """The plain values that go beside `tensors`."""
        names = ("embedding_width", "scale", "noise", "stretch", "label_count")
        plain = {name: getattr(self, name) for name in names}
        return {
            "kind": KIND,
            **plain,
            "metrics": list(self.metrics),
            "members": len(self.members),
        }

    @classmethod
    def from_tensors(
        cls, preset: HeadPreset, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Self:
        """Raises KeyError, ValueError or RuntimeError for tensors that do not fit the settings."""
        unknown = set(settings["metrics"]) - set(METRICS)
        if unknown:
            raise ValueError(f"heads for an unknown metric: {', '.join(sorted(unknown))}")
        members = []
        for number in range(settings["members"]):
            with torch.device("meta"):  # no memory for weights that are replaced at once
                network = HeadNetwork(preset, settings["embedding_width"], len(METRICS))
            state = with_prefix(tensors, f"member{number}.network.")
            network.load_state_dict(state, assign=True)
            levels = {m: float(tensors[f"member{number}.level.{m}"]) for m in settings["metrics"]}
            members.append(Member(levels, network.eval().requires_grad_(False)))
        plain = {k: v for k, v in settings.items() if k not in {"kind", "metrics", "members"}}
        return cls(
            preset=preset,
            metrics=tuple(settings["metrics"]),
            members=tuple(members),
            node_scaler=Scaler.from_tensors(tensors, "nodes"),
            vector_scaler=Scaler.from_tensors(tensors, "vector"),
            **plain,
        )


def train_networks(
    workloads: Sequence[Workload],
    targets: Array,
    metrics: Sequence[str],
    groups: Sequence[str],
    preset: HeadPreset,
    generator: np.random.Generator,
    init: DeviceHeads | None,
    on_progress: OnProgress,
) -> NetworkHeads:
    """Trains networks on n labels, which `learner.heads.device_heads.train_heads` has checked.

    With `init` (TraPPM, Table V) they start from that device's and go on learning slowly.

    Raises:
        InputError: a workload without embedding, or an `init` of another preset or encoder.
    """
    graphs, embeddings = _inputs(workloads)
    if init is not None and not (
        isinstance(init, NetworkHeads)
        and (init.preset, init.embedding_width) == (preset, embeddings.shape[1])
    ):
        raise InputError(OTHER_START)
    with torch_seeded(generator):
        job = _Training(graphs, embeddings, np.log(targets), tuple(metrics), preset, init)
        return job.run(grouped_folds(groups, preset.members, generator), generator, on_progress)


def _inputs(workloads: Sequence[Workload]) -> tuple[list[Graph], FloatArray]:
    """Graphs (n) and their embeddings (n, width)."""
    rows = [w.embedding for w in workloads if w.embedding is not None]
    if len(rows) != len(workloads):
        raise InputError("a workload has no embedding, which networks need; encode its graph")
    width = len(rows[0]) if rows else 0
    embeddings = np.array(rows, dtype=np.float32).reshape(len(rows), width)
    return [workload.graph for workload in workloads], embeddings


class _Training:
    """The data of one training, and its steps."""

    def __init__(
        self,
        graphs: Sequence[Graph],
        embeddings: FloatArray,
        logs: Array,
        metrics: tuple[str, ...],
        preset: HeadPreset,
        init: NetworkHeads | None,
    ) -> None:
        self.logs = logs
        self.columns = {metric: list(METRICS).index(metric) for metric in metrics}
        self.preset = preset
        self.init = init
        self.embedding_width = embeddings.shape[1]
        self.mean_nodes = float(np.mean([graph.node_count for graph in graphs]))
        if init is None:
            self.node_scaler = fit_node_scaler(graphs)
            self.vector_scaler = Scaler.fit(join_vectors(graphs, embeddings))
        else:
            self.node_scaler = init.node_scaler
            self.vector_scaler = init.vector_scaler
        self.data = to_inputs(graphs, embeddings, self.node_scaler, self.vector_scaler)

    def run(
        self,
        folds: npt.NDArray[np.int64],
        generator: np.random.Generator,
        on_progress: OnProgress,
    ) -> NetworkHeads:
        """Trains a member for each fold, blind to it, and judges all of them by their folds."""
        count = int(folds.max()) + 1
        levels = np.stack([self._levels(folds != number) for number in range(count)])
        over_levels = self.logs - levels[:, None, :]  # (members, n, METRICS)
        scale = self._scale(over_levels[folds, np.arange(len(folds))])
        unit = np.array([scale.get(metric, 1.0) for metric in METRICS])
        members, outputs = [], []
        for number, level in enumerate(levels):
            network = self._new_network(number)
            train_network(
                network,
                self._with_targets(over_levels[number] / unit, folds != number),
                training=self.preset,
                fine_tune=self.init is not None,
                generator=generator,
                on_epoch=lambda done, epochs, n=number: on_progress(  # type: ignore[misc]
                    n * epochs + done, count * epochs
                ),
            )
            by_metric = {metric: float(level[at]) for metric, at in self.columns.items()}
            members.append(Member(by_metric, network))
            outputs.append(unit * network_outputs(network, self.data, self.preset.batch_nodes))
        return self._judge(members, scale, folds, over_levels, np.stack(outputs))

    def _levels(self, rows: npt.NDArray[np.bool_]) -> Array:
        """The median logarithm of each metric over these rows (METRICS); NaN without labels."""
        levels = np.full(len(METRICS), np.nan)
        for at in self.columns.values():
            known = ~np.isnan(self.logs[:, at])
            # A metric whose few labels all lie in this fold is better fitted on them than on none.
            use = known & rows if (known & rows).any() else known
            levels[at] = np.median(self.logs[use, at])
        return levels

    def _scale(self, unseen: Array) -> dict[str, float]:
        """The unit of each metric's outputs, from labels over the level of their own fold."""
        scale = {}
        for metric, at in self.columns.items():
            if self.init is not None and metric in self.init.metrics:
                scale[metric] = self.init.scale[metric]
            else:
                values = unseen[:, at]
                scale[metric] = max(robust_deviation(values[~np.isnan(values)]), LEAST_SCALE)
        return scale

    def _new_network(self, number: int) -> HeadNetwork:
        network = HeadNetwork(self.preset, self.embedding_width, len(METRICS))
        if self.init is None:
            network.mean_nodes.fill_(self.mean_nodes)
        else:
            source = self.init.members[number % len(self.init.members)].network
            network.load_state_dict(source.state_dict())
        return network

    def _with_targets(self, values: Array, rows: npt.NDArray[np.bool_]) -> list[Data]:
        chosen = []
        for index in np.flatnonzero(rows):
            data = self.data[index].clone()
            data.y = torch.from_numpy(values[index].astype(np.float32))[None, :]
            chosen.append(data)
        return chosen

    def _judge(
        self,
        members: list[Member],
        scale: dict[str, float],
        folds: npt.NDArray[np.int64],
        over_levels: Array,
        outputs: Array,
    ) -> NetworkHeads:
        """The heads, with noise and interval from the members' errors on their unseen folds.

        Labels over each member's level and the members' outputs are (members, n, METRICS).
        """
        rows = np.arange(len(folds))
        noise, stretch = {}, {}
        for metric, at in self.columns.items():
            known = ~np.isnan(self.logs[:, at])
            gaps = (over_levels - outputs)[:, known, at]
            errors = (over_levels - outputs)[folds, rows, at][known]
            noise[metric] = max(robust_deviation(errors), LEAST_NOISE)
            ratios = np.abs(errors) / np.hypot(noise[metric], gaps.std(axis=0))
            stretch[metric] = _upper_quantile(ratios, COVERAGE)
        return NetworkHeads(
            preset=self.preset,
            embedding_width=self.embedding_width,
            metrics=tuple(self.columns),
            members=tuple(members),
            node_scaler=self.node_scaler,
            vector_scaler=self.vector_scaler,
            scale=scale,
            noise=noise,
            stretch=stretch,
            label_count=len(self.logs),
        )


def _upper_quantile(values: Array, level: float) -> float:
    """The value that a new one stays below with this probability (split conformal prediction)."""
    rank = min(len(values), int(np.ceil((len(values) + 1) * level)))
    return float(np.sort(values)[rank - 1])


def _check_rows(name: str, values: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise InputError(f"{name} have shape {values.shape}; they must have shape {shape}")
