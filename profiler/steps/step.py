"""The step that is measured, and how it is timed; runs in the measuring child only.

A training step is zero_grad, forward, cross-entropy, backward, optimizer step; an inference step is
one forward pass. Inputs are drawn once and stay on the device. The fork server imports this module,
so that its children find torch and timm loaded.
"""

from __future__ import annotations

import math
import random
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.host import procfs
from trappm.profiler.host.environment import SEED, host_facts
from trappm.profiler.host.procfs import lost_ms
from trappm.profiler.models import zoo as _zoo  # noqa: F401  (timm is there before any fork)
from trappm.profiler.models.model_input import NamedInputs
from trappm.profiler.models.sources import source_of
from trappm.profiler.records import (
    Configuration,
    Execution,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
    Protocol,
)
from trappm.profiler.steps.compiling import compile_facts, compiler_errors
from trappm.profiler.steps.meter import Mark, StepMeter, StepTime
from trappm.profiler.steps.sampling import StepRun, sample_clean

host_facts()  # asks git for the commit once, before all measuring processes are forked

# With a larger rate the loss of random images runs away, and gradients overflow.
_LEARNING_RATE = 1e-6
# torch's own, halved until gradients are finite: with a smaller one many underflow to 0, and zeros
# cost less power. One that grows would overflow every so often, and leave out the optimizer's step.
_FIRST_SCALE = 65_536.0
_NEVER_GROWS = 1 << 30

_MEMORY_STEPS = 2
"""The second step has all allocations of later ones: gradients, states, workspaces."""
_MAX_MEMORY_STEPS = 40
"""Largest number of steps to try while gradients overflow."""
_WARMUP_BATCH = 8

_FREE_SHARE = 0.9
"""Share of the host's free memory that a model may take before it is on its GPU."""

_PARTED_STEPS = 3
"""Number of steps whose parts are timed after all samples: marks may slow a step down."""


def run_protocol(
    configuration: Configuration,
    device: StepMeter,
    protocol: Protocol,
    enter: Callable[[str], None],
) -> StepRun:
    """Create the model, warm up and time steps on a prepared device.

    Args:
        configuration: Configuration to run.
        device: Prepared device.
        protocol: How to measure.
        enter: Called with each phase as it begins: `create`, `warmup`, `measure`.

    Raises:
        InputError: timm has no such architecture, or not for this input size.
        UnsupportedModelError: The model cannot be built or is not a classifier, or the device does
            not have this precision.
        MissingLibraryError: The optimizer's library is not installed.
        RuntimeError: Any error of torch, including missing memory.
    """
    enter("create")
    refusal = device.refusal(configuration)
    if refusal is not None:
        raise UnsupportedModelError(refusal)
    source_of(configuration.architecture)  # its library is not the step's memory
    if configuration.phase is Phase.TRAIN:
        configuration.optimizer.require_library()
    device.watch_memory()
    step = make_step(configuration, device.torch_device, device.share)
    enter("warmup")
    is_compiled = configuration.execution is Execution.COMPILE
    first_s = _compile(step, device) if is_compiled else 0.0
    _run_whole_steps(step, device, configuration)
    memory = device.memory()
    if is_compiled and device.torch_device.type == "cpu":
        reason = "the peak of a process on a CPU has the compiler's own memory in it"
        memory = replace(memory, peak_mib=None, missing={"memory_mib": reason})
    _warm_up(step, device, protocol)
    skipped_before = step.skipped()
    enter("measure")
    device.open_window(step)  # without power, too: samples then follow the same steps
    steps_before = step.count
    samples = sample_clean(lambda count: _time_steps(step, device, count), protocol)
    has_power = protocol.measures_power(configuration)
    if has_power:
        fill_window(step, device, protocol, samples.times_ms)
    steps = step.count - steps_before
    window = device.close_window()
    if not has_power:
        reason = f"protocol {protocol.name} measures the power of {protocol.power_share:.0%} only"
        window = replace(window, energy_j=None, energy_missing=window.energy_missing or reason)
    if device.thread_waits_ns():  # known of each step, except stolen CPU time
        window = replace(window, lost_share=window.facts.get("stolen_cpu_share"))
    if is_compiled:
        compile_s = max(0.0, first_s - float(np.median(samples.times_ms)) / 1000)
        facts = {**window.facts, "compile_s": compile_s, **compile_facts()}
        window = replace(window, facts=facts)
    skipped = step.skipped() - skipped_before
    if skipped:
        reason = f"{skipped} optimizer steps were left out, as gradients overflowed"
        window = replace(window, disturbances=(*window.disturbances, reason))
    parts_ms: tuple[tuple[float, ...], ...] = ()
    if configuration.phase is Phase.TRAIN:
        parts_ms = tuple(_parts(device.time_parts(step)) for _ in range(_PARTED_STEPS))
    device_ms, why = device.device_time_ms(step)
    if device_ms is not None:
        window = replace(window, facts={**window.facts, "device_time_ms": device_ms})
    elif why is not None:
        window = replace(window, missing={**window.missing, "device_time_ms": why})
    return StepRun(
        samples=samples,
        window=window,
        steps_in_window=steps,
        memory=memory,
        parts_ms=parts_ms,
    )


def _time_steps(step: Step, device: StepMeter, count: int) -> list[StepTime]:
    """Time steps, and read between them how long their threads waited for cores."""
    before = device.thread_waits_ns()
    if not before:
        return [StepTime(wall_ms) for wall_ms in device.time_steps(step, count)]
    steps = []
    for _ in range(count):
        [wall_ms] = device.time_steps(step, 1)
        after = device.thread_waits_ns()
        steps.append(StepTime(wall_ms, lost_ms(before, after)))
        before = after
    return steps


def fill_window(
    step: Step, device: StepMeter, protocol: Protocol, samples_ms: tuple[float, ...]
) -> None:
    """Run untimed steps until the energy meter's window is full."""
    remaining_ms = device.power_window_s(protocol) * 1000 - sum(samples_ms)
    if remaining_ms > 0:
        more = math.ceil(remaining_ms / float(np.median(samples_ms)))
        device.fill_window(step, more, random.Random(SEED))  # noqa: S311  # no secret
    device.run_to_tick(step)


def _run_whole_steps(step: Step, device: StepMeter, configuration: Configuration) -> None:
    """Run steps until a step has allocated everything, including optimizer states."""
    while (whole := step.count - step.skipped()) < _MEMORY_STEPS:
        if step.count >= _MAX_MEMORY_STEPS:
            raise UnsupportedModelError(
                f"{configuration.architecture} has no finite gradients in "
                f"{configuration.precision}, whatever they are scaled by ({step.count} steps tried)"
            )
        device.time_steps(step, _MEMORY_STEPS - whole)


def _compile(step: Step, device: StepMeter) -> float:
    """Run the first step, which compiles the model, and return its time in seconds."""
    begin = time.monotonic()
    with compiler_errors():
        device.time_steps(step, 1)
    if device.torch_device.type != "cpu":
        device.watch_memory()  # again: without what the compilation took
    return time.monotonic() - begin


def _warm_up(step: Step, device: StepMeter, protocol: Protocol) -> None:
    """Run the protocol's warm-up steps, and more on a device that needs a longer time."""
    begin = time.monotonic()
    if protocol.warmup_steps:
        device.time_steps(step, protocol.warmup_steps)
    while time.monotonic() - begin < device.min_warmup_s:
        device.time_steps(step, _WARMUP_BATCH)


def _parts(marked_ms: list[float]) -> tuple[float, ...]:
    """Return forward, backward and optimizer of the four marked parts."""
    zero_grad, forward, backward, optimizer = marked_ms
    return forward, backward, zero_grad + optimizer


def _no_mark() -> None:
    pass


@dataclass
class Step:
    """A step that can be called repeatedly; calls `mark` after each of its parts."""

    run: Callable[[Mark], None]
    scaler: torch.amp.GradScaler | None = None
    count: int = 0
    """Number of runs so far."""

    def __call__(self, mark: Mark = _no_mark) -> None:
        self.run(mark)
        self.count += 1

    def skipped(self) -> int:
        """Return the number of skipped updates so far; waits for the GPU."""
        if self.scaler is None:
            return 0
        # Each of them has halved the scale, which never grows and ends at 0.
        scale = max(self.scaler.get_scale(), 2.0**-149)
        return round(math.log2(_FIRST_SCALE / scale))


def create_model(architecture: str, input_size: int) -> nn.Module:
    """Return the model of a configuration; raises as `ModelSource.create_model`."""
    return source_of(architecture).create_model(architecture, input_size)


@contextmanager
def limit_to_free_memory() -> Iterator[None]:
    """Let allocations fail in the block that exceed the host's free memory.

    Otherwise the kernel would end the process, and in a container all others with it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    in_use_kib = procfs.memory_status_kib()["VmData"]
    limit = (in_use_kib << 10) + int(_FREE_SHARE * procfs.available_memory_mib() * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if soft < 0 else min(soft, limit), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def make_step(
    configuration: Configuration,
    device: torch.device,
    share: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Step:
    """Return the step of a configuration.

    Args:
        configuration: Configuration of the step.
        device: Device to run it on.
        share: Wraps the model if several devices train it (`StepMeter.share`).

    Raises:
        InputError, UnsupportedModelError: As for `run_protocol`.
    """
    torch.manual_seed(SEED)
    torch.backends.cudnn.allow_tf32 = configuration.precision is not Precision.FP32_STRICT
    torch.set_float32_matmul_precision(
        "high" if configuration.precision is Precision.TF32 else "highest"
    )
    name, input_size = configuration.architecture, configuration.input_size
    # On a CPU device it is the device's memory, whose end is an outcome.
    with limit_to_free_memory() if device.type != "cpu" else nullcontext():
        model = create_model(name, input_size)
    give_ordinary_gains(model)
    if configuration.precision is Precision.BF16:
        model = model.to(torch.bfloat16)
    layout = (
        torch.channels_last
        if configuration.memory_format is MemoryFormat.CHANNELS_LAST
        else torch.contiguous_format
    )
    model = model.to(device=device, memory_format=layout)  # type: ignore[call-overload]
    classes = max(1, int(getattr(model, "num_classes", 1)))
    if configuration.phase is Phase.TRAIN:
        model = share(model)
    if configuration.execution is Execution.COMPILE:
        model = cast("nn.Module", torch.compile(model))
    model.train(configuration.phase is Phase.TRAIN)
    # Drawn where they stay: a large batch is for the device's memory to refuse, not the host's.
    generator = torch.Generator(device).manual_seed(SEED)
    inputs = source_of(name).inputs(name, input_size)
    if isinstance(inputs, NamedInputs):
        return _step_of_named(model, inputs, configuration, generator)
    shape = (configuration.batch_size, 3, input_size, input_size)
    images = torch.empty(shape, device=device, memory_format=layout).normal_(generator=generator)
    if configuration.precision is Precision.BF16:
        images = images.to(torch.bfloat16)
    if configuration.phase is Phase.INFER:
        return _inference_step(lambda: model(images), configuration.precision, device)
    targets = torch.randint(
        classes, (configuration.batch_size,), generator=generator, device=device
    )

    def loss() -> torch.Tensor:
        logits = model(images)
        if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
            raise UnsupportedModelError(
                f"{configuration.architecture} gives no class scores but {_shape(logits)}"
            )
        return cross_entropy(logits, targets)

    return _training_step(loss, model, configuration, device)


def _step_of_named(
    model: nn.Module,
    inputs: NamedInputs,
    configuration: Configuration,
    generator: torch.Generator,
) -> Step:
    """Return the step of a model that is called by keyword and has its own loss."""
    phase = configuration.phase
    batch = inputs.in_phase(phase).draw(configuration.batch_size, generator)
    if configuration.precision is Precision.BF16:
        batch = {
            name: value.to(torch.bfloat16)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in batch.items()
        }
    if phase is Phase.INFER:
        return _inference_step(lambda: model(**batch), configuration.precision, generator.device)
    return _training_step(lambda: model(**batch).loss, model, configuration, generator.device)


def _inference_step(
    forward: Callable[[], object], precision: Precision, device: torch.device
) -> Step:
    def step(mark: Mark) -> None:
        with torch.inference_mode(), _autocast(device, precision):
            forward()
        mark()

    return Step(step)


def _training_step(
    loss_of_step: Callable[[], torch.Tensor],
    model: nn.Module,
    configuration: Configuration,
    device: torch.device,
) -> Step:
    optimizer = _optimizer(model, configuration.optimizer)
    # fp16 gradients underflow without scaling, so training always has it.
    scaled = configuration.precision is Precision.AMP_FP16
    scaler = torch.amp.GradScaler(
        device.type,
        init_scale=_FIRST_SCALE,
        backoff_factor=0.5,
        growth_interval=_NEVER_GROWS,
        enabled=scaled,
    )

    def step(mark: Mark) -> None:
        optimizer.zero_grad()
        mark()
        with _autocast(device, configuration.precision):
            loss = loss_of_step()
        mark()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        mark()
        scaler.step(optimizer)
        scaler.update()
        mark()

    return Step(step, scaler if scaled else None)


def _optimizer(model: nn.Module, kind: Optimizer) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind is Optimizer.ADAM:
        return torch.optim.Adam(trained, lr=_LEARNING_RATE)
    if kind is Optimizer.ADAMW:
        return torch.optim.AdamW(trained, lr=_LEARNING_RATE)
    if kind is Optimizer.ADAMW_8BIT:
        from bitsandbytes.optim import AdamW8bit

        return cast("torch.optim.Optimizer", AdamW8bit(trained, lr=_LEARNING_RATE))
    momentum = 0.9 if kind is Optimizer.MOMENTUM else 0.0
    return torch.optim.SGD(trained, lr=_LEARNING_RATE, momentum=momentum)


def _autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    if precision.is_fp32 or precision is Precision.BF16:
        return nullcontext()
    dtype = torch.float16 if precision is Precision.AMP_FP16 else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype)


def _shape(output: object) -> str:
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    return f"a {type(output).__name__}"


# A residual branch often begins with a norm whose weights are 0, or with a layer scale of 1e-6, so
# that the network is close to the identity at first. Until training has moved them, what flows back
# through the branch is 0 too: three quarters of ResNet-18's gradients are. Multiplying zeros takes
# less power than multiplying numbers, and where power is the limit, less time. After a few hundred
# steps of a training no model is like that, so we measure none that way.

_TINY = 0.1
"""Smaller gains get a new value; those of trained models are of the order of 1."""

_GAIN = re.compile(r"weight$|gamma|gain|scale|alpha|^ls\d")
"""Names of factors. Biases, tokens and position embeddings are added, so zeros are harmless."""


@torch.no_grad()
def give_ordinary_gains(model: nn.Module) -> None:
    """Set gains that are all 0, or all equal and tiny, to 1, and zero matrices to noise."""
    for name, parameter in model.named_parameters():
        if not _GAIN.search(name.rpartition(".")[2]) or parameter.numel() == 0:
            continue
        first = float(parameter.flatten()[0])
        if abs(first) > _TINY or bool((parameter != first).any()):
            continue
        if parameter.ndim > 1 and name.endswith("weight"):
            fan_in = parameter.numel() / parameter.shape[0]
            parameter.normal_(std=fan_in**-0.5)
        else:
            parameter.fill_(1.0)
