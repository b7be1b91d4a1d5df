"""The heads of a device: from a graph and its embedding to step time, memory and power.

Everything happens in the logarithm, so that an error is relative and no sample loses its size:

    log y = log prior(graph)  +  share * network(graph, embedding, static features)

The prior (`learner.physics`) is what a few labels can fit; the network (`learner.regressor`, the
paper's) learns what the prior leaves. There are several such pairs (a deep ensemble,
Lakshminarayanan et al. 2017). Each is trained without one fold of the architectures, and the errors
that it makes there set two things: the share of the networks' word that is worth taking, and how
wide an interval must be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch_geometric.data import Data

from learner.dataset import (
    FloatArray,
    Scaler,
    fit_node_scaler,
    join_vectors,
    to_inputs,
    with_prefix,
)
from learner.physics import LEVEL_ONLY, PRIORS, PriorSpec, fit_coefficients, log_prior, term_matrix
from learner.presets import HeadPreset
from learner.randomness import torch_seeded
from learner.regressor import HeadNetwork, network_outputs, train_network
from profiler.errors import InputError
from profiler.records import METRICS, Graph

Array = npt.NDArray[np.float64]
OnProgress = Callable[[int, int], None]

COVERAGE = 0.9
"""Share of new architectures whose value an interval should contain."""

LEAST_LABELS = 2
"""A metric with fewer labels than this gets no head."""

TRANSFER_TIGHTNESS = 0.3
"""On a new device single coefficients of the prior move this much less than on an unknown one."""

SHARE_PSEUDO_LABELS = 5.0
"""The share starts from a first guess that weighs as much as so many labels."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """What the heads say of n graphs; every array is (n, metrics)."""

    metrics: tuple[str, ...]
    mean: Array
    """In the metric's unit."""
    low: Array
    """Lower bound of the 90 % interval."""
    high: Array
    log_std: Array
    """Deviation of log(value): the disagreement and the error on architectures not seen."""
    disagreement: Array
    """Deviation of log(value) among the members: what more labels can remove."""


@dataclass(frozen=True, eq=False)
class Member:
    """One pair of prior coefficients and network, both blind to one fold of the architectures."""

    coefficients: Mapping[str, Array]
    """For each metric, the log coefficients of the prior's terms (k)."""
    network: HeadNetwork


@dataclass(frozen=True, eq=False)
class Heads:
    """The trained heads of one device."""

    preset: HeadPreset
    embedding_width: int
    metrics: tuple[str, ...]
    """The metrics that had labels, in the order of METRICS."""
    members: tuple[Member, ...]
    node_scaler: Scaler
    vector_scaler: Scaler
    scale: Mapping[str, float]
    """The unit of the networks' outputs: the deviation of the log that the prior left."""
    share: Mapping[str, float]
    """How much of the networks' word to take (0 to 1)."""
    noise: Mapping[str, float]
    """Deviation of the log errors on the folds that a member did not see."""
    stretch: Mapping[str, float]
    """Half the width of the interval in the logarithm, in units of `log_std`."""
    label_count: int

    def predict(self, graphs: Sequence[Graph], embeddings: FloatArray) -> Predictions:
        """Predictions for n graphs with their embeddings (n, width).

        Raises:
            InputError: the embeddings are not one row of the right width for each graph.
        """
        _check_rows("embeddings", embeddings, (len(graphs), self.embedding_width))
        logs = self._member_logs(graphs, embeddings)
        middle, disagreement = logs.mean(axis=0), logs.std(axis=0)
        log_std = np.sqrt(disagreement**2 + self._row(self.noise) ** 2)
        half_width = self._row(self.stretch) * log_std
        return Predictions(
            metrics=self.metrics,
            mean=np.exp(middle),
            low=np.exp(middle - half_width),
            high=np.exp(middle + half_width),
            log_std=log_std,
            disagreement=disagreement,
        )

    def _member_logs(self, graphs: Sequence[Graph], embeddings: FloatArray) -> Array:
        """log(value) according to each member (members, n, metrics)."""
        columns = [list(METRICS).index(metric) for metric in self.metrics]
        unit = self._row(self.share) * self._row(self.scale)
        terms = _terms(graphs, self.metrics, self.preset)
        data = to_inputs(graphs, embeddings, self.node_scaler, self.vector_scaler)
        logs = np.empty((len(self.members), len(graphs), len(self.metrics)))
        for number, member in enumerate(self.members):
            for column, metric in enumerate(self.metrics):
                logs[number, :, column] = log_prior(terms[metric], member.coefficients[metric])
            if np.any(unit > 0) and graphs:
                learned = network_outputs(member.network, data, self.preset.batch_nodes)
                logs[number] += unit * learned[:, columns]
        return logs

    def _row(self, values: Mapping[str, float]) -> Array:
        return np.array([values[metric] for metric in self.metrics])

    def tensors(self) -> dict[str, Tensor]:
        """Everything learned, by name; with `settings` the input of `from_tensors`."""
        found = {**self.node_scaler.tensors("nodes"), **self.vector_scaler.tensors("vector")}
        for number, member in enumerate(self.members):
            for name, value in member.network.state_dict().items():
                found[f"member{number}.network.{name}"] = value
            for metric, coefficients in member.coefficients.items():
                found[f"member{number}.prior.{metric}"] = torch.from_numpy(coefficients.copy())
        return found

    def settings(self) -> dict[str, Any]:
        """The plain values that go beside `tensors`."""
        names = ("embedding_width", "scale", "share", "noise", "stretch", "label_count")
        plain = {name: getattr(self, name) for name in names}
        return {**plain, "metrics": list(self.metrics), "members": len(self.members)}

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
            coefficients = {
                m: tensors[f"member{number}.prior.{m}"].numpy() for m in settings["metrics"]
            }
            members.append(Member(coefficients, network.eval().requires_grad_(False)))
        plain = {k: v for k, v in settings.items() if k not in {"metrics", "members"}}
        return cls(
            preset=preset,
            metrics=tuple(settings["metrics"]),
            members=tuple(members),
            node_scaler=Scaler.from_tensors(tensors, "nodes"),
            vector_scaler=Scaler.from_tensors(tensors, "vector"),
            **plain,
        )


def train_heads(
    graphs: Sequence[Graph],
    embeddings: FloatArray,
    targets: Array,
    *,
    groups: Sequence[str],
    preset: HeadPreset,
    generator: np.random.Generator,
    init: Heads | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> Heads:
    """Trains heads on n labels, from scratch or from the heads of another device.

    With `init` (TraPPM, Table V), prior and networks start from that device's: the prior's
    coefficients are refitted close to them, except for their common level, and the networks go on
    learning slowly.

    Args:
        graphs: the labelled graphs (n).
        embeddings: by the frozen encoder (n, width).
        targets: (n, metrics) in the order of METRICS and in their units; NaN where missing.
        groups: the architecture of each graph (n); folds never divide one.
        preset: sizes and training settings; must equal those of `init`.
        generator: all randomness comes from it.
        init: heads of another device to start from.
        on_progress: told after each epoch of each network.

    Raises:
        InputError: shapes that do not fit, values that are not positive, or no metric with labels.
    """
    n = len(graphs)
    _check_rows("embeddings", embeddings, (n, embeddings.shape[-1]))
    _check_rows("targets", targets, (n, len(METRICS)))
    _check_rows("groups", np.array(groups), (n,))
    known = ~np.isnan(targets)
    if not np.all(targets[known] > 0) or not np.all(np.isfinite(targets[known])):
        raise InputError("a label is zero, negative or infinite; a missing one must be NaN")
    metrics = tuple(
        m for i, m in enumerate(METRICS) if known[:, i].sum() >= LEAST_LABELS
    )  # fmt: skip
    if not metrics:
        raise InputError(f"{n} labels are too few: each metric needs {LEAST_LABELS} or more")
    if init is not None and (init.preset, init.embedding_width) != (preset, embeddings.shape[1]):
        raise InputError("the heads to start from were made with another preset or encoder")
    with torch_seeded(generator):
        job = _Training(graphs, embeddings, np.log(targets), metrics, preset, init)
        return job.run(_folds(groups, preset.members, generator), generator, on_progress)


class _Training:
    """The data of one training, and its steps."""

    def __init__(
        self,
        graphs: Sequence[Graph],
        embeddings: FloatArray,
        logs: Array,
        metrics: tuple[str, ...],
        preset: HeadPreset,
        init: Heads | None,
    ) -> None:
        self.logs, self.metrics, self.preset, self.init = logs, metrics, preset, init
        self.embedding_width = embeddings.shape[1]
        self.mean_nodes = float(np.mean([graph.node_count for graph in graphs]))
        self.terms = _terms(graphs, metrics, preset)
        if init is None:
            self.node_scaler = fit_node_scaler(graphs)
            self.vector_scaler = Scaler.fit(join_vectors(graphs, embeddings))
        else:
            self.node_scaler, self.vector_scaler = init.node_scaler, init.vector_scaler
        self.data = to_inputs(graphs, embeddings, self.node_scaler, self.vector_scaler)

    def run(
        self,
        folds: npt.NDArray[np.int64],
        generator: np.random.Generator,
        on_progress: OnProgress,
    ) -> Heads:
        count = int(folds.max()) + 1
        epochs = self.preset.epochs if self.init is None else self.preset.fine_tune_epochs
        done = 0

        def on_epoch() -> None:
            nonlocal done
            done += 1
            on_progress(done, count * epochs)

        priors = [self._fit_prior(number, folds != number) for number in range(count)]
        left = np.stack([self._left_by(prior) for prior in priors])  # (members, n, METRICS)
        unseen = left[folds, np.arange(len(folds))]
        scale = self._scale(unseen)
        unit = np.array([scale.get(metric, 1.0) for metric in METRICS])
        members, words = [], []
        for number, prior in enumerate(priors):
            network = self._new_network(number)
            training = self._with_targets(left[number] / unit, folds != number)
            train_network(
                network,
                training,
                epochs=epochs,
                learning_rate=(
                    self.preset.learning_rate
                    if self.init is None
                    else self.preset.fine_tune_learning_rate
                ),
                preset=self.preset,
                generator=generator,
                on_epoch=on_epoch,
            )
            members.append(Member(prior, network))
            words.append(unit * network_outputs(network, self.data, self.preset.batch_nodes))
        return self._judge(members, scale, folds, left, np.stack(words))

    def _fit_prior(self, number: int, rows: npt.NDArray[np.bool_]) -> dict[str, Array]:
        found = {}
        for metric in self.metrics:
            logs = self.logs[:, list(METRICS).index(metric)]
            known = ~np.isnan(logs)
            # A metric whose few labels all lie in this fold is better fitted on them than on none.
            use = known & rows if (known & rows).any() else known
            source = None
            if self.init is not None and metric in self.init.metrics:
                source = self.init.members[number % len(self.init.members)].coefficients[metric]
            found[metric] = fit_coefficients(
                self.terms[metric][use],
                logs[use],
                _prior_spec(metric, self.preset),
                centre=source,
                tightness=1.0 if source is None else TRANSFER_TIGHTNESS,
            )
        return found

    def _left_by(self, prior: Mapping[str, Array]) -> Array:
        """What the prior leaves of each label's logarithm (n, METRICS); NaN where missing."""
        left = np.full_like(self.logs, np.nan)
        for metric, coefficients in prior.items():
            column = list(METRICS).index(metric)
            left[:, column] = self.logs[:, column] - log_prior(self.terms[metric], coefficients)
        return left

    def _scale(self, unseen: Array) -> dict[str, float]:
        found = {}
        for metric in self.metrics:
            if self.init is not None and metric in self.init.metrics:
                found[metric] = self.init.scale[metric]
            else:
                left = unseen[:, list(METRICS).index(metric)]
                found[metric] = max(_robust_deviation(left[~np.isnan(left)]), 0.02)
        return found

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
        left: Array,
        words: Array,
    ) -> Heads:
        """The heads, with what the members' errors on their unseen folds say of them.

        `left` and `words` are what priors leave and networks say of it (members, n, METRICS).
        """
        rows = np.arange(len(folds))
        share, noise, stretch = {}, {}, {}
        for metric in self.metrics:
            column = list(METRICS).index(metric)
            known = ~np.isnan(self.logs[:, column])
            unseen = left[folds, rows, column][known]
            word = words[folds, rows, column][known]
            share[metric] = self._share(metric, unseen, word)
            errors = unseen - share[metric] * word
            noise[metric] = max(_robust_deviation(errors), 0.005)
            disagreement = (left - share[metric] * words)[:, known, column].std(axis=0)
            ratios = np.abs(errors) / np.hypot(noise[metric], disagreement)
            stretch[metric] = _upper_quantile(ratios, COVERAGE)
        return Heads(
            preset=self.preset,
            embedding_width=self.embedding_width,
            metrics=self.metrics,
            members=tuple(members),
            node_scaler=self.node_scaler,
            vector_scaler=self.vector_scaler,
            scale=scale,
            share=share,
            noise=noise,
            stretch=stretch,
            label_count=len(self.logs),
        )

    def _share(self, metric: str, left: Array, word: Array) -> float:
        """The share with the least absolute error on unseen folds, from a cautious first guess."""
        if not self.preset.physical_prior:
            return 1.0
        guess = 0.0 if self.init is None else self.init.share.get(metric, 0.0)
        caution = SHARE_PSEUDO_LABELS * float(np.mean(np.abs(word)))
        shares = np.linspace(0.0, 1.0, 21)
        losses = [np.abs(left - s * word).sum() + caution * abs(s - guess) for s in shares]
        return float(shares[int(np.argmin(losses))])


def _terms(graphs: Sequence[Graph], metrics: Sequence[str], preset: HeadPreset) -> dict[str, Array]:
    if preset.physical_prior:
        return {metric: term_matrix(graphs, metric) for metric in metrics}
    return {metric: np.ones((len(graphs), 1)) for metric in metrics}


def _prior_spec(metric: str, preset: HeadPreset) -> PriorSpec:
    return PRIORS[metric] if preset.physical_prior else LEVEL_ONLY


def _folds(
    groups: Sequence[str], count: int, generator: np.random.Generator
) -> npt.NDArray[np.int64]:
    """The fold of each label (n): architectures dealt out at random, none divided.

    Labels of one single architecture are dealt out one by one: near-copies are better than nothing.
    """
    names, number = np.unique(np.array(groups), return_inverse=True)
    if len(names) == 1:
        number = np.arange(len(groups))
    order = generator.permutation(int(number.max()) + 1)
    return (order[number] % min(count, len(order))).astype(np.int64)


def _robust_deviation(values: Array) -> float:
    """Deviation of the middle half, as of a normal distribution around zero."""
    return 1.4826 * float(np.median(np.abs(values)))


def _upper_quantile(values: Array, level: float) -> float:
    """The conformal quantile: the value that a new one stays below with this probability."""
    rank = min(len(values), int(np.ceil((len(values) + 1) * level)))
    return float(np.sort(values)[rank - 1])


def _check_rows(name: str, values: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise InputError(f"{name} have shape {values.shape}; they must have shape {shape}")
