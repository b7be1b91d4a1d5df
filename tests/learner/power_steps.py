"""Traced steps of three networks on a V100 whose power is simulated by the extension."""

from functools import cache

import numpy as np

from trappm.learner.interface import Workload
from trappm.learner.physics.power import CONSTANTS, loads_of
from trappm.learner.physics.step_time import StepTimePrior
from trappm.profiler.devices.catalogue import card_of, spec_of
from trappm.profiler.records import Graph, Phase
from trappm.profiler.trace import trace

CARD = "v100 pcie 32gb"
PRIOR = StepTimePrior(spec_of(CARD))
NAMES = ("test_resnet", "test_vit", "resnet18")


@cache
def traces(phase=Phase.TRAIN):
    return [trace(name, 160, phase=phase) for name in NAMES]


@cache
def traced_workloads(phase=Phase.TRAIN):
    return [
        Workload(graph=Graph.empty(batch), kernels=traced.kernels, phase=phase)
        for traced in traces(phase)
        for batch in (1, 16, 128)
    ]


def constants(**values):
    """Return the logarithms of the constants of the V100, except for these."""
    from trappm.extensions.power_limits.step_power import power_of

    known = dict(zip(CONSTANTS, np.exp(power_of(card_of(CARD)).constants.mean), strict=True))
    return np.log([{**known, **values}[name] for name in CONSTANTS])


def steps_of(workloads, slower=1.0, prior=PRIOR, **values):
    """Return steps that take as long as is simulated, times a factor, and their times."""
    from trappm.extensions.power_limits.step_power import Sheet, Steps

    loads = loads_of(workloads, prior)
    time_ms = slower * np.exp(prior.log_values(workloads))
    limit = np.full(len(workloads), 250.0)
    return Steps.timed(loads, Sheet.of(card_of(CARD)), constants(**values), time_ms, limit), time_ms
