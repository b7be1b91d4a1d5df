"""Sampling rules on made-up clocks, and real steps of a tiny model."""

import itertools
import resource

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_modules import Parts
from test_run_protocol import tiny
from torch import nn

from trappm.profiler.devices.cpu import CpuDevice
from trappm.profiler.errors import TrappmError, UnsupportedModelError
from trappm.profiler.records import (
    QUICK,
    Configuration,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
    Protocol,
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
from trappm.profiler.steps.step import give_ordinary_gains, make_step, run_protocol

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    torch.set_num_threads(1)


@given(
    st.lists(st.floats(1.0, 100.0), min_size=1, max_size=30),
    st.integers(1, 20),
    st.integers(0, 30),
    st.floats(0.0, 0.5),
)
def test_sampling_respects_its_bounds(times, min_steps, more, target):
    protocol = Protocol(
        min_steps=min_steps, max_steps=min_steps + more, max_seconds=3600.0,
        target_relative_error=target,
    )  # fmt: skip
    clock = itertools.cycle(times)
    samples_ms = sample(lambda n: [next(clock) for _ in range(n)], protocol)
    assert protocol.min_steps <= len(samples_ms) <= protocol.max_steps
    if len(samples_ms) < protocol.max_steps:
        good = relative_error(samples_ms) <= target
        assert good or has_stopped_falling(samples_ms)


def test_sampling_stops_at_the_time_limit():
    found = sampled([StepTime(1.0), StepTime(50.0)], Protocol(min_steps=6, max_seconds=0.1))
    assert len(found.times_ms) < 20


def sampled(steps, protocol=QUICK):
    """Samples of these steps, again and again, on a clock that they move."""
    coming, now = itertools.cycle(steps), [0.0]

    def time_steps(count):
        taken = list(itertools.islice(coming, count))
        now[0] += sum(step.wall_ms for step in taken) / 1000
        return taken

    return sample_clean(time_steps, protocol, clock=lambda: now[0])


def test_disturbed_steps_are_rejected_and_small_losses_subtracted():
    found = sampled([StepTime(10.0), StepTime(18.0, 8.0), StepTime(30.0, 20.0)])
    assert set(found.times_ms) == {10.0}
    assert len(found.times_ms) >= QUICK.min_steps
    assert found.rejected > QUICK.min_steps
    assert found.lost_share == 0.0
    found = sampled([StepTime(10.5, 0.5)])
    assert found.rejected == 0
    assert set(found.times_ms) == {10.0}


def test_the_least_disturbed_steps_are_used_at_the_time_limit():
    """Steps of 0.2 s next to a program that uses a core in short bursts."""
    steps = [StepTime(200.0 + lost, lost) for lost in (60.0, 90.0, 300.0, 50.0)]
    found = sampled(steps)
    assert len(found.times_ms) >= QUICK.min_steps
    assert found.times_ms == pytest.approx([200.0] * len(found.times_ms))
    assert found.rejected > 0
    assert found.lost_share == pytest.approx(60 / 260)


def test_relative_error_is_that_of_the_median():
    """Against the spread of many medians, which is what it estimates."""
    generator = np.random.default_rng(0)
    draws = generator.normal(100.0, 5.0, size=(4000, 41))
    spread = np.median(draws, axis=1).std() / 100.0
    estimates = [relative_error(list(row)) for row in draws[:400]]
    assert np.median(estimates) == pytest.approx(spread, rel=0.1)


def test_summaries_of_known_samples_and_parts():
    summary = summarize((1.0, 2.0, 3.0, 4.0, 100.0))
    assert (summary.median_ms, summary.mean_ms, summary.iqr_ms) == (3.0, 22.0, 2.0)
    summary = summarize((10.0,) * 3, [(3.0, 6.0, 1.0), (30.0, 60.0, 10.0), (3.0, 6.0, 1.0)])
    shares = (summary.forward_share, summary.backward_share, summary.optimizer_share)
    assert shares == pytest.approx((0.3, 0.6, 0.1))
    assert summarize((10.0,)).forward_share is None


def captured_model(configuration, monkeypatch):
    """The step of a configuration, and the real model that it works on."""
    models = []
    really_create = step_module.create_model

    def create(*arguments):
        models.append(really_create(*arguments))
        return models[-1]

    monkeypatch.setattr(step_module, "create_model", create)
    step = make_step(configuration, CPU)
    return models[0], step


@pytest.mark.parametrize(
    ("optimizer", "precision", "memory_format"),
    [
        *((Optimizer.SGD, precision, MemoryFormat.CONTIGUOUS) for precision in Precision),
        (Optimizer.ADAMW, Precision.AMP_FP16, MemoryFormat.CHANNELS_LAST),
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


@pytest.mark.parametrize(
    ("precision", "products", "convolutions"),
    [
        (Precision.TF32, "high", True),
        (Precision.FP32_STRICT, "highest", False),
    ],
)
def test_tf32_is_allowed_where_the_precision_says(precision, products, convolutions):
    try:
        make_step(tiny(precision=precision), CPU)
        assert torch.get_float32_matmul_precision() == products
        assert torch.backends.cudnn.allow_tf32 is convolutions
    finally:
        make_step(tiny(), CPU)


def test_inference_steps_change_nothing(monkeypatch):
    model, step = captured_model(tiny(phase=Phase.INFER), monkeypatch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step()
    assert not model.training
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_half_precision_without_kernels_is_unsupported(monkeypatch):
    def no_kernel(*_):
        raise RuntimeError("\"slow_conv2d_cpu\" not implemented for 'Half'\nmore of it")

    device = CpuDevice("cpu-1t")
    assert device.refusal(tiny(precision=Precision.FP32)) is None
    monkeypatch.setattr(torch.nn.Conv2d, "forward", no_kernel)
    phases = []
    with pytest.raises(UnsupportedModelError, match=r"amp-fp16.*not implemented for 'Half'$"):
        run_protocol(tiny(precision=Precision.AMP_FP16), device, QUICK, phases.append)
    assert phases == ["create"]


def test_equal_seeds_give_equal_weights(monkeypatch):
    states = []
    for _ in range(2):
        with monkeypatch.context() as patch:
            model, step = captured_model(tiny(), patch)
        step()
        states.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_a_model_larger_than_the_hosts_free_memory_ends_before_the_kernel_acts(monkeypatch):
    monkeypatch.setattr(step_module.procfs, "available_memory_mib", lambda: 30.0)
    name = "wide_resnet101_2"  # 484 MiB, more than freed memory of earlier tests
    configuration = Configuration(architecture=name, batch_size=1, input_size=32)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(TrappmError, match=r"try again: .*can't allocate memory") as caught:
        step_module.make_step(configuration, torch.device("meta"))
    assert not isinstance(caught.value, UnsupportedModelError)  # another host may have the memory
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits


def zero_share(model):
    """Of all gradients of the parameters, how many are exactly 0."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    zeros = sum(int((gradient == 0).sum()) for gradient in gradients)
    return zeros / sum(gradient.numel() for gradient in gradients)


def test_few_gradients_of_a_measured_step_are_zero(monkeypatch):
    """A fresh model multiplies much by zero: more than 70 % of its gradients."""
    configuration = tiny(architecture="resnet10t", batch_size=8, input_size=64)
    model, step = captured_model(configuration, monkeypatch)
    step()
    assert zero_share(model) < 0.02


def test_biases_and_random_weights_are_not_changed():
    model = Parts(
        norm=nn.BatchNorm2d(4),  # weights of 1
        last=nn.BatchNorm2d(4),
        linear=nn.Linear(3, 5),
        head=nn.Linear(64, 64),
        gamma_1=nn.Parameter(torch.full((4,), 1e-6)),
        skip_gain=nn.Parameter(torch.tensor(0.0)),
        cls_token=nn.Parameter(torch.zeros(1, 1, 4)),
        pos_embed=nn.Parameter(torch.zeros(1, 9, 4)),
    )
    nn.init.zeros_(model.last.weight)
    nn.init.zeros_(model.head.weight)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    give_ordinary_gains(model)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"last.weight", "gamma_1", "skip_gain", "head.weight"}
    assert model.last.weight.tolist() == model.gamma_1.tolist() == [1.0] * 4
    assert model.skip_gain.item() == 1.0
    assert model.head.weight.std().item() == pytest.approx(1 / 8, rel=0.1)
    assert all(p.requires_grad for p in model.parameters())
