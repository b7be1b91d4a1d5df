"""Heads of devices: one per metric, each with a physical prior, a residual and an interval.

    log value = prior (a formula with few constants) + residual (learned) +- calibrated interval

    step time   simulated kernels (`step_time`), on CPUs a sum over the kernels (`cpu_priors`)
    memory      simulated step (`memory`), on CPUs live tensors and layers
    power       energies of the kernels over their simulated time (`power`)

Step time and power use terms of the graph (`graph_prior`) where most labels have no kernels, and
power on CPUs. Heads serve training and inference: the phase is part of a workload. The preset
`paper` has TraPPM's networks instead (`learner.heads.network_heads`), which know no physics.

A prior is fitted on all labels, and again without each fold of the architectures, so that the
residual and the interval learn from out-of-fold errors. A head can start from another device's: its
constants are where this device's begin, and its residual is added by the share that fits here.

Heads of a device are trained in parallel, one thread with one core each: matrix products
release the global interpreter lock (docs/research/design_notes.md).

**Cards without labels** have heads without a residual (`OtherDevices`), from common constants of
other cards and the data sheet:

    step time   constants by what others published of the card: steps too few for a head, or kernels
                alone; else those of the most similar card with steps
    memory      simulated allocations, and the other memory of a process of today's software

Their intervals are quantiles of the errors on cards held out as a whole, or on architectures held
out where the card has steps (docs/research/step_time.md). Memory was measured on two
cards only, so its interval is indicative: how far a third card is from both is unknown.
"""

from __future__ import annotations

import enum
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any, Generic, Self, TypeVar, cast

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from threadpoolctl import threadpool_limits
from torch import Tensor

from trappm.learner.gaussian_process import Coordinates
from trappm.learner.interface import (
    OTHER_START,
    Z90,
    Array,
    BoolArray,
    DeviceHeads,
    Estimate,
    IntArray,
    Model,
    Predictions,
    Settings,
    Targets,
    TrainedHeads,
    Workload,
    join_tensors,
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
from trappm.learner.physics.step_time import (
    Peak,
    StepTimePrior,
    group_rows,
    starting_constants,
)
from trappm.learner.residual import CAUTION, FOLDS, Residual, fit_residual
from trappm.learner.stats.calibration import (
    Calibration,
    Familiarity,
    LabelledRange,
    UnseenErrors,
    central_interval,
)
from trappm.learner.stats.folds import cluster_folds, grouped_folds
from trappm.profiler.devices.catalogue import (
    CPU,
    USABLE_SHARE,
    DeviceSpec,
    card_of,
    known_spec,
    most_similar,
    process_memory_mib,
    read_name,
)
from trappm.profiler.errors import InputError
from trappm.profiler.memory.simulation import LoopPreset
from trappm.profiler.records import (
    METRICS,
    MemoryFormat,
    OnProgress,
    Optimizer,
    Phase,
    Precision,
    StepSettings,
)

OF_KERNELS = (StepTimePrior, CpuTimePrior)
"""Priors that need the kernels of a workload."""


def starting_prior(metric: str, spec: DeviceSpec | None, *, kernels: bool) -> Prior:
    """Return the prior of a metric on a device without labels.

    Args:
        metric: Column of the metric, such as `memory_mib`.
        spec: Specification of the device; None if the catalogue does not list it.
        kernels: Whether the workloads have kernels.
    """
    if metric == "memory_mib":
        return CpuMemoryPrior() if spec is CPU else MemoryPrior.on(spec)
    if metric == "step_time_ms" and spec is not None and kernels:
        return CpuTimePrior() if spec is CPU else StepTimePrior(spec)
    return GraphPrior(metric)


P = TypeVar("P", bound=Prior)

SHARE_STEP = 0.05
"""Step between the shares of the source's residual that are tried."""


@dataclass(frozen=True, eq=False)
class Head(Generic[P]):
    """A fitted head. It predicts in the metric's unit."""

    prior: P
    residual: Residual
    calibration: Calibration
    familiarity: Familiarity | None
    """None without labels."""
    source: Head[P] | None = None
    """Head of another device whose residual is added."""
    source_share: float = 0.0
    labelled: LabelledRange | None = None
    """None without labels."""
    excess: float = 0.0
    """Part of each label, in the metric's unit, that predictions leave out."""

    def predict(self, workloads: Sequence[Workload]) -> Estimate:
        middle, deviation, outside = self._logs(workloads)
        stated, median = self._stated_deviations(deviation, middle), np.exp(middle)
        log_quantiles = self.calibration.log_quantiles(middle, stated)
        low, high = central_interval(log_quantiles)
        estimate = Estimate(
            median=median,
            low=np.minimum(np.exp(low), median),
            high=np.maximum(np.exp(high), median),
            log_quantiles=log_quantiles,
            log_std=stated,
            log_std_of_mean=np.sqrt(np.maximum(deviation**2 - self.residual.noise**2, 0.0)),
            outside=outside,
            extrapolated_from=None if self.labelled is None else self.labelled.end_before(median),
        )
        return estimate.without(self.excess) if self.excess else estimate

    def exceeding(self, workloads: Sequence[Workload], limit: float | Array) -> Array:
        """Return the probability that each of n workloads exceeds a limit, or its own (n)."""
        middle, deviation, _ = self._logs(workloads)
        gap = np.log(limit + self.excess) - middle
        return self.calibration.exceeding(gap / self._stated_deviations(deviation, middle))

    def learned(self, workloads: Sequence[Workload]) -> Array:
        """Return what is added to the prior's logarithm (n)."""
        return self._learned(workloads, self.prior.features(workloads))[0]

    def _logs(self, workloads: Sequence[Workload]) -> tuple[Array, Array, BoolArray | None]:
        """Return logarithms, deviations, and whether each workload is outside the training
        distribution (n each)."""
        logs, features = self.prior.logs_and_features(workloads)
        added, deviation = self._learned(workloads, features)
        middle = logs + added
        if self.familiarity is None:
            return middle, deviation, None
        distance = self.familiarity.distance(features)
        widened = self.familiarity.widened(deviation, distance)
        return middle, widened, self.familiarity.outside(distance)

    def _stated_deviations(self, deviation: Array, middle: Array) -> Array:
        """Return deviations (n), widened for values beyond the labels."""
        return deviation if self.labelled is None else self.labelled.widened(deviation, middle)

    def _learned(self, workloads: Sequence[Workload], features: Array) -> tuple[Array, Array]:
        added, deviation = self.residual.predict(features)
        if self.source is not None:
            added = added + self.source_share * self.source.learned(workloads)
        return added, deviation

    def tensors(self) -> dict[str, Tensor]:
        """Return everything learned, by name; `from_tensors` is the inverse."""
        names = ("prior", "residual", "calibration", "familiarity", "source", "labelled")
        tensors = join_tensors({name: getattr(self, name) for name in names})
        return {**tensors, "source_share": torch.tensor(self.source_share, dtype=torch.float64)}

    @classmethod
    def from_tensors(cls, prior: type[P], tensors: Mapping[str, Tensor]) -> Self:
        """Read a head; raise KeyError or ValueError for other tensors."""
        familiarity, source = with_prefix(tensors, "familiarity."), with_prefix(tensors, "source.")
        labelled = with_prefix(tensors, "labelled.")
        return cls(
            prior.from_tensors(with_prefix(tensors, "prior.")),
            Residual.from_tensors(with_prefix(tensors, "residual.")),
            Calibration.from_tensors(with_prefix(tensors, "calibration.")),
            Familiarity.from_tensors(familiarity) if familiarity else None,
            cls.from_tensors(prior, source) if source else None,
            float(tensors["source_share"]),
            LabelledRange.from_tensors(labelled) if labelled else None,
        )


class Ours:
    """Default estimator, which fits heads over one kind of prior.

    Args:
        prior: Prior without labels.
    """

    name = "ours"

    def __init__(self, prior: Prior) -> None:
        self.prior = prior

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> Head[Prior]:
        """Fit a head; without any label it predicts by the prior or the start.

        Raises:
            InputError: Shapes differ, a value is not positive, or the start is of another kind.
        """
        _check_labels(workloads, targets)
        if start is not None and not isinstance(start, Head):
            raise InputError(f"a {type(start).__name__} cannot be the start of a head")
        folds = grouped_folds(targets.groups, FOLDS, generator)
        prior, without = self._fit_prior(workloads, targets, start)
        unseen = without(folds)
        # NaN for runs out of memory, which have only a bound.
        residuals, bounds = np.log(targets.values) - unseen, np.log(targets.above) - unseen
        known = ~np.isnan(residuals)
        source, share, of_source = None, 0.0, np.zeros(len(workloads))
        if start is not None:
            of_source = start.learned(workloads)
            share = _share(residuals[known], of_source[known])
            source = start if share else None
            residuals, bounds = residuals - share * of_source, bounds - share * of_source
        features = prior.features(workloads)
        residual, out_of_fold = fit_residual(
            features,
            residuals,
            targets.groups,
            generator,
            feature_groups=prior.feature_groups,
            folds=folds,
            bounds=bounds,
            label_errors=targets.errors,
        )
        errors = np.where(known, residuals, bounds) - out_of_fold.mean
        familiarity, deviations = None, out_of_fold.deviation
        if len(workloads):
            errors_on = [UnseenErrors(errors, deviations, folds)]
            points = Coordinates.fit(features, prior.feature_groups).apply(features)
            clusters = cluster_folds(points, targets.groups, FOLDS, generator)
            if clusters.any():
                # Errors of the prior alone: the residual learns nothing about a new cluster.
                left = np.log(targets.values) - without(clusters) - share * of_source
                errors_on.append(UnseenErrors(left, deviations, clusters))
            familiarity = Familiarity.fit(features, targets.groups)
            familiarity, deviations = familiarity.fit_widening(
                errors_on, residual.noise, targets.groups, known
            )
        calibration = Calibration.fit(errors, deviations, targets.groups, known)
        labelled = LabelledRange.of(targets)
        return Head(prior, residual, calibration, familiarity, source, share, labelled)

    def _fit_prior(
        self, workloads: Sequence[Workload], targets: Targets, start: Head[Prior] | None
    ) -> tuple[Prior, Callable[[IntArray], Array]]:
        """Return the prior fitted to all labels, and a function from folds to logarithms (n) by
        priors that were fitted without them."""
        centre = self.prior if start is None else self.prior.started_from(start.prior)
        log_values, log_above = np.log(targets.values), np.log(targets.above)

        def refitted(rows: BoolArray, near: Prior | None = None) -> Prior:
            return centre.refit(
                [workloads[i] for i in np.flatnonzero(rows).tolist()],
                log_values[rows],
                log_above=log_above[rows],
                tightness=1.0 if start is None else centre.transfer_tightness,
                near=near,
            )

        prior = refitted(np.ones(len(workloads), dtype=bool))

        def without(folds: IntArray) -> Array:
            unseen = np.zeros(len(workloads))
            for fold in np.unique(folds):
                out = folds == fold
                rows = [workloads[i] for i in np.flatnonzero(out).tolist()]
                unseen[out] = refitted(~out, prior).log_values(rows)
            return unseen

        return prior, without


def _share(residuals: Array, of_source: Array) -> float:
    """Return the share of the source's residual (n) with the least absolute error on labels (n).

    The prior guess is all of it, with the weight of `CAUTION` labels.
    """
    shares = np.arange(0.0, 1.0 + SHARE_STEP / 2, SHARE_STEP)
    caution = CAUTION * float(np.abs(of_source).mean()) if len(of_source) else 1.0
    totals = [np.abs(residuals - s * of_source).sum() + caution * (1.0 - s) for s in shares]
    return float(shares[int(np.argmin(totals))])


def _check_labels(workloads: Sequence[Workload], targets: Targets) -> None:
    n = len(workloads)
    shapes = (targets.values.shape, targets.above.shape, (len(targets.groups),))
    if shapes != ((n,), (n,), (n,)):
        raise InputError(f"values, bounds and groups have shapes {shapes}; all must be ({n},)")
    numbers = np.where(np.isnan(targets.values), targets.above, targets.values)
    if not (np.isfinite(numbers).all() and np.all(numbers > 0)):
        raise InputError("a label is missing, zero, negative or infinite")


Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Yield the result of `work` for each item, in order, with one thread per core.

    Items must not share a random generator, so that results do not depend on the number of cores.
    Exceptions of `work` propagate after the running items have finished.
    """
    if items:
        cores = len(os.sched_getaffinity(0))
        with _ONE_THREAD.held(), ThreadPoolExecutor(cores, "trappm-learner") as pool:
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
MIN_LABELS = 2
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
    memory_loop: LoopPreset = LoopPreset.PLAIN
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
        return join_tensors(self.heads)

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

    >>> from trappm.learner.paper.presets import LAPTOP
    >>> from trappm.profiler.trace import trace
    >>> steps = [trace(name, 64) for name in ("test_resnet", "test_vit", "test_vit2")]
    >>> settings = StepSettings(Precision.FP32, MemoryFormat.CONTIGUOUS, Optimizer.SGD)
    >>> workloads = [
    ...     Workload.of(step, settings, batch_size=size, with_kernels=True)
    ...     for step in steps for size in (8, 16)
    ... ]
    >>> labels = np.array([{"memory_mib": 400.0}.get(m, np.nan) for m in METRICS])
    >>> heads = train_heads(
    ...     workloads, np.tile(labels, (6, 1)), groups=["a", "a", "b", "b", "c", "c"],
    ...     preset=LAPTOP.head, generator=np.random.default_rng(0),
    ... )
    >>> heads.metrics
    ('memory_mib',)

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
    metrics = [m for m, count in zip(METRICS, counts, strict=True) if count >= MIN_LABELS]
    if not metrics:
        raise InputError(
            f"{len(workloads)} labels are too few: each metric needs {MIN_LABELS} or more"
        )
    return metrics


OTHERS_FILE = Path(__file__).parents[1] / "physics/devices/other_devices.safetensors"
"""Written by `research/priors/other_devices.py --write`; the shipped snapshot has a copy."""
OTHER_CARDS = "other cards"
"""Key of manifest sources whose labels have no head."""
STEPS_BASIS = "few published steps of this card and other cards' labels"
OTHERS_SETTINGS = (StepSettings(Precision.FP32, MemoryFormat.CONTIGUOUS, Optimizer.SGD),)
"""Default settings of a query without labels."""


class Basis(enum.StrEnum):
    """Source of a head without labels."""

    STEPS = "steps"
    KERNELS = "kernels"
    SPECIFICATION = "specification"


@dataclass(frozen=True, eq=False)
class OtherDevices:
    """Constants of cards with published steps or kernels, and common ones of all cards."""

    constants: Tensor
    """Constants of step times common to all known cards (c)."""
    of_cards: Mapping[tuple[Basis, str], Tensor]
    """Constants after a fit to steps or kernels of one card (c), by card model."""
    step_time: Mapping[tuple[Basis, Phase], Calibration]
    """Quantiles of log(measured / predicted) by source."""
    memory: Calibration
    """The same of memory in training, of two cards."""

    def basis(self, device: str) -> Basis | None:
        """Return the basis of step times of this device; None outside the catalogue."""
        if known_spec(device) in (None, CPU):
            return None
        model = read_name(device).model
        published = (basis for basis in Basis if (basis, model) in self.of_cards)
        return next(published, Basis.SPECIFICATION)

    def constants_of(self, device: str) -> Tensor:
        """Return the constants of a card, or of the one with steps that is most like it (c)."""
        model, basis = read_name(device).model, self.basis(device)
        if basis is not None and (basis, model) in self.of_cards:
            return self.of_cards[basis, model]
        like = most_similar(device, [m for kind, m in self.of_cards if kind is Basis.STEPS])
        if like is None:
            return self.constants
        return constants_on(device, like, self.of_cards[Basis.STEPS, like])

    def heads(self, device: str, phase: Phase) -> TrainedHeads | None:
        """Heads of step time and memory of a card; None where the catalogue does not list it."""
        heads = self._heads(device, phase)
        return None if heads is None else TrainedHeads(heads, OTHERS_SETTINGS)

    def _heads(self, device: str, phase: Phase) -> Heads | None:
        spec, basis = known_spec(device), self.basis(device)
        if spec is None or basis is None:
            return None
        prior = StepTimePrior(spec, self.constants_of(device))
        step_time = head_of(prior, self.step_time[basis, phase])
        memory = head_of(MemoryPrior.on(spec), self.memory)
        return Heads({"memory_mib": memory, "step_time_ms": step_time}, 0)

    def completed(self, known: TrainedHeads, device: str, phase: Phase) -> TrainedHeads:
        """Heads of a device with those of the metrics that it had no labels of."""
        own, added = known.heads, self._heads(device, phase)
        if added is None or not isinstance(own, Heads):
            return known
        return replace(known, heads=replace(own, heads={**added.heads, **own.heads}))

    def by_steps(
        self, known: TrainedHeads, device: str, phase: Phase
    ) -> tuple[TrainedHeads, str | None]:
        """Return heads whose step times come from published steps of the card, and their basis.

        The heads are unchanged, without a basis, if there are no published steps of the card, or
        their step times do not come from labels.
        """
        own, added = known.heads, self._heads(device, phase)
        if added is None or self.basis(device) is not Basis.STEPS or not isinstance(own, Heads):
            return known, None
        head = own.heads.get("step_time_ms")
        if head is None or head.familiarity is None:
            return known, None
        heads = {**own.heads, "step_time_ms": added.heads["step_time_ms"]}
        return replace(known, heads=replace(own, heads=heads)), STEPS_BASIS

    def tensors(self) -> dict[str, Tensor]:
        tensors = {"constants": self.constants}
        tensors |= {f"{basis}.{model}": values for (basis, model), values in self.of_cards.items()}
        parts = {f"errors.{basis}.{phase}": c for (basis, phase), c in self.step_time.items()}
        return tensors | join_tensors({**parts, "errors.memory": self.memory})

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Raise KeyError or ValueError for tensors that are not those of other devices."""

        def calibration(name: str) -> Calibration:
            read = Calibration.from_tensors(with_prefix(tensors, f"{name}."))
            low, high = read.interval()
            if not low < high < np.inf:
                raise ValueError(f"errors between {low} and {high}")
            return read

        of_cards = {
            (basis, model): _constants(values)
            for basis in (Basis.STEPS, Basis.KERNELS)
            for model, values in with_prefix(tensors, f"{basis}.").items()
        }
        step_time = {
            (basis, phase): calibration(f"errors.{basis}.{phase}")
            for basis, phase in product(Basis, Phase)
        }
        constants = _constants(tensors["constants"])
        return cls(constants, of_cards, step_time, calibration("errors.memory"))


def constants_on(device: str, like: str, constants: Tensor) -> Tensor:
    """Return the constants of one card for another (c).

    Peaks are relative to the data sheet. Those of tensor cores are moved by the shares of these
    peaks that the power limits of the two cards allow. A part of a card has the share of the card.
    """
    cards = card_of(str(replace(read_name(device), part=None))), card_of(like)
    own, other = (None if card is None else card.tensor_share for card in cards)
    moved = constants.clone()
    if own is not None and other is not None:
        slower = math.log(other / own)
        rows = {group.name: where for group, where in group_rows()}
        moved[rows["peak"].start + Peak.HALF] += slower
        moved[rows["tf32_peak"]] += slower
    return moved


def _constants(values: Tensor) -> Tensor:
    if values.shape != starting_constants().shape or not values.isfinite().all():
        raise ValueError(f"constants of shape {tuple(values.shape)}, or not finite")
    return values.double()


def write_others(
    others: OtherDevices, sources: Sequence[Mapping[str, object]], path: Path = OTHERS_FILE
) -> None:
    """Write the constants of other cards with their sources."""
    tensors = {name: tensor.contiguous() for name, tensor in others.tensors().items()}
    save_file(tensors, path, metadata={"sources": json.dumps(list(sources))})


def known_of_others() -> tuple[OtherDevices, list[dict[str, object]]]:
    """Return the constants of other cards and the sources for the manifest."""
    with safe_open(OTHERS_FILE, "pt") as file:
        sources: list[dict[str, object]] = json.loads(file.metadata()["sources"])
    return OtherDevices.from_tensors(load_file(OTHERS_FILE)), sources


def similar_constants(card: str) -> Tensor | None:
    """Return the step-time constants of the most similar card (c); None unless it is a GPU."""
    others = known_of_others()[0]
    return None if others.basis(card) is None else others.constants_of(card)


def kernel_head(heads: DeviceHeads) -> Head[StepTimePrior] | None:
    """Return the head of step times if its prior is that of kernels; None for other heads."""
    head = heads.heads.get("step_time_ms") if isinstance(heads, Heads) else None
    if head is None or not isinstance(head.prior, StepTimePrior):
        return None
    return cast("Head[StepTimePrior]", head)


def head_of(prior: Prior, errors: Calibration) -> Head[Prior]:
    """Return a head without residual, of these errors of the logarithm."""
    low, high = errors.interval()
    deviation = (high - low) / (2 * Z90)
    residual = Residual(sum(prior.feature_groups), deviation)
    return Head(prior, residual, Calibration(errors.quantiles / deviation), None)
