"""What is known of a pool before labels, with kernels, without, and with those of a part of it."""

from dataclasses import replace

import numpy as np
import pytest

import trappm.profiler.models.zoo  # noqa: F401  (before timm)
from trappm.learner.acquisition.pool_knowledge import PoolKnowledge, probability_above
from trappm.learner.physics.device_specs import spec_of
from trappm.learner.physics.devices.known_devices import known_devices
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.workload import Workload
from trappm.profiler.records import MemoryFormat, Precision
from trappm.profiler.static_profile import graph_template, kernel_profile

SETTINGS = {"precision": Precision.FP32, "memory_format": MemoryFormat.CONTIGUOUS}
ARCHITECTURES = ("test_resnet", "test_vit", "test_efficientnet")


@pytest.fixture(scope="module")
def traced():
    workloads_with_kernels = []
    for name in ARCHITECTURES:
        template = graph_template(name, 64)
        kernels = kernel_profile(name, 64, fused_attention=True, **SETTINGS)
        workloads_with_kernels += [
            Workload(graph=template.at(batch), kernels=kernels, **SETTINGS) for batch in (1, 8, 64)
        ]
    return workloads_with_kernels


def known(workloads, metrics=("step_time_ms",), **options):
    generator = np.random.default_rng(0)
    return PoolKnowledge.of(workloads, metrics, spec_of("a100"), generator, **options)


def test_kernels_improve_the_step_time_estimate(traced):
    plain = known([replace(w, kernels=None) for w in traced]).estimates["step_time_ms"]
    better = known(traced).estimates["step_time_ms"]
    assert not np.allclose(plain.median, better.median, rtol=0.1)
    for knowledge in (plain, better):
        assert np.all(np.diff(knowledge.median.reshape(3, 3), axis=1) > 0)


def test_workloads_without_kernels_are_estimated_separately(traced):
    mixed = [replace(w, kernels=None) if i < 3 else w for i, w in enumerate(traced)]
    knowledge, whole = known(mixed), known(traced)
    features = knowledge.covariances["step_time_ms"].features
    between = features[:3] @ features[3:].T
    assert between == pytest.approx(0.0)
    assert (features[:3] @ features[:3].T).min() > 0
    assert knowledge.estimates["step_time_ms"].median[3:] == pytest.approx(
        whole.estimates["step_time_ms"].median[3:]
    )
    alone = known([replace(w, kernels=None) for w in traced[:3]])
    assert knowledge.estimates["step_time_ms"].median[:3] == pytest.approx(
        alone.estimates["step_time_ms"].median
    )


def test_a_second_device_is_uncertain_in_how_devices_differ(traced):
    """Of step times that kernels explain; of graphs and memory nothing of the kind is known."""
    metrics = ("step_time_ms", "memory_mib")
    plain, second = known(traced, metrics), known(traced, metrics, others=known_devices())
    moves = StepTimePrior.like_others(spec_of("a100"), known_devices()).sensitivities(traced)

    def left_of(known):
        features = known.covariances["step_time_ms"].features
        return np.linalg.norm(features @ features.T - moves @ moves.T) / np.linalg.norm(moves) ** 2

    assert left_of(second) < 0.2 < left_of(plain)
    same = [k.covariances["memory_mib"].features for k in (plain, second)]
    assert np.array_equal(*same)
    untraced = [replace(w, kernels=None) for w in traced]
    alone = [known(untraced, others=others) for others in (None, known_devices())]
    assert np.array_equal(*(k.covariances["step_time_ms"].features for k in alone))


def test_rows_of_the_pool_keep_their_estimates(traced):
    rows = np.array([7, 2])
    whole = known(traced, ("step_time_ms", "memory_mib", "energy_j"))
    part = whole.of_rows(rows)
    assert set(part.covariances) == {"step_time_ms", "memory_mib"}
    for metric, covariance in whole.covariances.items():
        assert np.array_equal(part.covariances[metric].features, covariance.features[rows])
    knowledge, some = whole.estimates["memory_mib"], part.estimates["memory_mib"]
    limit = float(np.median(knowledge.median))
    assert np.array_equal(probability_above(some, limit), probability_above(knowledge, limit)[rows])
