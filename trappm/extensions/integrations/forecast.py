"""One-sentence forecast of a training run, made right before its first step.

A named model is predicted by its name. For other modules, only the memory is simulated.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trappm.prediction.answer import answer_by_simulation
from trappm.prediction.fit import room_text
from trappm.prediction.models import Module, size_kind
from trappm.prediction.predict import predict
from trappm.prediction.prediction import Prediction
from trappm.prediction.question import Question, loop_of, loop_of_module
from trappm.profiler.errors import InputError, TrappmError, one_line
from trappm.profiler.host import procfs
from trappm.profiler.host.environment import independent_of_caller
from trappm.profiler.memory.simulation import TrainingLoop
from trappm.profiler.models.on_meta import is_compiled
from trappm.profiler.records import Execution, Precision, is_cpu_device

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class TrainingContext:
    """Model, inputs and settings of a training run, right before its first step."""

    model: nn.Module
    name: str | None
    """Name of a timm model or a transformer, such as `hf:gpt2`; None for other modules."""
    args: tuple[Any, ...] = ()
    """Positional arguments of the model's call."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer
    precision: Precision
    accumulation_steps: int = 1
    epoch_batches: int | None
    """Batches per epoch of this process; None if unknown."""
    processes: int = 1
    device: torch.device
    will_compile: bool = False
    """True if the trainer compiles the model itself."""

    @property
    def is_compiled(self) -> bool:
        return self.will_compile or is_compiled(self.model)

    @property
    def loop(self) -> TrainingLoop:
        """Return the training loop; raises InputError if the optimizer is unknown."""
        loop = loop_of(self.optimizer)
        if self.name is None:  # else the answer is about timm's module, which may have others
            loop, _ = loop_of_module(loop, self.optimizer, self.model)
        return replace(
            loop,
            accumulation_steps=self.accumulation_steps,
        )

    @property
    def device_name(self) -> str:
        """Return the device as a name for `trappm.predict`: the GPU's or `cpu-NUMBERt`."""
        import torch

        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"cpu-{torch.get_num_threads()}t"

    @property
    def first_tensor(self) -> Tensor:
        """Return the first input tensor, (batch, ..., pixels or tokens); raises InputError."""
        import torch

        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, torch.Tensor) and value.dim():
                return value
        raise InputError("the model's inputs have no tensor, so the batch size is unknown")


@dataclass(frozen=True)
class Forecast:
    """Forecast of a step and an epoch on a device; `str` is the sentence that callbacks print."""

    prediction: Prediction
    epoch_batches: int | None
    time_missing: str | None
    """Reason for a missing step time; None if it is predicted."""

    @property
    def fits(self) -> bool | None:
        return self.prediction.fits

    def __str__(self) -> str:
        answer = self.prediction
        memory, verdict, capacity_mib = answer.memory, answer.verdict, answer.capacity_mib
        text = f"The memory of {answer.model} is not predicted"
        if memory is not None and verdict is not None and capacity_mib is not None:
            text = room_text(verdict, answer.device_name, memory, capacity_mib)
            mode = ", compiled," if answer.execution == Execution.COMPILE else ""
            text += (
                f" for {answer.model} in {answer.precision}{mode} at batch {answer.batch_size:,}"
            )
        if answer.largest_batch is not None:
            text += f", the largest batch that fits is {answer.largest_batch:,}"
        if answer.step_time_ms is None or self.time_missing is not None:
            return f"{text}; the step time is reported after some steps: {self.time_missing}"
        what = "a step" if self.epoch_batches is None else "an epoch"
        bounds_ms = (answer.step_time_ms, *answer.intervals["step_time_ms"])
        times = [duration((self.epoch_batches or 1) * ms / 1000) for ms in bounds_ms]
        return f"{text}; {what} is predicted to take {times[0]} ({times[1]} to {times[2]})"


def duration(seconds: float) -> str:
    """Return a duration in suitable units, such as `3 min` or `2 h 10 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def fp32_of_process() -> Precision:
    """Return which of the precisions in fp32 PyTorch is set to in this process."""
    from torch.backends import cuda, cudnn

    if hasattr(cudnn, "conv"):  # since PyTorch 2.9, where reading the earlier flags may fail
        in_products = cuda.matmul.fp32_precision == "tf32"
        in_convolutions = cudnn.conv.fp32_precision == "tf32"
    else:
        in_products, in_convolutions = cuda.matmul.allow_tf32, cudnn.allow_tf32
    if in_products:
        return Precision.TF32
    return Precision.FP32 if in_convolutions else Precision.FP32_STRICT


@independent_of_caller
def forecast(context: TrainingContext, device: str | None = None) -> Forecast:
    """Predict a training run on a device (default: the device of the run).

    Raises:
        TrappmError: The GPU is unknown, or the step cannot be traced.
    """
    name = device or context.device_name
    # Parameters in bf16 are traced as they are.
    precision = Precision.FP32 if context.precision is Precision.BF16 else context.precision
    answer, missing = _prediction(context, name, precision)
    if is_cpu_device(name):
        # The limit is the host's, and a CPU step's memory is not predicted for other batch sizes.
        answer = replace(answer, capacity_mib=procfs.allowed_memory_mib(), largest_batch=None)
    if missing is None and (context.processes > 1 or context.accumulation_steps > 1):
        missing = "only steps of one process without accumulation are predicted"
    if missing is None and context.is_compiled and answer.execution == Execution.EAGER:
        missing = "the step is compiled, and this forecast is for eager mode"
    if missing is None and answer.step_time_ms is None:
        missing = answer.missing.get("step_time_ms", "it is not predicted")
    return Forecast(
        replace(answer, precision=context.precision.value), context.epoch_batches, missing
    )


def _prediction(
    context: TrainingContext, device: str, precision: Precision
) -> tuple[Prediction, str | None]:
    """Return the prediction of the step, and the reason to ignore its time, if any."""
    compiles = context.is_compiled and not is_cpu_device(device)
    execution = Execution.COMPILE if compiles else Execution.EAGER
    size, is_text = context.first_tensor.shape[-1], size_kind(context.name) == "tokens"
    module = _without_trainer(context.model)
    example = dict(context.kwargs) if context.kwargs else context.args
    try:
        if context.name is None:
            answer = predict(
                module,
                device=device,
                example_input=example,
                precision=precision,
                optimizer=context.loop,
                execution=execution,
            )
            return answer, "the model has no timm or hf: name"
        answer = predict(
            context.name,
            device=device,
            batch_size=context.first_tensor.shape[0],
            input_size=None if is_text else size,
            sequence_length=size if is_text else None,
            precision=context.precision,
            optimizer=context.loop,
            execution=execution,
        )
        return answer, None
    except TrappmError as error:  # such as a CPU device without labels
        question = Question(precision=precision, optimizer=context.loop)
        answer = answer_by_simulation(question, Module(module, example), device, one_line(error))
        return replace(answer, model=context.name or answer.model), one_line(error)


def _without_trainer(model: nn.Module) -> nn.Module:
    """Return the module without attributes of the trainer, which cannot be copied or traced."""
    plain = copy.copy(model)
    for name in ("forward", "_original_forward"):  # accelerate's autocast
        vars(plain).pop(name, None)
    for name in ("_trainer", "_fabric"):  # Lightning's
        if name in vars(plain):
            vars(plain)[name] = None
    plain._forward_pre_hooks = OrderedDict()
    return plain
