"""What a campaign's strategy is told of its pool: how the values of each metric hang together.

The covariance without labels is enough: which labels teach most hardly depends on what they say
(docs/acquisition.md), so it is computed once for a pool, and a strategy can begin without any.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from learner.acquisition.covariance import Covariance, narrow
from learner.acquisition.joint import Ground, Joint
from learner.estimator import Targets
from learner.priors.device_specs import DeviceSpec
from learner.priors.graph_prior import GraphPrior
from learner.priors.memory_prior import MemoryPrior
from learner.priors.prior import Prior
from learner.priors.step_time import StepTimePrior
from learner.workload import Workload

METRICS = ("step_time_ms", "memory_mib", "power_w")
"""Metrics that a batch serves; energy follows from time and power."""


def pool_covariances(
    workloads: Sequence[Workload],
    metrics: Sequence[str],
    spec: DeviceSpec,
    generator: np.random.Generator,
) -> list[Covariance]:
    """One for each of these metrics that a batch serves, in the order of `METRICS`.

    Args:
        workloads: the pool (n).
        metrics: that the device's labels have, or all.
        spec: of the device.
        generator: draws landmarks.
    """
    nothing = Targets(np.zeros(0), np.zeros(0), ())
    found = []
    for metric in METRICS:
        if metric in metrics:
            prior = _prior(metric, workloads, spec)
            joint = Joint(prior, Ground.of(prior, workloads))
            wide = joint.fit([], nothing, generator).covariance(workloads, generator)
            found.append(Covariance(narrow(wide.features), wide.noise))
    return found


def _prior(metric: str, workloads: Sequence[Workload], spec: DeviceSpec) -> Prior:
    if metric == "memory_mib":
        return MemoryPrior.on(spec)
    if metric == "step_time_ms" and all(w.kernels is not None for w in workloads):
        return StepTimePrior(spec)
    return GraphPrior(metric)
