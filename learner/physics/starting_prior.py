"""Choice of the prior of a metric: kernels, allocations, or terms of the graph."""

from __future__ import annotations

from trappm.learner.physics.cpu_priors import CpuMemoryPrior, CpuTimePrior
from trappm.learner.physics.device_specs import CPU, DeviceSpec, spec_of
from trappm.learner.physics.graph_prior import PRIORS, GraphPrior
from trappm.learner.physics.memory_prior import MemoryPrior
from trappm.learner.physics.prior import Prior
from trappm.learner.physics.step_time_prior import StepTimePrior

OF_KERNELS = (StepTimePrior, CpuTimePrior)
"""Priors that need the kernels of a workload."""


def starting_prior(metric: str, spec: DeviceSpec | None, *, kernels: bool) -> Prior:
    """Return the prior of a metric on a device without labels.

    Args:
        metric: Column of the metric, such as `memory_mib`. A metric without its own terms uses
            those of step time.
        spec: Specification of the device; None if the catalogue does not list it.
        kernels: Whether the workloads have kernels.
    """
    if metric == "memory_mib":
        return CpuMemoryPrior() if spec is CPU else MemoryPrior.on(spec)
    if metric == "step_time_ms" and spec is not None and kernels:
        return CpuTimePrior() if spec is CPU else StepTimePrior(spec)
    return GraphPrior(metric if metric in PRIORS else "step_time_ms")


def prior_on_card(metric: str, card: str, *, kernels: bool = True) -> Prior:
    """Return the prior of a metric on a card.

    Raises:
        InputError: The prior needs a specification and the catalogue does not list the card.
    """
    on_specification = metric == "memory_mib" or (metric == "step_time_ms" and kernels)
    return starting_prior(metric, spec_of(card) if on_specification else None, kernels=kernels)
