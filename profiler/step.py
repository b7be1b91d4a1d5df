"""The step that is measured, and how it is timed: runs in the measuring child only.

A training step is zero_grad, forward, cross-entropy, backward, optimizer step; an inference step is
one forward pass. Images and targets are drawn once and stay on the device: loading data is not part
of a step. Imported by the fork server, so that its children find torch and timm warm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol as TypingProtocol

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import profiler.devices.cpu
import profiler.devices.cuda  # noqa: F401  # both devices warm as well
from profiler.devices.base import Mark, MemoryReading, StepDevice, Window
from profiler.environment import SEED
from profiler.errors import UnsupportedModelError
from profiler.records import (
    Configuration,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
    Protocol,
)
from profiler.sampling import sample
from profiler.zoo import create_model

_LEARNING_RATE = 1e-3
_MEMORY_STEPS = 2
"""The second step has everything that later ones have: gradients, optimizer states, workspaces."""

_PARTED_STEPS = 3
"""Steps whose parts are timed, once all samples are taken: parting a step may slow it down."""


@dataclass(frozen=True, kw_only=True)
class StepRun:
    """All that one run of the protocol has seen."""

    samples_ms: tuple[float, ...]
    window: Window
    steps_in_window: int
    memory: MemoryReading
    parts_ms: tuple[tuple[float, ...], ...] = ()
    """Forward with loss, backward, optimizer with zero_grad of a few more training steps (n, 3)."""


def run_protocol(
    configuration: Configuration,
    device: StepDevice,
    protocol: Protocol,
    enter: Callable[[str], None],
) -> StepRun:
    """Creates the model, warms up and times steps on a prepared device.

    `enter` is told each phase as it begins: `create`, `warmup`, `measure`.

    Raises:
        InputError: timm has no such architecture, or not for this input size.
        UnsupportedModelError: a model that cannot be built, or is no image classifier, or a
            precision that the device does not have.
        RuntimeError: whatever torch raises, out of memory included.
    """
    enter("create")
    refusal = device.refusal(configuration)
    if refusal is not None:
        raise UnsupportedModelError(refusal)
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
    parts_ms: tuple[tuple[float, ...], ...] = ()
    if configuration.phase is Phase.TRAIN:
        parts_ms = tuple(_parts(device.time_parts(step)) for _ in range(_PARTED_STEPS))
    return StepRun(
        samples_ms=samples_ms,
        window=window,
        steps_in_window=steps,
        memory=memory,
        parts_ms=parts_ms,
    )


def _parts(marked_ms: list[float]) -> tuple[float, ...]:
    """Forward, backward, optimizer, of the parts as a training step marks them."""
    zero_grad, forward, backward, optimizer = marked_ms
    return forward, backward, zero_grad + optimizer


class Step(TypingProtocol):
    """A whole step, ready to be called again and again; calls `mark` after each of its parts."""

    def __call__(self, mark: Mark = ...) -> None: ...


def _no_mark() -> None:
    pass


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
    def step(mark: Mark = _no_mark) -> None:
        with torch.inference_mode(), _autocast(images.device, precision):
            model(images)
        mark()

    return step


def _training_step(
    model: nn.Module, images: torch.Tensor, targets: torch.Tensor, configuration: Configuration
) -> Step:
    optimizer = _optimizer(model, configuration.optimizer)
    # fp16 gradients underflow without scaling, so nobody trains without it.
    scaled = configuration.precision is Precision.AMP_FP16
    scaler = torch.amp.GradScaler(images.device.type, enabled=scaled)

    def step(mark: Mark = _no_mark) -> None:
        optimizer.zero_grad()
        mark()
        with _autocast(images.device, configuration.precision):
            logits = model(images)
            if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
                raise UnsupportedModelError(
                    f"{configuration.architecture} gives no class scores but {_shape(logits)}"
                )
            loss = cross_entropy(logits, targets)
        mark()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        mark()
        scaler.step(optimizer)
        scaler.update()
        mark()

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
