"""Heads of a device: one per metric, each with prior, residual and calibrated interval.

    step time   simulated kernels (`step_time`), on CPUs a sum over the kernels
    memory      simulated step (`memory`), on CPUs live tensors and layers (`cpu`)
    power       energies of the kernels over their simulated time (`power`)

Step time and power use terms of the graph (`graph_prior`) where most labels have no kernels, and
power on CPUs. Heads serve training and inference: the phase is part of a workload. The preset
`paper` has TraPPM's networks instead (`learner.heads.network_heads`), which know no physics.

Heads of a device are trained in parallel, one thread with one core each: matrix products release
the global interpreter lock (docs/research/design_notes.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from trappm.learner.heads.metric_head import OF_KERNELS, Head, Ours, starting_prior
from trappm.learner.interface import (
    OTHER_START,
    Array,
    DeviceHeads,
    Predictions,
    Settings,
    Targets,
    Workload,
    joined_tensors,
    predictions_of,
    with_prefix,
)
from trappm.learner.paper.presets import HeadPreset
from trappm.learner.physics.cpu_priors import CpuMemoryPrior, CpuTimePrior
from trappm.learner.physics.devices.known_devices import known_devices
from trappm.learner.physics.graph_prior import GraphPrior
from trappm.learner.physics.memory import MemoryPrior
from trappm.learner.physics.power import PowerPrior
from trappm.learner.physics.prior import Prior
from trappm.learner.physics.step_time import StepTimePrior
from trappm.profiler.devices.catalogue import USABLE_SHARE, process_memory_mib
from trappm.profiler.errors import InputError
from trappm.profiler.memory.training_loop import Loop
from trappm.profiler.records import METRICS, OnProgress, Phase

if TYPE_CHECKING:
    from trappm.profiler.devices.catalogue import DeviceSpec

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Yield the result of `work` for each item, in order, with one thread per core.

    Items must not share a random generator, so that results do not depend on the number of cores.
    Exceptions of `work` propagate after the running items have finished.
    """
    if items:
        with _ONE_THREAD.held(), ThreadPoolExecutor(os.cpu_count() or 1, "trappm-learner") as pool:
            yield from pool.map(work, items)


class _OneThread:
    """Reference-counted limit of one thread per matrix product in this process.

    Thread numbers belong to the whole process: the first holder lowers them, the last restores
    them.
    """

    def __init__(self) -> None:
        self._lock, self._holders, self._restore = Lock(), 0, ExitStack()

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._restore.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(1)
                self._restore.enter_context(threadpool_limits(1))
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self._restore.close()


_ONE_THREAD = _OneThread()


KIND = "physics"
LEAST_LABELS = 2
"""A metric with fewer values than this gets no head."""

_KINDS: Mapping[str, type[Prior]] = {
    "graph": GraphPrior,
    "memory": MemoryPrior,
    "kernels": StepTimePrior,
    "power": PowerPrior,
    "cpu-memory": CpuMemoryPrior,
    "cpu-kernels": CpuTimePrior,
}
"""Priors by their name in a snapshot."""
_NEED_KERNELS = (*OF_KERNELS, PowerPrior)


@dataclass(frozen=True, eq=False)
class Heads:
    """Heads of one device, for training and inference."""

    heads: Mapping[str, Head[Prior]]
    """Heads by metric."""
    label_count: int
    memory_loop: Loop = Loop.PLAIN
    """Training loop of the memory's labels: our protocol's, unless others published them."""

    needs_embeddings = False

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(metric for metric in METRICS if metric in self.heads)

    @property
    def needs_kernels(self) -> bool:
        return any(isinstance(head.prior, _NEED_KERNELS) for head in self.heads.values())

    def only(self, metric: str) -> Self:
        """Return the head of one metric alone."""
        return replace(self, heads={metric: self.heads[metric]})

    def predict(self, workloads: Sequence[Workload]) -> Predictions:
        """Predict the metrics that all workloads have what it takes for."""
        heads = {
            metric: self.heads[metric]
            for metric in self.metrics
            if all(_is_for(self.heads[metric], workload) for workload in workloads)
        }
        with _ONE_THREAD.held():  # threads that wait for each other take longer than the products
            estimates = [head.predict(workloads) for head in heads.values()]
        return predictions_of(tuple(heads), estimates, len(workloads))

    def out_of_memory(self, workloads: Sequence[Workload], capacity_mib: float | Array) -> Array:
        """Return the probability that each of n workloads exceeds a device's memory (n).

        Args:
            workloads: Any steps.
            capacity_mib: Memory of the device, or of one for each workload (n).

        Raises:
            InputError: There is no memory head.
        """
        if "memory_mib" not in self.heads:
            raise InputError("there are no labels of memory to predict what fits")
        return self.heads["memory_mib"].exceeding(workloads, USABLE_SHARE * capacity_mib)

    def has_labels_of(self, metric: str) -> bool:
        """Return whether labels have a part in the predictions of a metric."""
        return metric in self.heads and self.heads[metric].familiarity is not None

    def of_published_labels(self, device: str, phase: Phase) -> Self:
        """Return heads that predict the memory of a plain process, and know their labels' loop.

        Labels that others published may contain more than the step and its process: monitoring,
        other processes, old libraries.
        """
        head = self.heads.get("memory_mib")
        if head is None or not isinstance(head.prior, MemoryPrior):
            return self
        excess_mib = head.prior.process_mib(phase) - process_memory_mib(device, phase)
        heads = {**self.heads, "memory_mib": replace(head, excess=excess_mib)}
        return replace(self, heads=heads, memory_loop=head.prior.loop)

    def tensors(self) -> dict[str, Tensor]:
        return joined_tensors(self.heads)

    def settings(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "metrics": list(self.metrics),
            "label_count": self.label_count,
            "heads": {metric: _kind_of(head.prior) for metric, head in sorted(self.heads.items())},
        }

    @classmethod
    def from_tensors(cls, settings: Settings, tensors: Mapping[str, Tensor]) -> Self:
        """Return the heads that `settings` and `tensors` describe.

        Raises:
            KeyError, TypeError, ValueError: The tensors do not fit the settings.
        """
        unknown = set(settings["heads"]) - set(METRICS)
        if unknown:
            raise ValueError(f"heads for an unknown metric: {', '.join(sorted(unknown))}")
        heads = {
            metric: Head.from_tensors(_KINDS[kind], with_prefix(tensors, f"{metric}."))
            for metric, kind in settings["heads"].items()
        }
        return cls(heads, int(settings["label_count"]))


def _is_for(head: Head[Prior], workload: Workload) -> bool:
    return workload.kernels is not None or not isinstance(head.prior, _NEED_KERNELS)


def heads_from_tensors(
    preset: HeadPreset, settings: Settings, tensors: Mapping[str, Tensor]
) -> DeviceHeads:
    """Return the heads that `settings` and `tensors` of any kind of heads describe.

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
    errors: Array | None = None,
    spec: DeviceSpec | None = None,
    similar: Tensor | None = None,
    init: DeviceHeads | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> DeviceHeads:
    """Train heads on n labels, from scratch or from the heads of another device.

    Args:
        workloads: Labelled workloads (n).
        targets: Values in the order of METRICS and in their units (n, metrics); NaN where missing.
        groups: Architecture of each label (n); folds never divide one.
        preset: `physical_prior` decides between our heads and the paper's networks.
        generator: Source of all randomness.
        above: Lower bounds for runs out of memory (n, metrics); NaN elsewhere. Networks do not use
            them, nor `errors`.
        errors: Relative standard errors of the targets (n, metrics).
        spec: Specification of the device; without one, kernels predict no step time.
        similar: Step-time constants of the most similar card, where few labels are fitted from.
        init: Heads of another device, near which constants are refitted (TraPPM, Table V).
        on_progress: Called with the number of finished metrics, or of a network's steps.

    Raises:
        InputError: Shapes, values or `init` do not fit, or no metric has enough labels.
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
    # A head has a generator of its own: it does not depend on which others are trained.
    generators = dict(zip(METRICS, generator.spawn(len(METRICS)), strict=True))
    heads: dict[str, Head[Prior]] = {}

    def train(metric: str) -> Head[Prior]:
        at = list(METRICS).index(metric)
        values, limits = targets[:, at], bounds[:, at]
        rows = np.flatnonzero(~(np.isnan(values) & np.isnan(limits)))
        traced = np.array([workloads[i].kernels is not None for i in rows.tolist()])
        prior = _prior(metric, spec, similar, heads, kernels=2 * traced.sum() >= len(rows))
        if isinstance(prior, _NEED_KERNELS):
            rows = rows[traced]
        own = Targets(
            values[rows],
            limits[rows],
            [groups[i] for i in rows.tolist()],
            None if errors is None else errors[rows, at],
        )
        start = None if init is None else init.heads.get(metric)
        if start is not None and type(start.prior) is not type(prior):
            start = None  # constants of another formula, such as a GPU's for a CPU
        chosen = [workloads[i] for i in rows.tolist()]
        return Ours(prior).fit(chosen, own, generators[metric], start)

    # Power needs the step times that labels have taught, so it waits for these.
    power = [metric for metric in metrics if metric == "power_w"]
    for together in ([metric for metric in metrics if metric not in power], power):
        for metric, head in zip(together, side_by_side(train, together), strict=True):
            heads[metric] = head
            on_progress(len(heads), len(metrics))
    return Heads(heads, len(workloads))


def _prior(
    metric: str,
    spec: DeviceSpec | None,
    similar: Tensor | None,
    heads: Mapping[str, Head[Prior]],
    *,
    kernels: bool,
) -> Prior:
    """Return the prior of a metric without labels.

    Args:
        metric: Column of the metric.
        spec: Specification of the device, if known.
        similar: Step-time constants of the most similar card, if known (c).
        heads: Heads of the metrics that were trained before.
        kernels: Whether to use the labels' kernels.
    """
    times = heads.get("step_time_ms")
    if metric == "power_w" and kernels and times and isinstance(times.prior, StepTimePrior):
        return PowerPrior.with_times(times.prior)
    prior = starting_prior(metric, spec, kernels=kernels)
    if similar is not None and isinstance(prior, StepTimePrior):
        return StepTimePrior(prior.spec, similar, between=known_devices().spreads)
    return prior


def _kind_of(prior: Prior) -> str:
    return next(name for name, kind in _KINDS.items() if isinstance(prior, kind))


def _metrics_with_labels(
    workloads: Sequence[Workload], targets: Array, above: Array, groups: Sequence[str]
) -> list[str]:
    """Return the metrics with enough labels for a head.

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
