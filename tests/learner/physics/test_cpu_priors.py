"""What steps cost on CPU cores: formulas, transfer, heads."""

import numpy as np
import pytest

from trappm.learner.heads.physics_heads import Ours
from trappm.learner.interface import Targets, Workload
from trappm.learner.physics.cpu_priors import SHARED, CpuMemoryPrior, CpuTimePrior
from trappm.learner.physics.cpu_priors import TIME_SPEC as SPEC
from trappm.profiler.trace import trace

MODELS = (
    "test_resnet", "test_vit", "test_convnext", "test_efficientnet", "mobilenetv2_035", "resnet10t",
    "mnasnet_small", "mobilenetv4_conv_small_035",
)  # fmt: skip
PRIORS = [CpuMemoryPrior(), CpuTimePrior()]


@pytest.fixture(scope="module")
def labelled():
    """Training steps of small models at four batch sizes, and the names of the models."""
    workloads, names = [], []
    for name in MODELS:
        step = trace(name, 64)
        for batch_size in (2, 4, 8, 16):
            graph = step.graph.at(batch_size)
            workloads.append(Workload(graph=graph, trace=step, kernels=step.kernels))
            names.append(name)
    return workloads, names


@pytest.mark.parametrize("prior", PRIORS)
def test_labels_recover_the_constants(prior, labelled):
    rng = np.random.default_rng(0)
    spreads = np.array(list(prior.spec.spreads.values()))
    truth = prior.with_constants(spreads * rng.uniform(-0.7, 0.7, len(spreads)))
    log_values = truth.log_values(labelled[0])
    off = [np.abs(p.log_values(labelled[0]) - log_values).mean()
           for p in (prior, prior.refit(labelled[0], log_values))]  # fmt: skip
    assert off[1] < 0.02 < off[0]


@pytest.mark.parametrize("prior", PRIORS)
def test_a_larger_batch_takes_no_less(prior, labelled):
    values = prior.log_values(labelled[0]).reshape(len(MODELS), 4)
    assert np.all(np.diff(values, axis=1) > 0)


def fit(workloads, names, log_values, start=None):
    targets = Targets(np.exp(log_values), np.full(len(names), np.nan), names)
    return Ours(CpuTimePrior()).fit(workloads, targets, np.random.default_rng(0), start)


def far(seed):
    """A device whose constants have little to do with others'."""
    return CpuTimePrior(np.random.default_rng(seed).uniform(-2.5, 2.5, len(SPEC.spreads)))


def test_transfer_helps_a_similar_device(labelled):
    workloads, names = labelled
    truth = far(0)
    source = fit(workloads, names, truth.log_values(workloads))
    twice_as_slow = truth.log_values(workloads) + np.log(2)
    few = slice(0, None, 11)
    own = workloads[few], names[few], twice_as_slow[few]
    after, scratch = (
        np.abs(np.log(fit(*own, start).predict(workloads).median) - twice_as_slow).mean()
        for start in (source, None)
    )
    assert after < 0.9 * scratch
    begun, known = CpuTimePrior().started_from(truth).log_constants, truth.log_constants
    assert begun.mean() == pytest.approx(known.mean())
    assert begun.std() == pytest.approx(SHARED * known.std())
