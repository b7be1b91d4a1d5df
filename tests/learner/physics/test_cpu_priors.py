"""What steps cost on CPU cores: formulas, transfer, heads."""

from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from trappm.learner.estimator import Targets
from trappm.learner.heads.device_heads import heads_from_tensors, train_heads
from trappm.learner.heads.metric_head import Ours, starting_prior
from trappm.learner.paper.presets import preset_named
from trappm.learner.physics.cpu_priors import SHARED, CpuMemoryPrior, CpuTimePrior
from trappm.learner.physics.cpu_priors import TIME_SPEC as SPEC
from trappm.learner.physics.device_specs import CPU, spec_of
from trappm.learner.physics.graph_prior import GraphPrior
from trappm.learner.workload import Workload
from trappm.profiler.errors import InputError
from trappm.profiler.records import METRICS, Graph, MemoryFormat, Optimizer, Phase, Precision
from trappm.profiler.static_profile import kernel_profile, static_profile

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
        profile = static_profile(name, 64)
        kernels = profile.step.kernels_in(Precision.FP32, MemoryFormat.CONTIGUOUS)
        for batch_size in (2, 4, 8, 16):
            graph = profile.graph.at(batch_size)
            workloads.append(Workload(graph=graph, step=profile.step, kernels=kernels))
            names.append(name)
    return workloads, names


def test_cpus_have_formulas_of_their_own():
    assert isinstance(
        starting_prior("memory_mib", spec_of("cpu-4t"), kernels=False), CpuMemoryPrior
    )
    assert isinstance(starting_prior("step_time_ms", CPU, kernels=True), CpuTimePrior)
    assert not isinstance(starting_prior("step_time_ms", CPU, kernels=False), CpuTimePrior)


@pytest.mark.parametrize("prior", PRIORS)
def test_features_are_finite_and_as_wide_as_their_groups(prior, labelled):
    features = prior.features(labelled[0])
    assert features.shape == (len(labelled[0]), sum(prior.feature_groups))
    assert np.isfinite(features).all()
    assert prior.features([]).shape == (0, sum(prior.feature_groups))


def test_a_graph_without_nodes_has_features(labelled):
    """What ONNX leaves of a module that only passes its input on."""
    empty = replace(labelled[0][0], graph=Graph.empty(2))
    for prior in (*PRIORS, GraphPrior("step_time_ms")):
        assert np.isfinite(prior.features([empty])).all()


@pytest.mark.parametrize("prior", PRIORS)
def test_labels_move_the_constants_to_where_they_come_from(prior, labelled):
    rng = np.random.default_rng(0)
    spreads = np.array([term.spread for term in prior.spec.terms])
    truth = prior.with_constants(spreads * rng.uniform(-0.7, 0.7, len(spreads)))
    log_values = truth.log_values(labelled[0])
    off = [np.abs(p.log_values(labelled[0]) - log_values).mean()
           for p in (prior, prior.refit(labelled[0], log_values))]  # fmt: skip
    assert off[1] < 0.02 < off[0]


@pytest.mark.parametrize("prior", PRIORS)
def test_tensors_hold_the_prior(prior, labelled):
    moved = prior.moved(np.linspace(-0.5, 0.5, len(prior.log_constants)))
    again = type(prior).from_tensors(moved.tensors())
    np.testing.assert_array_equal(again.log_values(labelled[0]), moved.log_values(labelled[0]))


@pytest.mark.parametrize("prior", PRIORS)
def test_a_larger_batch_takes_no_less(prior, labelled):
    values = prior.log_values(labelled[0]).reshape(len(MODELS), 4)
    assert np.all(np.diff(values, axis=1) > 0)


def test_inference_has_no_backward_calls_and_no_update(labelled):
    terms = dict(
        zip(
            (term.name for term in SPEC.terms),
            CpuTimePrior().terms([replace(labelled[0][0], phase=Phase.INFER)])[0],
            strict=True,
        )
    )
    assert terms["forward calls"] > 0
    for name, value in terms.items():
        assert value == 0 or not ("backward" in name or name == "updates")
    assert terms["optimizer bytes"] == 0


def test_adam_moves_more_bytes_than_sgd(labelled):
    sgd, adam = (
        CpuTimePrior().terms([replace(labelled[0][0], optimizer=o)])[0]
        for o in (Optimizer.SGD, Optimizer.ADAM)
    )
    assert np.flatnonzero(adam > sgd).tolist() == [len(SPEC.terms) - 1]


def test_what_leaves_a_core_idle_costs_more_than_its_operations():
    def term(name, window=1, channels=64, groups=1, height=8, batch_size=8):
        layers = (
            nn.Conv2d(3, channels, 1, bias=False),
            nn.Conv2d(channels, channels, window, padding=window // 2, groups=groups, bias=False),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 2),
        )  # fmt: skip
        kernels = kernel_profile(nn.Sequential(*layers), height)
        step = Workload(graph=Graph.empty(batch_size), kernels=kernels)
        names = [spec.name for spec in SPEC.terms]
        return CpuTimePrior().terms([step])[0][names.index(name)]

    assert term("few rows", batch_size=64) == pytest.approx(term("few rows"))
    narrow = {"window": 3, "channels": 32, "groups": 32}
    for name in ("narrow forward", "narrow backward"):
        by_height = [term(name, height=height, **narrow) for height in (8, 16)]
        assert by_height[1] == pytest.approx(2 * by_height[0])  # with a quarter of the operations
        assert term(name) == 0
    assert term("large weights", channels=2048) == 0
    assert term("large weights", channels=3072) > 0  # 36 MiB


def test_a_step_time_without_kernels_is_refused(labelled):
    with pytest.raises(InputError, match="without kernels"):
        CpuTimePrior().log_values([replace(labelled[0][0], kernels=None)])


def test_more_layers_need_more_memory_at_the_same_live_bytes(labelled):
    """What `MemoryPrior` does not see: primitives and objects by layer."""
    terms = CpuMemoryPrior().terms(labelled[0])
    resnet, mobile = (terms[labelled[1].index(name)] for name in ("test_resnet", "mobilenetv2_035"))
    assert mobile[2] > 2 * resnet[2]
    assert mobile[3] > 2 * resnet[3]


def fit(workloads, names, log_values, start=None):
    targets = Targets(np.exp(log_values), np.full(len(names), np.nan), names)
    return Ours(CpuTimePrior()).fit(workloads, targets, np.random.default_rng(0), start)


def far(seed):
    """A device whose constants have little to do with others'."""
    return CpuTimePrior(np.random.default_rng(seed).uniform(-2.5, 2.5, len(SPEC.terms)))


def test_a_device_like_the_source_starts_from_it(labelled):
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


def test_a_source_holds_nothing_back(labelled):
    """Of a device that is unlike the source in one kind of kernel, labels teach as from scratch."""
    workloads, names = labelled
    unlike = np.zeros(len(SPEC.terms))
    unlike[[term.name for term in SPEC.terms].index("depthwise backward")] = 3.0
    source = fit(workloads, names, CpuTimePrior(unlike).log_values(workloads))
    truth = CpuTimePrior().log_values(workloads)
    before = np.abs(np.log(source.predict(workloads).median) - truth).mean()
    own = CpuTimePrior(unlike).refit(workloads, truth, tightness=CpuTimePrior.transfer_tightness)
    held = CpuTimePrior(unlike).refit(workloads, truth, tightness=0.05)
    after, tied = (np.abs(prior.log_values(workloads) - truth).mean() for prior in (own, held))
    assert 3 * after < tied < before


def test_inference_needs_less_beside_its_tensors(labelled):
    train, infer = (
        CpuMemoryPrior().terms([replace(labelled[0][0], phase=phase)])[0]
        for phase in (Phase.TRAIN, Phase.INFER)
    )
    np.testing.assert_allclose(infer[2:4], train[2:4] / 3)
    assert infer[1] < train[1]


def labels_of(workloads):
    targets = np.full((len(workloads), len(METRICS)), np.nan)
    for metric, prior in (("memory_mib", CpuMemoryPrior()), ("step_time_ms", CpuTimePrior())):
        targets[:, list(METRICS).index(metric)] = np.exp(prior.log_values(workloads))
    return targets


def trained(labelled, device, init=None):
    workloads, names = labelled
    return train_heads(
        workloads, labels_of(workloads), groups=names, preset=preset_named("laptop").head,
        generator=np.random.default_rng(0), spec=spec_of(device), init=init,
    )  # fmt: skip


def test_heads_of_a_cpu_are_kept_and_read_back(labelled):
    heads = trained(labelled, "cpu-2t")
    settings = heads.settings()
    assert settings["heads"] == {"memory_mib": "cpu-memory", "step_time_ms": "cpu-kernels"}
    again = heads_from_tensors(preset_named("laptop").head, settings, heads.tensors())
    np.testing.assert_array_equal(
        again.predict(labelled[0]).median, heads.predict(labelled[0]).median
    )


def test_heads_of_a_gpu_tell_a_cpu_nothing(labelled):
    """Their constants are of another formula."""
    own, after = (
        trained(labelled, "cpu-2t", init).predict(labelled[0]).median
        for init in (None, trained(labelled, "a100"))
    )
    np.testing.assert_allclose(after, own, rtol=0.05)
