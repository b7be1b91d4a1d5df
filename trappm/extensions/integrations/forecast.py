"""Forecast of a training run in one sentence, and its largest batch size, before its first step.

A named model is predicted by its name. For other modules, only the memory is simulated.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trappm.prediction.answer import answer_by_simulation, answer_questions
from trappm.prediction.fit import MemoryInterval, largest_batch, room_text
from trappm.prediction.models import Module, size_kind
from trappm.prediction.predict import predict
from trappm.prediction.prediction import Prediction
from trappm.prediction.question import Question, loop_of, loop_of_module
from trappm.prediction.selection import Selection
from trappm.profiler.devices.catalogue import process_memory_mib
from trappm.profiler.errors import InputError, TrappmError, one_line
from trappm.profiler.host import procfs
from trappm.profiler.host.environment import independent_of_caller
from trappm.profiler.memory.simulation import MIB, TrainingLoop
from trappm.profiler.models.on_meta import is_compiled
from trappm.profiler.records import Execution, Phase, Precision, is_cpu_device

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
    """Processes of DDP, which replicate the parameters."""
    frees_gradients: bool = False
    """True if the trainer frees the gradients before it evaluates."""
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
    def asked_precision(self) -> Precision:
        """Return the precision to ask for: a module in bf16 is traced as it is."""
        is_bf16 = self.name is None and self.precision is Precision.BF16
        return Precision.FP32 if is_bf16 else self.precision

    @property
    def gradients_mib(self) -> float:
        """Return the memory of all gradients, and so of the buckets that DDP sums them in."""
        return sum(parameter.nbytes for parameter in self._trained.values()) / MIB

    @property
    def states_mib(self) -> float:
        """Return the memory of the optimizer's states."""
        sizes = [parameter.nbytes for parameter in self._trained.values()]
        widths = [parameter.element_size() for parameter in self._trained.values()]
        return self.loop.state_bytes(sizes, [*self._trained], widths) / MIB

    @property
    def _trained(self) -> dict[int, Tensor]:
        """Return the trained parameters by their places among all."""
        return {at: p for at, p in enumerate(self.model.parameters()) if p.requires_grad}

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
    answer, missing = _prediction(context, name)
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


class TrainingMemory:
    """Memory of one process of a training run, at any batch size.

    DDP keeps buckets in addition to the gradients. An evaluation takes the memory of inference next
    to the optimizer's states, the gradients unless they are freed, and the buckets.

    Args:
        context: The run.
        device: GPU to choose for (default: the device of the run).

    Raises:
        InputError: There is no prediction for other batch sizes, or not even one of 1 fits.
        TrappmError: The GPU is unknown, or the step cannot be traced.
    """

    def __init__(self, context: TrainingContext, device: str | None = None) -> None:
        self._context, self._step = context, forecast(context, device).prediction
        if not self._step.largest_batch:
            is_full = self._step.largest_batch == 0
            reason = "not even 1 fits" if is_full else "there is no prediction"
            raise InputError(f"{reason} on {self._step.device_name}")

    def largest_batch(self, reserve: float, phases: Iterable[Phase]) -> int:
        """Return the largest batch size that fits in these phases; raises InputError if none does.

        Args:
            reserve: Share of the device's memory to leave free.
            phases: Training, evaluation (inference), or both.
        """
        phases, capacity_mib = tuple(phases), self._step.capacity_mib
        assert capacity_mib is not None  # noqa: S101  (else no batch would fit)

        def memory(size: int) -> MemoryInterval:
            parts = [self._memory(size, phase) for phase in phases]
            return MemoryInterval(*map(max, zip(*parts, strict=True)))

        largest = largest_batch(memory, capacity_mib, reserve)
        if not largest:
            raise InputError(f"not even 1 fits on {self._step.device_name}")
        return largest

    @independent_of_caller
    def _memory(self, batch_size: int, phase: Phase) -> MemoryInterval:
        context, step = self._context, self._step
        question = Question(
            batch_size=batch_size,
            phase=phase,
            precision=context.asked_precision,
            optimizer=context.loop if phase is Phase.TRAIN else None,
            execution=step.execution,
        )
        assert step.subject is not None  # noqa: S101  (of a prediction that was made here)
        [answer] = answer_questions([(Selection(question), step.subject, step.device)])
        if answer.memory is None:
            raise InputError(f"the memory is not predicted: {answer.missing['memory_mib']}")
        kept_mib = context.gradients_mib if context.processes > 1 else 0.0
        if phase is Phase.INFER:
            kept_mib += context.states_mib
            kept_mib += 0.0 if context.frees_gradients else context.gradients_mib
            in_phases = (process_memory_mib(step.device, each) for each in Phase)
            kept_mib += max(in_phases) - process_memory_mib(step.device, phase)
        return MemoryInterval(*(kept_mib + value for value in answer.memory))


def _prediction(context: TrainingContext, device: str) -> tuple[Prediction, str | None]:
    """Return the prediction of the step, and the reason to ignore its time, if any."""
    compiles = context.is_compiled and not is_cpu_device(device)
    execution = Execution.COMPILE if compiles else Execution.EAGER
    precision = context.asked_precision
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
            precision=precision,
            optimizer=context.loop,
            execution=execution,
        )
        return answer, None
    except TrappmError as error:  # such as a CPU device without labels
        precision = replace(context, name=None).asked_precision
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
