"""What a strategy is told of its pool: how the values of each metric hang together, and what they
should be before any label.

The covariance without labels is enough: which labels teach most hardly depends on what they say
(docs/acquisition.md), so it is computed once for a pool, and a strategy can begin without any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from learner.acquisition.covariance import Covariance, narrow
from learner.acquisition.joint import Ground, Joint
from learner.estimator import Estimate, Targets
from learner.priors.device_specs import DeviceSpec
from learner.priors.graph_prior import GraphPrior
from learner.priors.memory_prior import MemoryPrior
from learner.priors.prior import Prior
from learner.priors.step_time import StepTimePrior
from learner.workload import Workload

METRICS = ("step_time_ms", "memory_mib", "power_w")
"""Metrics that a batch serves; energy follows from time and power."""
LEAST_DOUBT = 0.1
"""Deviation, in the logarithm, with which it is foretold at least whether a run will die."""


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
        spec: DeviceSpec,
        generator: np.random.Generator,
    ) -> PoolKnowledge:
        """Of these metrics, as far as a batch serves them.

        Args:
            workloads: the pool (n).
            metrics: that the device's labels have, or all.
            spec: of the device.
            generator: draws landmarks.
        """
        nothing = Targets(np.zeros(0), np.zeros(0), ())
        covariances, estimates = {}, {}
        for metric in METRICS:
            if metric in metrics:
                prior = _prior(metric, workloads, spec)
                model = Joint(prior, Ground.of(prior, workloads)).fit([], nothing, generator)
                wide = model.covariance(workloads, generator)
                covariances[metric] = Covariance(narrow(wide.features), wide.noise)
                estimates[metric] = model.predict(workloads)
        return cls(covariances, estimates)


def probability_above(said: Estimate, limit: float) -> npt.NDArray[np.float64]:
    """The probability of each estimate (n) to be above this limit, as a normal logarithm (n)."""
    assert said.log_std is not None  # noqa: S101  (a Gaussian process tells it)
    gaps = (np.log(limit) - np.log(said.median)) / np.maximum(said.log_std, LEAST_DOUBT)
    normal = NormalDist()
    return np.array([1.0 - normal.cdf(gap) for gap in gaps.tolist()])


def _prior(metric: str, workloads: Sequence[Workload], spec: DeviceSpec) -> Prior:
    if metric == "memory_mib":
        return MemoryPrior.on(spec)
    if metric == "step_time_ms" and all(w.kernels is not None for w in workloads):
        return StepTimePrior(spec)
    return GraphPrior(metric)
