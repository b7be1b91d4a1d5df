"""What is known of a pool before any label: covariances of each metric, and estimates.

The covariance without labels is enough: which labels teach most hardly depends on their values
(docs/studies/uncertainty.md), so it is computed once for a pool, and a strategy can begin without
any.

On a second device what is open is how it differs from the first one. How far constants go apart
between devices is known from many, so the covariance of step times there is that of the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from trappm.learner.acquisition.covariance import Covariance, narrow
from trappm.learner.acquisition.joint import Joint, PoolPoints
from trappm.learner.estimator import Estimate, Targets
from trappm.learner.physics.device_specs import DeviceSpec
from trappm.learner.physics.devices.joint_fit import Distribution
from trappm.learner.physics.prior import Prior
from trappm.learner.physics.starting_prior import OF_KERNELS, starting_prior
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.workload import Workload

METRICS = ("step_time_ms", "memory_mib", "power_w")
"""Metrics that a batch serves; energy follows from time and power."""
LEAST_DOUBT = 0.1
"""The least deviation, in the logarithm, in predicting whether a run will die. A round number above
what simulated memory is off by (docs/accuracy.md): a run that is avoided teaches nothing."""


@dataclass(frozen=True, eq=False)
class PoolKnowledge:
    """What is known of a pool of n on a device without any label."""

    covariances: Mapping[str, Covariance]
    """By metric, of those that a batch serves."""
    estimates: Mapping[str, Estimate]

    @classmethod
    def of(
        cls,
        workloads: Sequence[Workload],
        metrics: Sequence[str],
        spec: DeviceSpec | None,
        generator: np.random.Generator,
        *,
        others: Distribution | None = None,
    ) -> PoolKnowledge:
        """Of these metrics, as far as a batch serves them.

        Args:
            workloads: the pool (n).
            metrics: that the device's labels have, or all.
            spec: of the device, if it is known.
            generator: draws landmarks.
            others: what other devices say of the constants of step times, where one of them
                teaches this one.
        """
        covariances, estimates = {}, {}
        for metric in METRICS:
            if metric in metrics:
                covariances[metric], estimates[metric] = _known(
                    metric, workloads, spec, generator, others
                )
        return cls(covariances, estimates)

    def of_rows(self, rows: npt.NDArray[np.int64]) -> PoolKnowledge:
        """The same of a part of the pool."""
        covariances = {
            metric: Covariance(known.features[rows], known.noise)
            for metric, known in self.covariances.items()
        }
        estimates = {
            metric: Estimate(estimate.median[rows], log_std=_log_std(estimate)[rows])
            for metric, estimate in self.estimates.items()
        }
        return PoolKnowledge(covariances, estimates)


def probability_above(estimate: Estimate, limit: float) -> npt.NDArray[np.float64]:
    """The probability of each estimate (n) to be above this limit, as a normal logarithm (n)."""
    gaps = (np.log(limit) - np.log(estimate.median)) / np.maximum(_log_std(estimate), LEAST_DOUBT)
    normal = NormalDist()
    return np.array([1.0 - normal.cdf(gap) for gap in gaps.tolist()])


def _log_std(estimate: Estimate) -> npt.NDArray[np.float64]:
    assert estimate.log_std is not None  # noqa: S101  (a Gaussian process states it)
    return estimate.log_std


def _known(
    metric: str,
    workloads: Sequence[Workload],
    spec: DeviceSpec | None,
    generator: np.random.Generator,
    others: Distribution | None,
) -> tuple[Covariance, Estimate]:
    """Of one metric; workloads that different priors explain share no variance."""
    traced = np.array([w.kernels is not None for w in workloads], dtype=bool)
    nothing = Targets(np.zeros(0), np.zeros(0), ())
    parts, noise, width = [], 0.0, 0
    for prior, rows in _priors(metric, spec, traced, others):
        at = np.flatnonzero(rows)
        own = [workloads[i] for i in at.tolist()]
        model = Joint(prior, PoolPoints.of(prior, own)).fit([], nothing, generator)
        wide = model.covariance(own, generator)
        parts.append((at, narrow(wide.features), model.predict(own)))
        noise, width = wide.noise, width + parts[-1][1].shape[1]
    features = np.zeros((len(workloads), width), np.float32)
    median, log_std = np.zeros(len(workloads)), np.zeros(len(workloads))
    begin = 0
    for at, block, estimate in parts:
        features[at, begin : begin + block.shape[1]] = block
        begin += block.shape[1]
        median[at], log_std[at] = estimate.median, estimate.log_std
    return Covariance(features, noise), Estimate(median, log_std=log_std)


def _priors(
    metric: str,
    spec: DeviceSpec | None,
    traced: npt.NDArray[np.bool_],
    others: Distribution | None,
) -> list[tuple[Prior, npt.NDArray[np.bool_]]]:
    """What explains a metric before labels do, and which workloads (n)."""
    better = starting_prior(metric, spec, kernels=True)
    if not isinstance(better, OF_KERNELS):
        return [(better, np.ones_like(traced))]
    if others is not None and isinstance(better, StepTimePrior):
        better = StepTimePrior.like_others(better.spec, others)
    graph = starting_prior(metric, spec, kernels=False)
    return [(prior, rows) for prior, rows in ((better, traced), (graph, ~traced)) if rows.any()]
