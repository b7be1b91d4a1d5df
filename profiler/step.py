"""The step that is measured, and how it is timed: runs in the measuring child only.

A training step is zero_grad, forward, cross-entropy, backward, optimizer step; an inference step is
one forward pass. Images and targets are drawn once and stay on the device: loading data is not part
of a step. Imported by the fork server, so that its children find torch and timm warm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import profiler.devices.cpu
import profiler.devices.cuda  # noqa: F401  # both devices warm as well
from profiler.devices.base import Device, MemoryReading, Window
from profiler.environment import SEED
from profiler.errors import UnsupportedModelError
from profiler.records import (
    Configuration,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
    Protocol,
    StepSummary,
)
from profiler.zoo import create_model

Step = Callable[[], None]

_LEARNING_RATE = 1e-3
_MEMORY_STEPS = 2
"""The second step has everything that later ones have: gradients, optimizer states, workspaces."""

_CHUNK = 4
"""Steps between two looks at the noise: a synchronisation on a GPU."""


@dataclass(frozen=True, kw_only=True)
class StepRun:
    """All that one run of the protocol has seen."""

    samples_ms: tuple[float, ...]
    window: Window
    steps_in_window: int
    memory: MemoryReading


def run_protocol(
    configuration: Configuration,
    device: Device,
    protocol: Protocol,
    enter: Callable[[str], None],
) -> StepRun:
    """Creates the model, warms up and times steps on a prepared device.

    `enter` is told each phase as it begins: `create`, `warmup`, `measure`.

    Raises:
        InputError: timm has no such architecture, or not for this input size.
        UnsupportedModelError: a model that cannot be built, or is no image classifier.
        RuntimeError: whatever torch raises, out of memory included.
    """
    enter("create")
    device.watch_memory()
    step = make_step(configuration, device.torch_device)
    enter("warmup")
    device.time_steps(step, _MEMORY_STEPS)
    memory = device.memory()
    if protocol.warmup_steps:
        device.time_steps(step, protocol.warmup_steps)
    enter("measure")
    device.open_window()
    samples_ms = sample(lambda count: device.time_steps(step, count), protocol)
    steps = len(samples_ms)
    # A fast step leaves the energy meter too little time: go on without timing.
    remaining_ms = device.min_power_window_s * 1000 - sum(samples_ms)
    if remaining_ms > 0:
        more = math.ceil(remaining_ms / float(np.median(samples_ms)))
        device.time_steps(step, more)
        steps += more
    window = device.close_window()
    return StepRun(samples_ms=samples_ms, window=window, steps_in_window=steps, memory=memory)


def sample(time_steps: Callable[[int], list[float]], protocol: Protocol) -> tuple[float, ...]:
    """Step times in milliseconds, until the protocol's rules are satisfied."""
    begin = time.monotonic()
    samples_ms = time_steps(protocol.min_steps)
    while (
        len(samples_ms) < protocol.max_steps
        and time.monotonic() - begin < protocol.max_seconds
        and relative_error(samples_ms) > protocol.target_relative_error
    ):
        samples_ms += time_steps(min(_CHUNK, protocol.max_steps - len(samples_ms)))
    return tuple(samples_ms)


def relative_error(samples_ms: list[float]) -> float:
    """Standard error of the median, relative to it; infinite for fewer than two samples.

    For n normal samples it is 1.2533 sigma / sqrt(n); sigma is taken from the interquartile range,
    which one slow step does not move.
    """
    if len(samples_ms) < 2:
        return math.inf
    low, median, high = np.percentile(samples_ms, (25, 50, 75))
    return float(1.2533 * (high - low) / 1.349 / math.sqrt(len(samples_ms)) / median)


def summarize(samples_ms: tuple[float, ...]) -> StepSummary:
    """Median, mean, interquartile range and 95th percentile of the samples."""
    low, median, high, p95 = (float(q) for q in np.percentile(samples_ms, (25, 50, 75, 95)))
    return StepSummary(
        median_ms=median, mean_ms=float(np.mean(samples_ms)), iqr_ms=high - low, p95_ms=p95
    )


def make_step(configuration: Configuration, device: torch.device) -> Step:
    """The whole step of a configuration, ready to be called again and again.

    Raises:
        InputError, UnsupportedModelError: as for `run_protocol`.
    """
    torch.manual_seed(SEED)
    model = create_model(configuration.architecture, configuration.input_size)
    layout = (
        torch.channels_last
        if configuration.memory_format is MemoryFormat.CHANNELS_LAST
        else torch.contiguous_format
    )
    model = model.to(device=device, memory_format=layout)  # type: ignore[call-overload]
    generator = torch.Generator().manual_seed(SEED)
    size = configuration.input_size
    images = torch.randn(configuration.batch_size, 3, size, size, generator=generator)
    images = images.to(device=device, memory_format=layout)
    if configuration.phase is Phase.INFER:
        return _inference_step(model.eval(), images, configuration.precision)
    classes = max(1, int(getattr(model, "num_classes", 1)))
    targets = torch.randint(classes, (configuration.batch_size,), generator=generator)
    return _training_step(model.train(), images, targets.to(device), configuration)


def _inference_step(model: nn.Module, images: torch.Tensor, precision: Precision) -> Step:
    def step() -> None:
        with torch.inference_mode(), _autocast(images.device, precision):
            model(images)

    return step


def _training_step(
    model: nn.Module, images: torch.Tensor, targets: torch.Tensor, configuration: Configuration
) -> Step:
    optimizer = _optimizer(model, configuration.optimizer)
    # fp16 gradients underflow without scaling, so nobody trains without it.
    scaled = configuration.precision is Precision.AMP_FP16
    scaler = torch.amp.GradScaler(images.device.type, enabled=scaled)

    def step() -> None:
        optimizer.zero_grad()
        with _autocast(images.device, configuration.precision):
            logits = model(images)
            if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
                raise UnsupportedModelError(
                    f"{configuration.architecture} gives no class scores but {_shape(logits)}"
                )
            loss = cross_entropy(logits, targets)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()

    return step


def _optimizer(model: nn.Module, kind: Optimizer) -> torch.optim.Optimizer:
    if kind is Optimizer.ADAM:
        return torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)
    momentum = 0.9 if kind is Optimizer.MOMENTUM else 0.0
    return torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=momentum)


def _autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    if precision is Precision.FP32:
        return nullcontext()
    dtype = torch.float16 if precision is Precision.AMP_FP16 else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype)


def _shape(output: object) -> str:
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    return f"a {type(output).__name__}"
