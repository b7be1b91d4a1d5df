"""Sampling rules on made-up clocks, and real steps of a tiny model."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trappm.profiler.devices.cpu import CpuDevice
from trappm.profiler.errors import InputError, UnsupportedModelError
from trappm.profiler.records import (
    ADAPTIVE,
    PAPER,
    PROTOCOLS,
    QUICK,
    Configuration,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
    Protocol,
    protocol_named,
)
from trappm.profiler.steps import step as step_module
from trappm.profiler.steps.meter import StepTime
from trappm.profiler.steps.sampling import (
    has_stopped_falling,
    relative_error,
    sample,
    sample_clean,
    summarize,
)
from trappm.profiler.steps.step import make_step, run_protocol

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    torch.set_num_threads(1)


def tiny(**changes):
    fields = {"architecture": "mobilenetv3_small_050", "batch_size": 2, "input_size": 32}
    return Configuration(**{**fields, **changes})


@given(
    st.lists(st.floats(1.0, 100.0), min_size=1, max_size=30),
    st.integers(1, 20),
    st.integers(0, 30),
    st.floats(0.0, 0.5),
)
def test_sampling_respects_its_bounds(times, min_steps, more, target):
    protocol = Protocol(
        min_steps=min_steps,
        max_steps=min_steps + more,
        max_seconds=3600.0,
        target_relative_error=target,
    )
    clock = itertools.cycle(times)
    samples_ms = sample(lambda n: [next(clock) for _ in range(n)], protocol)
    assert protocol.min_steps <= len(samples_ms) <= protocol.max_steps
    if len(samples_ms) < protocol.max_steps:
        good = relative_error(samples_ms) <= target
        assert good or has_stopped_falling(samples_ms)


def test_sampling_stops_at_the_time_limit():
    noisy = itertools.cycle((1.0, 50.0))
    protocol = Protocol(min_steps=6, max_steps=1000, max_seconds=0.0, target_relative_error=1e-9)
    assert len(sample(lambda n: [next(noisy) for _ in range(n)], protocol)) == 6


def sampled(steps, protocol=QUICK):
    """Samples of these steps, again and again, on a clock that they move."""
    coming, now = itertools.cycle(steps), [0.0]

    def time_steps(count):
        taken = list(itertools.islice(coming, count))
        now[0] += sum(step.wall_ms for step in taken) / 1000
        return taken

    return sample_clean(time_steps, protocol, clock=lambda: now[0])


def test_disturbed_steps_are_rejected():
    found = sampled([StepTime(10.0), StepTime(18.0, 8.0), StepTime(30.0, 20.0)])
    assert set(found.times_ms) == {10.0}
    assert len(found.times_ms) >= QUICK.min_steps
    assert found.rejected > QUICK.min_steps
    assert found.lost_share == 0.0


def test_small_losses_are_subtracted():
    found = sampled([StepTime(10.5, 0.5)])
    assert found.rejected == 0
    assert set(found.times_ms) == {10.0}


@pytest.mark.parametrize(
    ("cycle_ms", "steps"),
    [((7.0,), QUICK.min_steps), ((5.0, 9.0), QUICK.max_steps), ((10.0, 10.1, 9.9, 10.05), None)],
)
def test_undisturbed_steps_are_all_used(cycle_ms, steps):
    """Equal steps end at the first look, noisy ones at the protocol's limit."""
    found = sampled([StepTime(ms) for ms in cycle_ms])
    assert (found.rejected, found.lost_share) == (0, 0.0)
    assert list(found.times_ms) == list(
        itertools.islice(itertools.cycle(cycle_ms), len(found.times_ms))
    )
    assert QUICK.min_steps <= len(found.times_ms) <= QUICK.max_steps
    if steps is not None:
        assert len(found.times_ms) == steps


def test_the_least_disturbed_steps_are_used_at_the_time_limit():
    """Steps of 0.2 s beside a program that uses a core in short bursts."""
    steps = [StepTime(200.0 + lost, lost) for lost in (60.0, 90.0, 300.0, 50.0)]
    found = sampled(steps)
    assert len(found.times_ms) >= QUICK.min_steps
    assert found.times_ms == pytest.approx([200.0] * len(found.times_ms))
    assert found.rejected > 0
    assert found.lost_share == pytest.approx(60 / 260)


def test_sampling_ends_if_every_step_is_disturbed():
    found = sampled([StepTime(100.0, 150.0)])
    assert found.lost_share == 0.99
    assert all(ms > 0 for ms in found.times_ms)


def test_adaptive_sampling_stops_when_more_steps_do_not_help():
    """A clock that slows down for good: the samples hang together, the error stays."""
    drifting = (100.0 * 1.01**n for n in itertools.count())
    samples_ms = sample(lambda n: list(itertools.islice(drifting, n)), ADAPTIVE)
    assert ADAPTIVE.min_steps < len(samples_ms) < ADAPTIVE.max_steps
    assert relative_error(samples_ms) > ADAPTIVE.target_relative_error


def test_adaptive_sampling_continues_while_samples_help():
    """Ten seeds of plain noise: most runs end because the median is known well enough."""
    ends = []
    for seed in range(10):
        noise = np.random.default_rng(seed)
        samples_ms = sample(lambda n, g=noise: g.normal(100.0, 1.0, n).tolist(), ADAPTIVE)
        ends.append(relative_error(samples_ms) <= ADAPTIVE.target_relative_error)
    assert sum(ends) >= 8


def test_protocols_are_found_by_name():
    assert [protocol_named(name) for name in PROTOCOLS] == [PAPER, QUICK, ADAPTIVE]
    with pytest.raises(InputError, match="paper, quick, adaptive"):
        protocol_named("papr")


def test_relative_error_is_that_of_the_median():
    """Against the spread of many medians, which is what it estimates."""
    generator = np.random.default_rng(0)
    draws = generator.normal(100.0, 5.0, size=(4000, 41))
    spread = np.median(draws, axis=1).std() / 100.0
    estimates = [relative_error(list(row)) for row in draws[:400]]
    assert np.median(estimates) == pytest.approx(spread, rel=0.1)


def test_summaries_of_known_samples():
    summary = summarize((1.0, 2.0, 3.0, 4.0, 100.0))
    assert (summary.median_ms, summary.mean_ms, summary.iqr_ms) == (3.0, 22.0, 2.0)


def test_shares_of_a_step_sum_over_its_parts():
    summary = summarize((10.0,) * 3, [(3.0, 6.0, 1.0), (30.0, 60.0, 10.0), (3.0, 6.0, 1.0)])
    shares = (summary.forward_share, summary.backward_share, summary.optimizer_share)
    assert shares == pytest.approx((0.3, 0.6, 0.1))
    assert summarize((10.0,)).forward_share is None


def captured_model(configuration, monkeypatch):
    """The step of a configuration, and the real model that it works on."""
    models = []
    really_create = step_module.create_model

    def create(architecture, input_size):
        models.append(really_create(architecture, input_size))
        return models[-1]

    monkeypatch.setattr(step_module, "create_model", create)
    step = make_step(configuration, CPU)
    return models[0], step


@pytest.mark.parametrize(
    ("optimizer", "precision", "memory_format"),
    [
        *((Optimizer.SGD, precision, MemoryFormat.CONTIGUOUS) for precision in Precision),
        *((optimizer, Precision.AMP_FP16, MemoryFormat.CHANNELS_LAST) for optimizer in Optimizer),
    ],
)
def test_training_steps_change_parameters(optimizer, precision, memory_format, monkeypatch):
    configuration = tiny(optimizer=optimizer, precision=precision, memory_format=memory_format)
    model, step = captured_model(configuration, monkeypatch)
    before = [p.detach().clone() for p in model.parameters()]
    while step.count == step.skipped():  # in fp16 until the scaled gradients are finite
        step()
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    # So small a rate moves parameters of 16 bits only near 0; the update costs the same.
    half = precision is Precision.BF16
    assert sum(changed) > (0 if half else len(changed) / 2)
    assert all(p.grad is not None for p in model.parameters())
    assert all(p.dtype is (torch.bfloat16 if half else torch.float32) for p in model.parameters())


def test_training_steps_mark_their_parts_in_order(monkeypatch):
    model, step = captured_model(tiny(optimizer=Optimizer.MOMENTUM), monkeypatch)
    step()
    seen = []

    def mark():
        gradients = [p.grad for p in model.parameters()]
        seen.append((all(g is None for g in gradients), next(model.parameters()).clone()))

    step(mark)
    assert [empty for empty, _ in seen] == [True, True, False, False]
    weights = [weight for _, weight in seen]
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[2], weights[3])


def test_inference_steps_change_nothing(monkeypatch):
    model, step = captured_model(tiny(phase=Phase.INFER), monkeypatch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step()
    assert not model.training
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("precision", [Precision.AMP_FP16, Precision.AMP_BF16])
def test_half_precision_without_kernels_is_unsupported(precision, monkeypatch):
    def no_kernel(*_):
        raise RuntimeError("\"slow_conv2d_cpu\" not implemented for 'Half'\nmore of it")

    device = CpuDevice("cpu-1t")
    assert device.refusal(tiny(precision=Precision.FP32)) is None
    monkeypatch.setattr(torch.nn.Conv2d, "forward", no_kernel)
    phases = []
    with pytest.raises(UnsupportedModelError, match=f"{precision}.*not implemented for 'Half'$"):
        run_protocol(tiny(precision=precision), device, QUICK, phases.append)
    assert phases == ["create"]


def test_equal_seeds_give_equal_weights(monkeypatch):
    states = []
    for _ in range(2):
        with monkeypatch.context() as patch:
            model, step = captured_model(tiny(), patch)
        step()
        states.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_models_without_class_scores_are_unsupported(monkeypatch):
    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, images):
            return images * self.weight, images

    monkeypatch.setattr(step_module, "create_model", lambda *_: Pair())
    with pytest.raises(UnsupportedModelError, match="tuple"):
        make_step(tiny(), CPU)()
