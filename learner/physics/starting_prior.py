"""Which prior explains a metric before labels do: kernels, allocations, or terms of the graph."""

from __future__ import annotations

from trappm.learner.physics.cpu_priors import CpuMemoryPrior, CpuTimePrior
from trappm.learner.physics.device_specs import CPU, DeviceSpec, spec_of
from trappm.learner.physics.graph_prior import PRIORS, GraphPrior
from trappm.learner.physics.memory_prior import MemoryPrior
from trappm.learner.physics.prior import Prior
from trappm.learner.physics.step_time_prior import StepTimePrior

OF_KERNELS = (StepTimePrior, CpuTimePrior)
"""Priors of workloads that come with their kernels, and of no others."""


def starting_prior(metric: str, spec: DeviceSpec | None, *, kernels: bool) -> Prior:
    """The prior of a metric on a device without labels.

    Args:
        metric: its column, such as `memory_mib`. One without terms is taken for work, as most
            costs are.
        spec: of the device; None where nobody has listed it, so that kernels predict no time.
        kernels: whether the workloads come with their kernels.
    """
    if metric == "memory_mib":
        return CpuMemoryPrior() if spec is CPU else MemoryPrior.on(spec)
    if metric == "step_time_ms" and spec is not None and kernels:
        return CpuTimePrior() if spec is CPU else StepTimePrior(spec)
    return GraphPrior(metric if metric in PRIORS else "step_time_ms")


def prior_on_card(metric: str, card: str, *, kernels: bool = True) -> Prior:
    """The same on the card of this key.

    Raises:
        InputError: nobody has listed the card, and the prior stands on its specification.
    """
    on_specification = metric == "memory_mib" or (metric == "step_time_ms" and kernels)
    return starting_prior(metric, spec_of(card) if on_specification else None, kernels=kernels)
