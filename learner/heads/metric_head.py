"""Head for one metric on one device: a physical prior, a residual, and a calibrated interval.

    log value = prior (a formula with few constants) + residual (learned) +- calibrated interval

The prior is fitted on all labels, and again without each fold of the architectures, so that the
residual and the interval learn from out-of-fold errors. A head can start from another device's: its
constants are where this device's begin, and its residual is added by the share that fits here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from trappm.learner.gaussian_process import Coordinates
from trappm.learner.interface import (
    Array,
    BoolArray,
    Estimate,
    IntArray,
    Model,
    Targets,
    Workload,
    joined_tensors,
    with_prefix,
)
from trappm.learner.physics.cpu_priors import CpuMemoryPrior, CpuTimePrior
from trappm.learner.physics.graph_prior import GraphPrior
from trappm.learner.physics.memory import MemoryPrior
from trappm.learner.physics.prior import Prior
from trappm.learner.physics.step_time import StepTimePrior
from trappm.learner.residual import CAUTION, FOLDS, Residual, fit_residual
from trappm.learner.stats.calibration import (
    Calibration,
    Familiarity,
    LabelledRange,
    UnseenErrors,
    central_interval,
)
from trappm.learner.stats.folds import cluster_folds, grouped_folds
from trappm.profiler.devices.catalogue import CPU, DeviceSpec
from trappm.profiler.errors import InputError

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
        stated, median = self._stated(deviation, middle), np.exp(middle)
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
            labels_end=None if self.labelled is None else self.labelled.end_before(median),
        )
        return estimate.without(self.excess) if self.excess else estimate

    def exceeding(self, workloads: Sequence[Workload], limit: float | Array) -> Array:
        """Return the probability that each of n workloads exceeds a limit, or its own (n)."""
        middle, deviation, _ = self._logs(workloads)
        gap = np.log(limit + self.excess) - middle
        return self.calibration.exceeding(gap / self._stated(deviation, middle))

    def learned(self, workloads: Sequence[Workload]) -> Array:
        """Return what is added to the prior's logarithm (n)."""
        return self._learned(workloads, self.prior.features(workloads))[0]

    def _logs(self, workloads: Sequence[Workload]) -> tuple[Array, Array, BoolArray | None]:
        """Return logarithms, deviations and whether each workload is outside the training
        distribution (n each)."""
        logs, features = self.prior.logs_and_features(workloads)
        added, deviation = self._learned(workloads, features)
        middle = logs + added
        if self.familiarity is None:
            return middle, deviation, None
        distance = self.familiarity.distance(features)
        widened = self.familiarity.widened(deviation, distance)
        return middle, widened, self.familiarity.outside(distance)

    def _stated(self, deviation: Array, middle: Array) -> Array:
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
        tensors = joined_tensors({name: getattr(self, name) for name in names})
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
        _check(workloads, targets)
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


def _check(workloads: Sequence[Workload], targets: Targets) -> None:
    n = len(workloads)
    shapes = (targets.values.shape, targets.above.shape, (len(targets.groups),))
    if shapes != ((n,), (n,), (n,)):
        raise InputError(f"values, bounds and groups have shapes {shapes}; all must be ({n},)")
    numbers = np.where(np.isnan(targets.values), targets.above, targets.values)
    if not (np.isfinite(numbers).all() and np.all(numbers > 0)):
        raise InputError("a label is missing, zero, negative or infinite")
