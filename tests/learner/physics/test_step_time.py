"""The simulated step time knows physics without labels, learns constants, and transfers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_samples import ROWS, error, inference, moved, networks, workload

from trappm.learner.interface import Workload
from trappm.learner.physics.devices.known_devices import known_devices
from trappm.learner.physics.step_time import STEP_MS, StepTimePrior, spreads
from trappm.profiler.devices.catalogue import spec_of
from trappm.profiler.records import Graph, Optimizer, Phase, Precision
from trappm.profiler.records.step_scope import StepScope
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import KernelKind, Pass, TraceSettings

torch.set_num_threads(1)

HALF = Precision.AMP_FP16
A100, RTX, V100 = spec_of("a100"), spec_of("rtx3090"), spec_of("v100")


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), factor=st.integers(2, 5))
def test_step_time_grows_at_most_linearly_with_the_batch(seed, factor):
    few = networks(1, seed)[0]
    many = replace(few, graph=Graph.empty(few.batch_size * factor))
    first, second = StepTimePrior(A100).log_values([few, many])
    assert first < second <= first + np.log(factor) + 1e-9


def test_inference_is_faster_than_training_and_adam_slower_than_sgd():
    step = networks(1)[0]
    train, infer = StepTimePrior(A100).log_values([step, inference(step)])
    assert infer < train
    by_optimizer = [
        StepTimePrior(A100).log_values([replace(step, optimizer=optimizer)])[0]
        for optimizer in (Optimizer.SGD, Optimizer.MOMENTUM, Optimizer.ADAM)
    ]
    assert by_optimizer == sorted(by_optimizer)
    assert len(set(by_optimizer)) == 3


def test_labels_recover_the_constants_of_an_unknown_device():
    seen, unseen = networks(60), networks(30, seed=1)
    start = StepTimePrior(A100)
    truth = moved(start, seed=3, spread=0.5)
    before = error(start, unseen, truth.log_values(unseen))
    fitted = start.refit(seen, truth.log_values(seen))
    after = error(fitted, unseen, truth.log_values(unseen))
    assert before > 0.08
    assert after < min(0.03, before / 3)


def test_transfer_needs_fewer_labels_than_scratch():
    seen, unseen = networks(60), networks(30, seed=1)
    known = moved(StepTimePrior(A100), seed=3)
    fitted = StepTimePrior(A100).refit(seen, known.log_values(seen))
    # The new device differs in its own speeds only.
    new = StepTimePrior(replace(RTX, bandwidth_gbs=700.0), known.constants)
    truth = new.log_values(unseen)
    few = networks(8, seed=2)
    labels = new.log_values(few)
    scratch = StepTimePrior(RTX).refit(few, labels)
    transferred = StepTimePrior(RTX).started_from(fitted).refit(few, labels, tightness=0.3)
    assert error(transferred, unseen, truth) < 0.04
    assert error(transferred, unseen, truth) < error(scratch, unseen, truth)


def test_one_outlier_changes_little():
    seen, unseen = networks(60), networks(30, seed=1)
    truth = moved(StepTimePrior(A100), seed=3)
    labels = truth.log_values(seen)
    labels[5] += 2.0
    fitted = StepTimePrior(A100).refit(seen, labels)
    assert error(fitted, unseen, truth.log_values(unseen)) < 0.03


def test_the_spread_of_constants_is_learned_from_labels():
    seen, start = networks(60), StepTimePrior(A100)
    truth = start.constants.clone()
    random = torch.from_numpy(np.random.default_rng(5).normal(size=len(truth)))
    truth[ROWS["stream"]] += 2.0 * random[ROWS["stream"]]  # of 0.49 as we believed
    fitted = start.refit(seen, StepTimePrior(A100, truth).log_values(seen))
    change = fitted.learned_spreads / spreads(1.0)
    assert change[ROWS["stream"]].min() > 1.3


def test_a_fold_does_not_start_from_constants_that_used_its_labels(monkeypatch):
    monkeypatch.setattr("trappm.learner.physics.step_time.MANY_LABELS", 20)
    some, start = networks(36), StepTimePrior(A100)
    labels = moved(start, seed=3, spread=0.5).log_values(some)
    of_all = start.refit(some, labels)
    elsewhere = StepTimePrior(A100, of_all.constants + 0.5, of_all.learned_spreads)
    fold, other = (start.refit(some[:24], labels[:24], near=n) for n in (of_all, elsewhere))
    assert torch.equal(fold.constants, other.constants)
    assert torch.equal(fold.learned_spreads, of_all.learned_spreads)


def test_labels_that_are_only_bounds_are_ignored():
    seen, start = networks(12), StepTimePrior(A100)
    labels = moved(start, seed=3).log_values(seen)
    some = start.refit(seen[:9], labels[:9])
    labels[9:] = np.nan
    both = start.refit(seen, labels, log_above=np.where(np.isnan(labels), 3.0, np.nan))
    torch.testing.assert_close(both.constants, some.constants)
    assert start.refit([], np.zeros(0)) is start


def along(prior, by):
    """The prior with constants moved by these numbers of their deviations."""
    deviations = spreads(1.0) if prior.between is None else prior.between
    constants = prior.constants + torch.from_numpy(by) * deviations
    return StepTimePrior(prior.spec, constants, between=prior.between)


KNOWN = known_devices()


@pytest.mark.parametrize(
    "start", [StepTimePrior(A100), StepTimePrior(A100, KNOWN.centre, between=KNOWN.spreads)]
)
def test_sensitivities_are_derivatives_in_units_of_the_spread(start):
    some, random = networks(5), np.random.default_rng(2).normal(size=len(start.constants))
    prior = along(start, 0.3 * random)
    random = np.random.default_rng(0).normal(size=len(prior.constants))
    ahead, behind = (along(prior, sign * 1e-5 * random).log_values(some) for sign in (1, -1))
    expected = prior.sensitivities(some) @ random
    np.testing.assert_allclose((ahead - behind) / 2e-5, expected, rtol=1e-5, atol=1e-7)
    assert prior.sensitivities([]).shape == (0, len(prior.constants))


@pytest.mark.parametrize(
    "change",
    [
        {"constants": torch.zeros(3)},
        {"constants": StepTimePrior(RTX).constants * np.nan},
        {"spec": torch.ones(3)},
    ],
)
def test_invalid_tensors_are_refused(change):
    with pytest.raises(ValueError, match=r"constants|spec"):
        StepTimePrior.from_tensors({**StepTimePrior(RTX).tensors(), **change})
    with pytest.raises(KeyError):
        StepTimePrior.from_tensors({})


def resnet50(precision=Precision.FP32, phase=Phase.TRAIN):
    """Of a step at batch 32."""
    kernels = trace("resnet50", 224, TraceSettings(precision=precision), phase).kernels
    return Workload(graph=Graph.empty(32), precision=precision, phase=phase, kernels=kernels)


@pytest.mark.parametrize("kind", [KernelKind.GROUPED, KernelKind.DEPTHWISE])
def test_tensor_cores_compute_grouped_but_no_depthwise_convolutions(kind):
    step = workload([(kind, Pass.FORWARD, 100_000, 64, 576, 64)])
    fp32 = replace(step.kernels, table=replace(step.kernels.table, half=np.zeros(1, np.bool_)))
    fast, slow = (replace(A100, tf32_tflops=1e6, half_tflops=1e6), A100)
    for one in (step, replace(step, precision=Precision.FP32, kernels=fp32)):
        times = [StepTimePrior(spec).log_values([one])[0] for spec in (fast, slow)]
        assert (times[0] < times[1]) == (kind is KernelKind.GROUPED)


def test_step_scopes_change_the_simulated_time():
    whole = resnet50()
    infers = resnet50(phase=Phase.INFER)
    prior = StepTimePrior(V100)

    def ms(workload, **scope):
        return float(np.exp(prior.log_values([replace(workload, scope=StepScope(**scope))])[0]))

    assert ms(whole, updates=False) < ms(whole)
    for step in (whole, replace(whole, graph=Graph.empty(1))):  # the second waits for its host
        passes_ms = float(prior.pass_share([step])[0]) * ms(step)
        assert passes_ms == pytest.approx(ms(step, updates=False) - STEP_MS)
    assert ms(infers, updates=False) == ms(infers)
    copied = ms(infers, copied_bytes=3 * 4 * 224**2) - ms(infers)
    at_5_gb_per_s = 3 * 4 * 224**2 * whole.batch_size / 5e6
    assert copied == pytest.approx(at_5_gb_per_s)
    small = replace(infers, graph=Graph.empty(1))
    assert ms(small, waits_for_host=False) < ms(small)
    alone = replace(small, scope=StepScope(waits_for_host=False))
    assert np.isfinite(prior.sensitivities([alone])).all()
