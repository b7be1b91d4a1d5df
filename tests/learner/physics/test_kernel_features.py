"""Every feature can differ from 0, no two kinds share one, and what they mean has a version."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from feature_zoo import Convolutions, OtherOperators, in_all_settings, one_convolution

from trappm.learner.interface import Workload
from trappm.learner.physics.cpu_priors import CpuMemoryPrior, CpuTimePrior
from trappm.learner.physics.graph_prior import GraphPrior
from trappm.learner.physics.memory import MemoryPrior
from trappm.learner.physics.power import PowerPrior
from trappm.learner.physics.prior import OPERATORS
from trappm.learner.physics.step_time import SHARE_GROUPS, StepTimePrior, starting_constants
from trappm.learner.snapshots.snapshot import FEATURE_VERSIONS as VERSIONS
from trappm.profiler.devices.catalogue import DeviceSpec
from trappm.profiler.traced_step import (
    ConvolutionKind,
    KernelKind,
    Pass,
)

torch.set_num_threads(1)

SPEC = DeviceSpec(300.0, 20.0, 1500.0, 40.0, 100, tf32_tflops=150.0)
STEP_TIMES = StepTimePrior(SPEC, torch.zeros_like(starting_constants()))
POWER = PowerPrior(STEP_TIMES, np.ones(6))
OF_GRAPHS = [GraphPrior(metric) for metric in ("step_time_ms", "power_w")]
OTHERS = [MemoryPrior(), CpuMemoryPrior(), STEP_TIMES, CpuTimePrior(), POWER]
"""Priors of fixed constants."""
GOLDEN = Path(__file__).with_name("golden_features.json")

# Only linear layers and convolutions have weights, so other products have no gradient of them.
WITHOUT_WEIGHTS = {
    KernelKind.MATMUL * len(Pass) + Pass.WEIGHT_GRADIENT,
    KernelKind.ATTENTION * len(Pass) + Pass.WEIGHT_GRADIENT,
}
# The graph of a traced module has these in parts, as an ONNX export of opset 17 does.
NEVER_TRACED = {"Attention", "GroupNormalization", "Gelu"}


@pytest.fixture(scope="module")
def zoo():
    modules = [Convolutions(), OtherOperators(), *map(one_convolution, ConvolutionKind)]
    return [workload for module in modules for workload in in_all_settings(module)]


def silent_features(prior) -> set[int]:
    """Features that are 0 for every network, with the reason above."""
    if isinstance(prior, StepTimePrior):
        return WITHOUT_WEIGHTS
    if isinstance(prior, PowerPrior):
        before = sum(prior.feature_groups) - sum(SHARE_GROUPS)
        return {before + column for column in WITHOUT_WEIGHTS}
    groups = prior.feature_groups
    first = sum(groups[: groups.index(len(OPERATORS))])
    return {first + OPERATORS.index(operator) for operator in NEVER_TRACED}


@pytest.mark.parametrize("prior", [*OF_GRAPHS, *OTHERS])
def test_every_feature_is_non_zero_for_some_network(zoo, prior):
    features = prior.features(zoo)
    assert features.shape[1] == sum(prior.feature_groups)
    zero = np.flatnonzero((features == 0).all(axis=0))
    assert set(zero.tolist()) == silent_features(prior)


def test_features_of_graphs_change_only_with_their_version(build_network):
    """A snapshot of features with another meaning would load and predict wrong values.

    Features of kernels and memory are in the predictions of tests/golden. Where either fails on
    purpose, raise the part's number in `snapshot.FEATURE_VERSIONS`, and add the values that are
    printed under the new version to golden_features.json.
    """
    workload = Workload(graph=build_network("depthwise", 24, 3, 16))
    values = [v for prior in OF_GRAPHS for v in prior.features([workload])[0].tolist()]
    expected = json.loads(GOLDEN.read_text()).get(f"graph {VERSIONS['graph']}")
    message = f"graph: {json.dumps([float(f'{value:.8g}') for value in values])}"
    assert expected is not None, message
    assert len(values) == len(expected), message
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-9, err_msg=message)
