"""`trappm.estimate`: the GPU memory of any module's step, without a GPU and without a trial.

    >>> import torch, trappm
    >>> estimate = trappm.estimate("resnet50", batch_size=64, optimizer="adam")
    >>> estimate.fits("a100"), estimate.largest_batch("a100")
    (True, 289)

A step is traced on the meta device and replayed through a model of PyTorch's allocator
(docs/details/static_profile.md), so any module, any loss, any inputs will do. How much a device
needs for a model by its name is what `trappm.predict` returns, so that both give one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trappm.prediction.device_names import (
    DEFAULT_DEVICE,
    precision_gap,
    refuse_precision,
    refuse_unnamed,
    unknown_device,
)
from trappm.prediction.fitting import (
    MemoryInterval,
    Verdict,
    largest_batch,
    simulated_interval,
)
from trappm.prediction.models.sizes import check_size, size_of
from trappm.prediction.question import Question
from trappm.profiler.devices.capacity import memory_mib
from trappm.profiler.devices.catalogue import CONTEXT_MIB, card_of
from trappm.profiler.errors import (
    BatchOrderError,
    InputError,
    SnapshotError,
    UnsupportedModelError,
)
from trappm.profiler.models.known_names import refuse_unknown
from trappm.profiler.models.model_input import ExampleInputs, Inputs
from trappm.profiler.records import MemoryFormat, Optimizer, Phase, Precision, is_cpu_device, member
from trappm.profiler.simulation.memory_breakdown import MemoryBreakdown, Part, break_down
from trappm.profiler.simulation.memory_simulation import SimulatedMemory, simulate_memory
from trappm.profiler.simulation.step_trace import StepTrace
from trappm.profiler.simulation.training_loop import TrainingLoop

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trappm.profiler.simulation.step_trace import Origin
    from trappm.profiler.tracing.tracer import StepOptions


def estimate(
    model: str | nn.Module,
    *inputs: Any,
    batch_size: int | None = None,
    optimizer: str | TrainingLoop = Optimizer.SGD,
    loss: Callable[..., Tensor] | None = None,
    precision: str = Precision.FP32,
    memory_format: str = MemoryFormat.CONTIGUOUS,
    phase: str = Phase.TRAIN,
    input_size: int | None = None,
    sequence_length: int | None = None,
    snapshot: str | None = None,
    **keywords: Any,
) -> Estimate:
    """The GPU memory of a step, by simulation.

    Args:
        model: a timm architecture, a transformer such as `hf:gpt2`, or a module on any device; it
            stays as it is.
        inputs: what the module is called with, keywords included; only shapes and types are read.
            The first axis of the first tensor is the batch. None for a model by its name.
        batch_size: by default that of the inputs; 1 for a model by its name.
        optimizer: `sgd`, `momentum`, `adam` or `adamw`, as PyTorch runs them by default on CUDA; or
            a `trappm.TrainingLoop` for all that happens around a step: accumulation of gradients,
            clipping, a fused optimizer.
        loss: called with what the module returns; gives a scalar. By default the module's own
            (`output.loss`), or cross-entropy of its scores.
        precision: `fp32`, `amp-fp16`, `amp-bf16`, or `bf16`, of which parameters are then, too. A
            module whose parameters are so already is `fp32`: it has no autocast.
        memory_format: `contiguous` or `channels-last`.
        phase: `train` or `infer`.
        input_size: of images of a model by its name, in pixels; by default its own.
        sequence_length: of a transformer by its name, in tokens; by default the most that it takes,
            up to 2,048.
        snapshot: of a model by its name: the snapshot that predicts its memory, as in
            `trappm.predict`.

    Raises:
        InputError, UnknownArchitectureError: what is wrong with the arguments.
        UnsupportedModelError: the step cannot be traced; with the operator and its line of code.
    """
    arithmetic = member("precision", Precision, precision)
    loop = loop_of(optimizer, arithmetic)
    which = member("phase", Phase, phase)
    layout = member("memory_format", MemoryFormat, memory_format)
    check_size("batch size", batch_size)
    input_size = size_of(model, input_size, sequence_length)
    check_size("input size", input_size)
    if isinstance(model, str):
        refuse_unknown(model)
    # What was wrong with the question was told before torch is imported, which takes a second.
    from trappm.profiler.models.on_meta import on_meta
    from trappm.profiler.models.sources import source_of
    from trappm.profiler.tracing.losses import default_loss
    from trappm.profiler.tracing.tracer import StepOptions

    options = StepOptions(
        precision=arithmetic,
        memory_format=layout,
        loss=default_loss if loss is None else lambda output, _: loss(output),
    )
    if isinstance(model, str):
        if inputs or keywords:
            raise InputError(f"inputs for {model}; a model by name knows its inputs: give none")
        source = source_of(model)
        input_size = source.input_size_of(model, input_size)
        example: Inputs = source.inputs(model, input_size)
        size: int = 1 if batch_size is None else batch_size
    else:
        if input_size is not None:
            raise InputError("input_size is for models by name; a module knows its inputs")
        example = given = ExampleInputs.of(*inputs, **keywords)
        size = given.batch_size if batch_size is None else batch_size
    module = on_meta(model, input_size, options.memory_format, options.precision)
    trace, origins, only_batch = _traced(module, example, options, which, size)
    question = None
    if isinstance(model, str):
        question = Question(
            phase=which,
            precision=arithmetic,
            memory_format=layout,
            optimizer=loop.optimizer,
            snapshot=snapshot,
        )
    return Estimate(
        name=model if isinstance(model, str) else type(model).__name__,
        question=question,
        input_size=input_size,
        precision=arithmetic,
        batch_size=size,
        loop=loop,
        phase=which,
        trace=trace,
        origins=origins,
        only_batch=only_batch,
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Estimate:
    """The simulated memory of a step, for every batch size."""

    name: str
    question: Question | None
    """What `trappm.predict` is asked about a model by its name; None for a module."""
    input_size: int | None
    """Input size of a model by its name."""
    precision: Precision
    batch_size: int
    loop: TrainingLoop
    """Around the step, if it is one of training."""
    phase: Phase
    trace: StepTrace
    origins: Sequence[Origin]
    """Of each block of the trace."""
    only_batch: int | None
    """The batch size that the step was traced at, if it is another step at every batch size."""

    def memory(self, device: str = DEFAULT_DEVICE, batch_size: int | None = None) -> MemoryInterval:
        """Return the memory of the step on a device: PyTorch's allocator and CUDA's context.

        Raises:
            InputError: There is no such device, it cannot run the precision, or the step was not
                traced at this batch size.
        """
        capacity_of(device)
        refuse_precision(device, self.precision)
        size = self._size(batch_size)
        beside_mib = beside_step_mib(device, self.phase)
        simulated_mib = self._simulated(size, self.loop).reserved_with_workspace_mib + beside_mib
        predicted = self._predicted(device)
        if predicted is None:
            return simulated_interval(simulated_mib)
        usual = loop_of(self.loop.optimizer, self.precision)
        usual_mib = self._simulated(size, usual).reserved_with_workspace_mib + beside_mib
        return predicted(size).times(simulated_mib / usual_mib)

    def memory_mib(self, device: str = DEFAULT_DEVICE, batch_size: int | None = None) -> float:
        """Return the median of `memory`; raises as it does."""
        return self.memory(device, batch_size).median_mib

    def verdict(self, device: str, batch_size: int | None = None) -> Verdict:
        """Return whether the step fits, may not fit or does not; raises as `memory`."""
        return self.memory(device, batch_size).verdict(capacity_of(device))

    def fits(self, device: str, batch_size: int | None = None) -> bool:
        """Return whether the step fits (`trappm.prediction.fitting`); raises as `memory`."""
        return self.verdict(device, batch_size) is Verdict.FITS

    def capacity_mib(self, device: str) -> float:
        """Return the memory of a device; raises InputError if no such card is known."""
        return capacity_of(device)

    def largest_batch(self, device: str) -> int:
        """The largest batch that fits a device; 0 if not even one sample does."""
        if self.only_batch is not None:
            raise InputError(
                f"{self.name} runs another step at every batch size (it loops over its samples, or "
                f"compares all of them), so only batch {self.only_batch} is known; estimate again "
                "at another one"
            )
        return largest_batch(lambda size: self.memory(device, size), capacity_of(device))

    def breakdown(
        self, device: str | None = None, batch_size: int | None = None
    ) -> MemoryBreakdown:
        """What the memory is made of at its peak; with a device its context counts as well."""
        size = self._size(batch_size)
        fixed = {} if device is None else self._fixed(device, size)
        parameter_bytes = int(self.trace.parameter_bytes.sum())
        return break_down(
            self.trace,
            self.origins,
            size,
            self._simulated(size, self.loop),
            parameter_bytes * self.loop.states_per_parameter,
            fixed_mib=fixed,
            keeps_gradients=self.loop.keeps_gradients,
        )

    def to_dict(self, devices: Sequence[str], depth: int) -> dict[str, Any]:
        """For JSON: each device's answer, and the peak with modules down to a depth; sizes in MiB.

        A device that cannot run the precision is left out if there are others.

        Raises:
            InputError: no such device, or none that can run the precision.
        """
        gaps = {name: gap for name in devices if (gap := precision_gap(name, self.precision))}
        able = [name for name in devices if name not in gaps] or devices
        breakdown = self.breakdown()
        return {
            "model": self.name,
            "batch_size": self.batch_size,
            "phase": self.phase,
            "precision": self.precision,
            "devices": {device: self._on_device(device) for device in able},
            "left_out": [{"device": name, "reason": gap} for name, gap in gaps.items()],
            "moment": breakdown.moment,
            "modules_mib": {m.name: m.size_mib for m in breakdown.modules.walk(depth)},
            "largest": [
                {"size_mib": t.size_mib, "part": t.part, **t.origin._asdict()}
                for t in breakdown.largest
            ],
        }

    def _on_device(self, device: str) -> dict[str, Any]:
        parts_mib, memory = self.breakdown(device).parts_mib, self.memory(device)
        return {
            "memory_mib": memory.median_mib,
            "memory_interval_mib": [memory.low_mib, memory.high_mib],
            "capacity_mib": self.capacity_mib(device),
            "fits": self.fits(device),
            "verdict": self.verdict(device),
            "largest_batch": None if self.only_batch is not None else self.largest_batch(device),
            "parts_mib": {
                part.value.lower().replace(" ", "_"): size for part, size in parts_mib.items()
            },
        }

    def __repr__(self) -> str:
        memory = self._simulated(self.batch_size, self.loop)
        return (
            f"<Estimate: {self.name}, batch {self.batch_size}, {self.phase}: "
            f"{memory.reserved_with_workspace_mib:,.0f} MiB and CUDA's context>"
        )

    def _simulated(self, batch_size: int, loop: TrainingLoop) -> SimulatedMemory:
        if (batch_size, loop) not in self._known:
            self._known[batch_size, loop] = simulate_memory(self.trace, batch_size, loop)
        return self._known[batch_size, loop]

    @cached_property
    def _known(self) -> dict[tuple[int, TrainingLoop], SimulatedMemory]:
        return {}

    def _predicted(self, device: str) -> Callable[[int], MemoryInterval] | None:
        """Return what predicts the memory of a model by its name at a batch size, if anything."""
        if self.question is None:
            return None
        from trappm.prediction.answering import memory_of
        from trappm.prediction.models.subjects import subject_of

        if device not in self._predictors:
            try:
                subject = subject_of(self.name, input_size=self.input_size)
                [key] = self.question.device_keys(device, None)
                self._predictors[device] = memory_of(self.question, subject, key)
            except (SnapshotError, UnsupportedModelError):
                self._predictors[device] = None
        return self._predictors[device]

    @cached_property
    def _predictors(self) -> dict[str, Callable[[int], MemoryInterval] | None]:
        return {}

    def _size(self, batch_size: int | None) -> int:
        size = self.batch_size if batch_size is None else batch_size
        if self.only_batch not in (None, size):
            raise InputError(
                f"{self.name} was traced at batch {self.only_batch} only, not {size}: it runs "
                "another step at every batch size; estimate again"
            )
        return size

    def _fixed(self, device: str, batch_size: int) -> dict[Part, float]:
        """Return what the device needs in addition to the simulated step."""
        memory_mib = self.memory(device, batch_size).median_mib
        rest_mib = memory_mib - self._simulated(batch_size, self.loop).reserved_with_workspace_mib
        workspace_mib = beside_step_mib(device, self.phase) - CONTEXT_MIB[self.phase]
        return {Part.CONTEXT: rest_mib - workspace_mib, Part.WORKSPACES: workspace_mib}


@dataclass(frozen=True, kw_only=True)
class EstimateRequest:
    """An architecture, how it is run and on which cards; the fields are those of `estimate`.

    Raises:
        InputError: what can be seen to be wrong before the model is traced.
    """

    model: str
    batch_size: int
    input_size: int | None
    phase: str
    precision: str
    memory_format: str
    optimizer: str
    devices: Sequence[str]
    depth: int
    """Of the tree of modules."""
    snapshot: str | None = None

    def __post_init__(self) -> None:
        member("phase", Phase, self.phase)
        member("memory_format", MemoryFormat, self.memory_format)
        precision = member("precision", Precision, self.precision)
        loop_of(self.optimizer, precision)
        for device in self.devices:
            capacity_of(device)
        if all(precision_gap(device, precision) for device in self.devices):
            refuse_precision(self.devices[0], precision)

    def answer(self) -> dict[str, Any]:
        """The estimate for JSON; raises as `estimate` does."""
        made = estimate(
            self.model,
            batch_size=self.batch_size,
            input_size=self.input_size,
            phase=self.phase,
            precision=self.precision,
            memory_format=self.memory_format,
            optimizer=self.optimizer,
            snapshot=self.snapshot,
        )
        return made.to_dict(self.devices, self.depth)


def capacity_of(device: str) -> float:
    """Return the memory of a card in MiB; raises InputError if no such card is known."""
    refuse_unnamed(device)
    if is_cpu_device(device):
        raise InputError(
            f"the memory of {device} depends on its host, so what fits is unknown; name a GPU, "
            "such as a100"
        )
    capacity = memory_mib(device)
    if capacity is None:
        raise InputError(unknown_device(device))
    return capacity


def beside_step_mib(device: str, phase: Phase) -> float:
    """What a process takes of a card beside the step: CUDA's context, and cuBLAS's workspaces."""
    card = card_of(device)
    return CONTEXT_MIB[phase] + (0.0 if card is None else card.library_workspace_mib(phase))


def loop_of(optimizer: str | TrainingLoop, precision: Precision) -> TrainingLoop:
    """What happens around a step of this optimizer, as PyTorch runs it by default."""
    if isinstance(optimizer, TrainingLoop):
        return optimizer
    which = member("optimizer", Optimizer, optimizer)
    return TrainingLoop(
        optimizer=which,
        weight_decay=which is Optimizer.ADAMW,
        gradient_scaler=precision is Precision.AMP_FP16,
    )


def _traced(
    module: nn.Module,
    inputs: Inputs,
    options: StepOptions,
    phase: Phase,
    batch_size: int,
) -> tuple[StepTrace, Sequence[Origin], int | None]:
    """The allocations, where they come from, and the only batch size if there is only one."""
    from trappm.profiler.simulation.step_trace import TRACED_BATCH_SIZES
    from trappm.profiler.tracing.tracer import Tracer

    for batch_sizes in (TRACED_BATCH_SIZES, (batch_size, batch_size)):
        tracer = Tracer(module, inputs, options, batch_sizes, with_origins=True)
        try:
            trace, _ = tracer.phase(phase)
        except BatchOrderError:
            continue
        if batch_sizes is TRACED_BATCH_SIZES and not tracer.is_affine(phase):
            continue
        only_batch = None if batch_sizes is TRACED_BATCH_SIZES else batch_size
        return trace, tracer.origins[phase], only_batch
    raise AssertionError("a step at one batch size has one order")
