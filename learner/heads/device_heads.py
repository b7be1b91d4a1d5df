"""The heads of a device: for each metric with labels, physics and what physics leaves.

    memory                  simulated step (`learner.physics.memory_prior`), or the graph; on CPUs
                            live tensors and layers (`learner.physics.cpu`)
    step time               simulated kernels (`step_time_prior`) where they have been traced,
                            terms of the graph (`learner.physics.graph_prior`) elsewhere; on CPUs
                            a sum over the kernels
    power                   energies of the kernels over their simulated time (`power_prior`) where
                            they have been traced, terms of the graph elsewhere
    energy, others          terms of the graph

Each of them is a `learner.heads.metric_head`: prior, residual, calibrated interval. One frame for
training and
inference: the phase is part of a workload. The preset `paper` has TraPPM's networks instead
(`learner.heads.network_heads`), which know no physics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trappm.learner.estimator import Estimate, Targets
from trappm.learner.heads.metric_head import Head, Ours
from trappm.learner.heads.predictions import OTHER_START, DeviceHeads, Predictions, Settings
from trappm.learner.networks.presets import HeadPreset
from trappm.learner.physics.cpu.cpu_memory_prior import CpuMemoryPrior
from trappm.learner.physics.cpu.cpu_time_prior import CpuTimePrior
from trappm.learner.physics.devices.known_devices import known_devices
from trappm.learner.physics.graph_prior import GraphPrior
from trappm.learner.physics.memory_prior import MemoryPrior
from trappm.learner.physics.power.power_prior import PowerPrior
from trappm.learner.physics.prior import Prior
from trappm.learner.physics.starting_prior import OF_KERNELS, starting_prior
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.stats.folds import drawn_rows
from trappm.learner.tensors import with_prefix
from trappm.learner.threads import side_by_side
from trappm.learner.workload import Workload
from trappm.profiler.devices.capacity import USABLE_SHARE
from trappm.profiler.errors import InputError
from trappm.profiler.progress import OnProgress
from trappm.profiler.records import METRICS

if TYPE_CHECKING:
    from trappm.learner.physics.device_specs import DeviceSpec
    from trappm.learner.physics.devices.joint_fit import Evidence

Array = npt.NDArray[np.float64]

KIND = "physics"
_PARTS = ("of_kernels", "heads")
"""Of `Heads`; training begins with those of kernels, which take longest."""
LEAST_LABELS = 2
"""A metric with fewer values than this gets no head."""
MOST_TRACED = 1500
"""Labels with kernels that the head for workloads without kernels learns from, beside all those
without. Chosen for the time that training takes; what it loses by that was not measured."""

_KINDS: Mapping[str, type[Prior]] = {
    "graph": GraphPrior,
    "memory": MemoryPrior,
    "kernels": StepTimePrior,
    "power": PowerPrior,
    "cpu-memory": CpuMemoryPrior,
    "cpu-kernels": CpuTimePrior,
}
"""Priors by the name that a snapshot knows them by."""


@dataclass(frozen=True, eq=False)
class Heads:
    """The heads of one device, for training and inference."""

    heads: Mapping[str, Head[Prior]]
    """By metric: for all workloads."""
    of_kernels: Mapping[str, Head[Prior]]
    """By metric: for workloads with kernels, where there were labels of such."""
    label_count: int

    needs_embeddings = False

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(m for m in METRICS if m in self.heads or m in self.of_kernels)

    @property
    def needs_kernels(self) -> bool:
        return bool(self.of_kernels)

    def predict(self, workloads: Sequence[Workload]) -> Predictions:
        traced = all(w.kernels is not None for w in workloads)
        estimates = {
            metric: self._predict(metric, workloads)
            for metric in self.metrics
            if traced or metric in self.heads
        }

        def column(name: str, kind: type = float) -> Any:
            none = np.zeros(len(workloads))  # heads without labels know no distance from them
            values = [getattr(estimate, name) for estimate in estimates.values()]
            rows = [none if value is None else value for value in values]
            return np.array(rows, dtype=kind).reshape(len(rows), len(workloads)).T

        return Predictions(
            metrics=tuple(estimates),
            median=column("median"),
            low=column("low"),
            high=column("high"),
            log_std=column("log_std"),
            disagreement=column("log_std_of_mean"),
            outside=column("outside", bool),
            labels_end=column("labels_end"),
        )

    def out_of_memory(self, workloads: Sequence[Workload], capacity_mib: float) -> Array:
        """The probability that each of n workloads does not fit into a device's memory (n).

        Raises:
            InputError: there is no memory head.
        """
        if "memory_mib" not in self.heads:
            raise InputError("there are no labels of memory to predict what fits")
        return self.heads["memory_mib"].exceeding(workloads, USABLE_SHARE * capacity_mib)

    def gradients(self, workloads: Sequence[Workload]) -> npt.NDArray[np.float32]:
        """As `learner.heads.metric_head.Head.gradients`, of one metric after the other (n, g).

        Each metric has the same weight. Workloads that different heads predict have no direction in
        common.
        """
        blocks = []
        for metric in self.metrics:
            for rows, head in self._by_head(metric, workloads):
                if not len(rows):
                    continue
                part = head.gradients([workloads[i] for i in rows.tolist()])
                block = np.zeros((len(workloads), part.shape[1]), np.float32)
                block[rows] = part / max(float(np.linalg.norm(part, axis=1).mean()), 1e-9)
                blocks.append(block)
        return np.hstack(blocks)

    def _predict(self, metric: str, workloads: Sequence[Workload]) -> Estimate:
        by_head = self._by_head(metric, workloads)
        if len(by_head) == 1:
            return by_head[0][1].predict(workloads)
        parts = [(rows, h.predict([workloads[i] for i in rows.tolist()])) for rows, h in by_head]
        joined: dict[str, Any] = {}
        for name in (
            "median",
            "low",
            "high",
            "log_std",
            "log_std_of_mean",
            "outside",
            "labels_end",
        ):
            joined[name] = np.zeros(len(workloads), dtype=getattr(parts[0][1], name).dtype)
            for rows, estimate in parts:
                joined[name][rows] = getattr(estimate, name)
        return Estimate(**joined)

    def _by_head(
        self, metric: str, workloads: Sequence[Workload]
    ) -> list[tuple[npt.NDArray[np.int64], Head[Prior]]]:
        """The heads of a metric, each with the rows that it predicts: that of kernels where there
        are some. A head for all workloads predicts the empty list, too."""
        plain, better = self.heads.get(metric), self.of_kernels.get(metric)
        traced = np.array([w.kernels is not None and better is not None for w in workloads])
        parts = []
        if better is not None and (traced.any() or plain is None):
            parts.append((np.flatnonzero(traced), better))
        if plain is not None and not (parts and traced.all()):
            parts.append((np.flatnonzero(~traced.astype(bool)), plain))
        return parts

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"{part}.{metric}.{name}": tensor
            for part, heads in self._parts()
            for metric, head in heads.items()
            for name, tensor in head.tensors().items()
        }

    def settings(self) -> dict[str, Any]:
        parts = {
            part: {metric: _kind_of(head.prior) for metric, head in sorted(heads.items())}
            for part, heads in self._parts()
        }
        return {
            "kind": KIND,
            "metrics": list(self.metrics),
            "label_count": self.label_count,
            **parts,
        }

    def _parts(self) -> tuple[tuple[str, Mapping[str, Head[Prior]]], ...]:
        return ("heads", self.heads), ("of_kernels", self.of_kernels)

    @classmethod
    def from_tensors(cls, settings: Settings, tensors: Mapping[str, Tensor]) -> Self:
        """Raises KeyError, TypeError or ValueError for tensors that do not fit the settings."""
        heads: dict[str, dict[str, Head[Prior]]] = {}
        for part in ("heads", "of_kernels"):
            unknown = set(settings[part]) - set(METRICS)
            if unknown:
                raise ValueError(f"heads for an unknown metric: {', '.join(sorted(unknown))}")
            heads[part] = {
                metric: Head.from_tensors(_KINDS[kind], with_prefix(tensors, f"{part}.{metric}."))
                for metric, kind in settings[part].items()
            }
        return cls(**heads, label_count=int(settings["label_count"]))


def heads_from_tensors(
    preset: HeadPreset, settings: Settings, tensors: Mapping[str, Tensor]
) -> DeviceHeads:
    """The heads that `settings` and `tensors` of any kind of heads describe.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: tensors that do not fit the settings.
    """
    if settings["kind"] == KIND:
        return Heads.from_tensors(settings, tensors)
    from trappm.learner.heads.network_heads import KIND as NETWORKS
    from trappm.learner.heads.network_heads import NetworkHeads

    if settings["kind"] != NETWORKS:
        raise ValueError(f"an unknown kind of heads: {settings['kind']!r}")
    return NetworkHeads.from_tensors(preset, settings, tensors)


def train_heads(
    workloads: Sequence[Workload],
    targets: Array,
    *,
    groups: Sequence[str],
    preset: HeadPreset,
    generator: np.random.Generator,
    above: Array | None = None,
    spec: DeviceSpec | None = None,
    evidence: Sequence[Evidence] = (),
    init: DeviceHeads | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> DeviceHeads:
    """Trains heads on n labels, from scratch or from the heads of another device.

    Args:
        workloads: the labelled ones (n).
        targets: (n, metrics) in the order of METRICS and in their units; NaN where missing.
        groups: the architecture of each label (n); folds never divide one.
        preset: `physical_prior` decides between our heads and the paper's networks.
        generator: all randomness comes from it.
        above: lower bounds (n, metrics) for runs that died of memory; NaN elsewhere. Networks
            leave them out.
        spec: of the device; without one kernels predict no step time.
        evidence: kernels of the device alone, which say of its step time what they can.
        init: heads of another device, near which constants are refitted (TraPPM, Table V).
        on_progress: called with parts done and parts in all: metrics, or a network's steps.

    Raises:
        InputError: shapes, values or a start that do not fit, or no metric with labels.
    """
    bounds = np.full_like(targets, np.nan) if above is None else above
    metrics = _metrics_with_labels(workloads, targets, bounds, groups)
    if not preset.physical_prior:
        from trappm.learner.heads.network_heads import train_networks

        return train_networks(
            workloads, targets, metrics, groups, preset, generator, init, on_progress
        )
    if init is not None and not isinstance(init, Heads):
        raise InputError(OTHER_START)
    # A head draws from its own generator: it is the same whichever others are trained beside it.
    names = list(product(_PARTS, METRICS))
    generators = dict(zip(names, generator.spawn(len(names)), strict=True))
    heads: dict[str, dict[str, Head[Prior]]] = {part: {} for part in _PARTS}

    def train(task: tuple[str, str, Prior, bool]) -> Head[Prior] | None:
        part, metric, prior, other_head = task
        at = list(METRICS).index(metric)
        labels = Targets(targets[:, at], bounds[:, at], groups)
        start = None if init is None else getattr(init, part).get(metric)
        if start is not None and type(start.prior) is not type(prior):
            start = None  # another formula: a GPU's constants tell nothing of a CPU
        rows = _rows_of(part, workloads, labels, other_head=other_head)
        return _train_head(rows, workloads, labels, prior, generators[part, metric], start)

    # Power goes by what labels have taught of step times, so it waits for these.
    power = [metric for metric in metrics if metric == "power_w"]
    done = 0
    for together in ([metric for metric in metrics if metric not in power], power):
        priors = {m: _priors(m, spec, evidence, heads["of_kernels"]) for m in together}
        tasks = [
            (part, metric, priors[metric][part], len(priors[metric]) > 1)
            for part, metric in product(_PARTS, together)
            if part in priors[metric]
        ]
        for (part, metric, *_), head in zip(tasks, side_by_side(train, tasks), strict=True):
            if head is not None:
                heads[part][metric] = head
            if part == "heads":  # the last of a metric, which each has
                done += 1
                on_progress(done, len(metrics))
    return Heads(**heads, label_count=len(workloads))


def _rows_of(
    part: str, workloads: Sequence[Workload], labels: Targets, *, other_head: bool
) -> list[int]:
    """The labels with a value or a bound that a part of the heads learns from.

    The part `of_kernels` learns from workloads that come with their kernels; where it exists, the
    other one, which predicts workloads without, needs some of these only.
    """
    known = ~(np.isnan(labels.values) & np.isnan(labels.above))
    traced = np.array([w.kernels is not None for w in workloads], dtype=bool) & known
    if part == "of_kernels":
        known = traced
    elif other_head and traced.sum() > MOST_TRACED:
        positions = np.flatnonzero(traced)
        known[np.delete(positions, drawn_rows(len(positions), MOST_TRACED))] = False
    rows: list[int] = np.flatnonzero(known).tolist()
    return rows


def _train_head(
    rows: Sequence[int],
    workloads: Sequence[Workload],
    labels: Targets,
    prior: Prior,
    generator: np.random.Generator,
    start: Head[Prior] | None,
) -> Head[Prior] | None:
    """A head of these labels; None where too few have a value."""
    if np.count_nonzero(~np.isnan(labels.values[rows])) < LEAST_LABELS:
        return None
    own = Targets(labels.values[rows], labels.above[rows], [labels.groups[i] for i in rows])
    return Ours(prior).fit([workloads[i] for i in rows], own, generator, start)


def _priors(
    metric: str,
    spec: DeviceSpec | None,
    evidence: Sequence[Evidence],
    of_kernels: Mapping[str, Head[Prior]],
) -> dict[str, Prior]:
    """What explains a metric before labels do, by the part of the heads that it belongs to.

    Power goes by the step times that labels have taught before it.
    """
    priors = {"heads": starting_prior(metric, spec, kernels=False)}
    better = starting_prior(metric, spec, kernels=True)
    if isinstance(better, OF_KERNELS):
        if evidence and isinstance(better, StepTimePrior):
            better = StepTimePrior.like_others(better.spec, known_devices(), evidence)
        priors["of_kernels"] = better
    times = of_kernels.get("step_time_ms")
    if metric == "power_w" and times is not None and isinstance(times.prior, StepTimePrior):
        priors["of_kernels"] = PowerPrior.with_times(times.prior)
    return priors


def _kind_of(prior: Prior) -> str:
    return next(name for name, kind in _KINDS.items() if isinstance(prior, kind))


def _metrics_with_labels(
    workloads: Sequence[Workload], targets: Array, above: Array, groups: Sequence[str]
) -> list[str]:
    """The metrics with labels enough for a head.

    Raises:
        InputError: there is none, or labels that are not what `train_heads` needs.
    """
    shape = (len(workloads), len(METRICS))
    for name, values in (("targets", targets), ("bounds", above)):
        if values.shape != shape:
            raise InputError(f"{name} have shape {values.shape}; they must have shape {shape}")
        known = values[~np.isnan(values)]
        if not (np.all(known > 0) and np.all(np.isfinite(known))):
            raise InputError("a label is zero, negative or infinite; a missing one must be NaN")
    if len(groups) != len(workloads):
        raise InputError(f"groups have shape ({len(groups)},); they must have shape {shape[:1]}")
    counts = np.count_nonzero(~np.isnan(targets), axis=0)
    metrics = [m for m, count in zip(METRICS, counts, strict=True) if count >= LEAST_LABELS]
    if not metrics:
        raise InputError(
            f"{len(workloads)} labels are too few: each metric needs {LEAST_LABELS} or more"
        )
    return metrics
