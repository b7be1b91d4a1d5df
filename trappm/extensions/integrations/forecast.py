"""What the first step of a training will take, a moment before it runs, in one sentence.

Memory comes from `trappm.estimate` on the module and its first batch, time from `trappm.predict`
where the model goes by a name and the device has heads.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trappm.prediction.device_names import device_title
from trappm.prediction.estimate import Predicted, estimate, loop_of
from trappm.prediction.fitting import MemoryInterval, Verdict, room_text, simulated_interval
from trappm.prediction.models.sizes import size_kind
from trappm.prediction.predict import predict
from trappm.prediction.question import Question
from trappm.profiler.errors import InputError, TrappmError, one_line
from trappm.profiler.host import procfs
from trappm.profiler.measuring.sweep import duration
from trappm.profiler.records import Precision, is_cpu_device
from trappm.profiler.simulation.training_loop import TrainingLoop

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """The first step of a training, a moment before it runs."""

    model: nn.Module
    name: str | None
    """Of timm's architecture or a transformer, such as `hf:gpt2`; None for all other modules."""
    args: tuple[Any, ...] = ()
    """What the model is called with."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer
    precision: Precision
    accumulation_steps: int = 1
    clips_gradients: bool = False
    epoch_batches: int | None
    """Of this process; None where nobody knows."""
    processes: int = 1
    device: torch.device

    @property
    def loop(self) -> TrainingLoop:
        """What happens around the step; raises InputError where the optimizer is unknown."""
        return replace(
            loop_of(self.optimizer, self.precision),
            accumulation_steps=self.accumulation_steps,
            clip_gradients=self.clips_gradients,
        )

    @property
    def device_name(self) -> str:
        """As `trappm.predict` takes it: a GPU's full name, or the threads in use."""
        import torch

        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"cpu-{torch.get_num_threads()}t"

    @property
    def first_tensor(self) -> Tensor:
        """Batch first, pixels or tokens last; raises InputError where there is none."""
        import torch

        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, torch.Tensor) and value.dim():
                return value
        raise InputError("no tensor is among the model's inputs, so no batch size is known")


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a step and an epoch take on a device; `str` is the sentence that callbacks say."""

    model: str
    device: str
    batch_size: int
    precision: str
    memory: MemoryInterval
    capacity_mib: float
    largest_batch: int | None
    """None where the step is another one at every batch size, and on cores."""
    epoch_batches: int | None
    step_time_ms: tuple[float, float, float] | None
    """The prediction and the bounds of its interval."""
    time_missing: str | None = None
    """Why the step time is None."""

    @property
    def verdict(self) -> Verdict:
        """Whether the step fits (`trappm.prediction.fitting`)."""
        return self.memory.verdict(self.capacity_mib)

    @property
    def fits(self) -> bool:
        """Whether the verdict is that the step fits."""
        return self.verdict is Verdict.FITS

    def __str__(self) -> str:
        room = room_text(self.verdict, device_title(self.device), self.memory, self.capacity_mib)
        text = f"{room} for {self.model} in {self.precision} at batch {self.batch_size:,}"
        if self.largest_batch is not None:
            text += f", the largest batch that fits is {self.largest_batch:,}"
        if self.step_time_ms is None:
            return f"{text}; its time follows once steps are measured: {self.time_missing}"
        what = "a step" if self.epoch_batches is None else "an epoch"
        times = [duration((self.epoch_batches or 1) * ms / 1000) for ms in self.step_time_ms]
        return f"{text}; {what} takes about {times[0]} ({times[1]} to {times[2]}), as predicted"


def forecast(first: FirstStep, device: str | None = None) -> Forecast:
    """What the training will take on a device, by default on that of the training.

    Raises:
        TrappmError: no such card is known, or the step cannot be traced; with the reason.
    """
    name = device or first.device_name
    batch_size = first.first_tensor.shape[0]
    autocast = first.precision in {Precision.AMP_FP16, Precision.AMP_BF16}
    made = estimate(
        _without_trainer(first.model),
        *first.args,
        **first.kwargs,
        optimizer=first.loop,
        precision=first.precision if autocast else Precision.FP32,
    )
    if first.name is not None:  # then its memory is the one that `trappm.predict` returns
        question = Question(precision=made.precision, optimizer=first.loop.optimizer)
        size = first.first_tensor.shape[-1]
        predicted_as = Predicted(first.name, input_size=size)
        made = replace(made, name=first.name, predicted_as=predicted_as, question=question)
    on_cores = is_cpu_device(name)
    # The simulated allocator is CUDA's; a CPU device needs about as much for its tensors.
    memory = simulated_interval(made.breakdown().total_mib) if on_cores else made.memory(name)
    capacity_mib = procfs.allowed_memory_mib() if on_cores else made.capacity_mib(name)
    times_ms, why = _step_time_ms(first, name)
    return Forecast(
        model=first.name or made.name,
        device=name,
        batch_size=batch_size,
        precision=first.precision,
        memory=memory,
        capacity_mib=capacity_mib,
        largest_batch=None if on_cores or made.only_batch else made.largest_batch(name),
        epoch_batches=first.epoch_batches,
        step_time_ms=times_ms,
        time_missing=why,
    )


def _step_time_ms(
    first: FirstStep, device: str
) -> tuple[tuple[float, float, float] | None, str | None]:
    """Prediction and bounds, or why there are none."""
    if first.name is None:
        return None, "the model has no name of timm or hf:"
    if first.processes > 1 or first.accumulation_steps > 1:
        return None, "only steps of one process without accumulation are predicted"
    size = "sequence_length" if size_kind(first.name) == "tokens" else "input_size"
    tensor = first.first_tensor
    try:
        answer = predict(
            first.name,
            device=device,
            batch_size=tensor.shape[0],
            precision=first.precision,
            optimizer=first.loop.optimizer,
            **{size: tensor.shape[-1]},
        )
    except TrappmError as error:
        return None, one_line(error)
    if answer.step_time_ms is None:
        return None, answer.missing.get("step_time_ms", "it is not predicted")
    return (answer.step_time_ms, *answer.intervals["step_time_ms"]), None


def _without_trainer(model: nn.Module) -> nn.Module:
    """The same module without what trainers hang on it; they cannot be copied, nor traced."""
    plain = copy.copy(model)
    for name in ("forward", "_original_forward"):  # accelerate's autocast
        vars(plain).pop(name, None)
    for name in ("_trainer", "_fabric"):  # Lightning's
        if name in vars(plain):
            vars(plain)[name] = None
    plain._forward_pre_hooks = OrderedDict()
    return plain
