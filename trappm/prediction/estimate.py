"""`trappm.estimate`: the GPU memory of any module's step, without a GPU and without a trial.

    >>> import torch, trappm
    >>> estimate = trappm.estimate("resnet50", batch_size=64, optimizer="adam")
    >>> estimate.fits("a100"), estimate.largest_batch("a100")
    (True, 289)

A step is traced on the meta device and replayed through a model of PyTorch's allocator
(docs/details/static_profile.md), so any module, loss and inputs can be used. How much memory a
model needs by its name is what `trappm.predict` returns, so that both give one answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trappm.call_arguments import checked_call, unknown_argument
from trappm.learner.heads.predictions import StepSettings
from trappm.prediction.device_names import (
    DEFAULT_DEVICE,
    precision_gap,
    refuse_precision,
)
from trappm.prediction.fitting import (
    MemoryInterval,
    Verdict,
    beside_step_mib,
    capacity_of,
    largest_batch,
    simulated_interval,
)
from trappm.prediction.models.sizes import check_size, size_of
from trappm.prediction.models.traced_step import TracedStep, traced_step
from trappm.prediction.question import Question
from trappm.profiler.devices.catalogue import CONTEXT_MIB
from trappm.profiler.errors import (
    InputError,
    SnapshotError,
    UnsupportedModelError,
)
from trappm.profiler.models.known_names import is_file, refuse_unknown
from trappm.profiler.models.model_input import TARGETS, ExampleInputs, Inputs
from trappm.profiler.records import MemoryFormat, Optimizer, Phase, Precision, member
from trappm.profiler.simulation.memory_breakdown import MemoryBreakdown, Part, break_down
from trappm.profiler.simulation.memory_simulation import SimulatedMemory, simulate_memory
from trappm.profiler.simulation.step_trace import (
    Origin,
    StepTrace,
)
from trappm.profiler.simulation.training_loop import Implementation, TrainingLoop

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from trappm.prediction.models.subjects import Subject
    from trappm.prediction.models.tracing import Deadline, TracingProcess


@checked_call
def estimate(
    model: str | Path | nn.Module,
    *inputs: Any,
    batch_size: int | None = None,
    targets: Any = None,
    loss: Callable[..., Tensor] | None = None,
    optimizer: str | torch.optim.Optimizer | type | TrainingLoop = Optimizer.SGD,
    precision: str = Precision.FP32,
    memory_format: str = MemoryFormat.CONTIGUOUS,
    phase: str = Phase.TRAIN,
    input_size: int | None = None,
    sequence_length: int | None = None,
    snapshot: str | None = None,
    **keywords: Any,
) -> Estimate:
    """Estimate the GPU memory of a step by simulation.

    >>> trappm.estimate(module, images, targets, optimizer="adamw")
    >>> trappm.estimate(module, images, targets=labels, loss=torch.nn.CrossEntropyLoss())

    Args:
        model: A timm architecture, a transformer such as `hf:gpt2`, the path of an ONNX file, or a
            module on any device. The module stays as it is. If it is compiled, the answer is for
            eager mode.
        inputs: Inputs of the module, keywords included. Only shapes, types and whole numbers are
            read. The first axis of the first tensor is the batch. None for names and files. A last
            input that `forward()` does not accept is taken as the targets.
        batch_size: Samples per step (default: that of the inputs; 1 for names and files).
        targets: What the loss compares the output with. It follows the batch. A module whose
            `forward()` has an argument of this name gets it.
        loss: Function of the output, and of the targets if there are any, that returns a scalar
            (default: the module's own `output.loss`; else cross-entropy, or the mean squared error
            for floating-point targets). A classification or regression loss of `torch.nn` gets
            targets of the right shape if there are none.
        optimizer: `sgd`, `momentum`, `adam` or `adamw`, as PyTorch runs them by default on CUDA; a
            class or an object of `torch.optim`; or a `trappm.TrainingLoop`, which has accumulation,
            clipping and fused optimizers, too.
        precision: `fp32`, `amp-fp16`, `amp-bf16`, or `bf16` for parameters in bf16. A module whose
            parameters are in bf16 already is `fp32`: it has no autocast.
        memory_format: `contiguous` or `channels-last`.
        phase: `train` or `infer`.
        input_size: Pixels, for names and files (default: the model's own).
        sequence_length: Tokens, for transformers by name (default: the most that the model takes,
            up to 2,048).
        snapshot: Snapshot that predicts the memory of a model by its name, as in `trappm.predict`.

    Raises:
        InputError, UnknownArchitectureError, ModelFileError: Wrong arguments.
        UnsupportedModelError: The step cannot be traced; with the operator and its line of code.
    """
    which = member("phase", Phase, phase)
    arithmetic = member("precision", Precision, precision)
    layout = member("memory_format", MemoryFormat, memory_format)
    loop = loop_of(optimizer, arithmetic)
    check_size("batch size", batch_size)
    input_size = size_of(model, input_size, sequence_length)
    check_size("input size", input_size)
    if isinstance(model, str) and is_file(model):
        model = Path(model)
    if isinstance(model, str | Path):
        _check_no_inputs(model, inputs, targets, keywords)
    if isinstance(model, str):
        refuse_unknown(model)
    # Errors in the arguments are raised before torch is imported, which takes a second.
    remarks: list[str] = []
    if isinstance(model, Path):
        if loss is not None:
            raise InputError(f"a loss for {model}; a file has cross-entropy of its scores")
        name, settings = str(model), StepSettings(arithmetic, layout, loop.optimizer)
        traced, batch_size, remark = _traced_file(model, input_size, batch_size, settings, which)
        remarks += [remark] if remark else []
    else:
        from trappm.profiler.models.on_meta import EAGER, eager, is_compiled, on_meta
        from trappm.profiler.models.sources import source_of
        from trappm.profiler.tracing.losses import loss_of
        from trappm.profiler.tracing.tracer import StepOptions

        example: Inputs
        if isinstance(model, str):
            name, source = model, source_of(model)
            input_size = source.input_size_of(model, input_size)
            example = source.inputs(model, input_size)
            batch_size = batch_size or 1
            has_targets = False
        else:
            _check_module(model, input_size)
            if is_compiled(model):
                remarks.append(EAGER)
            name = type(eager(model)).__name__
            example = given = _example(eager(model), inputs, keywords, targets)
            batch_size = batch_size or given.batch_size
            has_targets = TARGETS in given.kwargs
        options = StepOptions(
            precision=arithmetic,
            memory_format=layout,
            loss=loss_of(loss, has_targets=has_targets),
        )
        module = on_meta(model, input_size, layout, arithmetic)
        traced = traced_step(module, example, options, which, batch_size)
    if traced.only_batch is not None:
        remarks.append(f"the step is known at batch {traced.only_batch} only: {traced.reason}")
    return Estimate(
        name=name,
        predicted_as=Predicted.of(
            model, input_size, inputs, is_alone=loss is None and targets is None and not keywords
        ),
        question=Question(
            phase=which,
            precision=arithmetic,
            memory_format=layout,
            optimizer=loop.optimizer,
            snapshot=snapshot,
        ),
        precision=arithmetic,
        batch_size=batch_size,
        loop=loop,
        phase=which,
        trace=traced.trace,
        origins=traced.origins,
        only_batch=traced.only_batch,
        only_batch_reason=traced.reason,
        remarks=tuple(remarks),
    )


@dataclass(frozen=True)
class Predicted:
    """A model whose memory `trappm.predict` predicts."""

    model: str | Path | nn.Module
    input_size: int | None = None
    example_input: Any = None

    @classmethod
    def of(
        cls,
        model: str | Path | nn.Module,
        input_size: int | None,
        inputs: Sequence[Any],
        *,
        is_alone: bool,
    ) -> Self | None:
        """Return the model as `trappm.predict` takes it; None if it does not.

        Args:
            model: Name, file or module.
            input_size: Of a name or file.
            inputs: Of a module; predictions take one.
            is_alone: Whether the step has neither a loss of its own nor further inputs.
        """
        if isinstance(model, str | Path):
            return cls(model, input_size=input_size)
        return cls(model, example_input=inputs[0]) if is_alone and len(inputs) == 1 else None

    def subject(self) -> Subject:
        """Return the model as predictions take it.

        Raises:
            UnsupportedModelError: It is a module whose input is not that of a prediction.
        """
        from trappm.prediction.models.subjects import subject_of

        try:
            return subject_of(
                self.model, input_size=self.input_size, example_input=self.example_input
            )
        except InputError as error:
            raise UnsupportedModelError(str(error)) from error


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Estimate:
    """The simulated memory of a step, for every batch size."""

    name: str
    predicted_as: Predicted | None
    """What `trappm.predict` predicts the memory of; None for a step that it cannot be asked for,
    such as one with a loss of its own."""
    question: Question
    """Settings of that prediction."""
    precision: Precision
    batch_size: int
    loop: TrainingLoop
    """Around the step, if it is one of training."""
    phase: Phase
    trace: StepTrace
    origins: Sequence[Origin]
    """Of each block of the trace."""
    only_batch: int | None
    """The only batch size that the step is known at; None if it is known at all of them."""
    only_batch_reason: str = ""
    remarks: tuple[str, ...] = ()
    """What the answer leaves out, such as what `torch.compile` does."""

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
        """Return the largest batch that fits a device; 0 if not even one sample does.

        Raises:
            InputError: No such card, or a step that is known at one batch size only; with the
                reason.
        """
        if self.only_batch is not None:
            raise InputError(
                f"the largest batch of {self.name} is unknown, as its step is known at batch "
                f"{self.only_batch} only: {self.only_batch_reason}"
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

    def to_dict(self, devices: Sequence[str] = (DEFAULT_DEVICE,), depth: int = 1) -> dict[str, Any]:
        """Return the answer of each device and the peak for JSON; sizes are in MiB.

        Args:
            devices: Cards, such as `v100`.
            depth: Levels of the tree of modules.

        A device that cannot run the precision is left out if there are others.

        Raises:
            InputError: No such device, or none that can run the precision.
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
            "remarks": list(self.remarks),
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
        step_mib = self._simulated(self.batch_size, self.loop).reserved_with_workspace_mib
        total_mib = self.memory_mib()
        remarks = "".join(f"; {remark}" for remark in self.remarks)
        return (
            f"<Estimate: {self.name}, batch {self.batch_size}, {self.phase}: {total_mib:,.0f} MiB "
            f"on {DEFAULT_DEVICE} ({step_mib:,.0f} for the step, {total_mib - step_mib:,.0f} "
            f"for CUDA){remarks}>"
        )

    def _simulated(self, batch_size: int, loop: TrainingLoop) -> SimulatedMemory:
        if (batch_size, loop) not in self._known:
            self._known[batch_size, loop] = simulate_memory(self.trace, batch_size, loop)
        return self._known[batch_size, loop]

    @cached_property
    def _known(self) -> dict[tuple[int, TrainingLoop], SimulatedMemory]:
        return {}

    def _predicted(self, device: str) -> Callable[[int], MemoryInterval] | None:
        """Return what predicts the memory of the step at a batch size, if anything does.

        Raises:
            SnapshotError: The snapshot that the question names is not there, or damaged.
        """
        if self.predicted_as is None:
            return None
        from trappm.prediction.answering import memory_of

        if device not in self._predictors:
            self._predictors[device] = None
            try:
                subject = self.predicted_as.subject()
                [key] = self.question.device_keys(device, None)
                self._predictors[device] = memory_of(self.question, subject, key)
            except UnsupportedModelError:
                pass
            except SnapshotError:
                if self.question.names_snapshot:
                    raise
        return self._predictors[device]

    @cached_property
    def _predictors(self) -> dict[str, Callable[[int], MemoryInterval] | None]:
        return {}

    def _size(self, batch_size: int | None) -> int:
        size = self.batch_size if batch_size is None else batch_size
        if self.only_batch not in (None, size):
            raise InputError(
                f"the step of {self.name} is known at batch {self.only_batch} only, not {size}: "
                f"{self.only_batch_reason}"
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

    def answered_by(self, process: TracingProcess, deadline: Deadline) -> bytes:
        """Return the answer as JSON, made in another process; raises as its `look` does."""
        from trappm.prediction.models.tracing import TracingRequest

        traced = TracingRequest(self.model, False, self.input_size, estimate=asdict(self))
        return process.look(traced, self.model, deadline)

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


def loop_of(optimizer: object, precision: Precision) -> TrainingLoop:
    """Return the training loop of an optimizer, as PyTorch runs it by default.

    Args:
        optimizer: A name in any case, a class or an object of `torch.optim`, or the loop itself.
        precision: Precision of the step; `amp-fp16` has a gradient scaler.

    Raises:
        InputError: The optimizer is unknown.
    """
    if isinstance(optimizer, TrainingLoop):
        return optimizer
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    names = [optimizer] if isinstance(optimizer, str) else [base.__name__ for base in kind.__mro__]
    known = [name.lower() for name in names if name.lower() in list(Optimizer)]
    if not known:
        given = repr(optimizer) if isinstance(optimizer, str) else kind.__name__
        raise InputError(
            f"optimizer is {given}; known are {', '.join(Optimizer)}, as names or by torch.optim; "
            "for another one, name the one that keeps as much per parameter: sgd (nothing), "
            "momentum (one tensor) or adam (two)"
        )
    which = Optimizer(known[0])
    groups: Sequence[Mapping[str, Any]] = getattr(optimizer, "param_groups", ())
    if any(group.get("amsgrad") for group in groups):
        raise InputError(
            f"{kind.__name__} has amsgrad=True, which keeps a third tensor per parameter; "
            "it is not simulated: leave amsgrad out, and add one size of the parameters"
        )
    if which is Optimizer.SGD and any(group["momentum"] for group in groups):
        which = Optimizer.MOMENTUM
    implementation = Implementation.FOREACH
    if groups and groups[0].get("fused"):
        implementation = Implementation.FUSED
    elif groups and groups[0].get("foreach") is False:
        implementation = Implementation.PLAIN
    decays = [group.get("weight_decay", 0) > 0 for group in groups]
    return TrainingLoop(
        optimizer=which,
        implementation=implementation,
        weight_decay=any(decays) if groups else which is Optimizer.ADAMW,
        gradient_scaler=precision is Precision.AMP_FP16,
    )


def _traced_file(
    path: Path,
    input_size: int | None,
    batch_size: int | None,
    settings: StepSettings,
    phase: Phase,
) -> tuple[TracedStep, int, str | None]:
    """Trace an ONNX file's step in a process of its own.

    Returns:
        The step, the batch size, and a remark on what the file does not say.

    Raises:
        TrappmError: The file cannot be read or traced, or has another batch size only.
    """
    from trappm.prediction.models.subjects import subject_of
    from trappm.prediction.models.tracing import TracingRequest, own_process

    profile = subject_of(path, input_size=input_size).profile()
    only = profile.graph.fixed_batch_size
    if only is not None and batch_size not in (None, only):
        raise InputError(f"{path} has one batch size only, {only}, not {batch_size}; leave it out")
    size = batch_size or only or 1
    request = TracingRequest(
        str(path.absolute()), True, input_size, settings, batch_size=size, phase=phase.value
    )
    data = own_process().look(request, str(path), None)
    return TracedStep.from_bytes(data), size, profile.step_remark


def _check_no_inputs(
    model: object, inputs: Sequence[Any], targets: Any, keywords: Mapping[str, Any]
) -> None:
    """Raise InputError where a name or a file is given what only a module takes."""
    if keywords:
        raise unknown_argument(estimate, next(iter(keywords)))
    if inputs or targets is not None:
        what = "inputs" if inputs else "targets"
        raise InputError(
            f"{what} for {model}; a name or a file knows its inputs, so give none: "
            f"trappm.estimate({str(model)!r}, batch_size=64)"
        )


def _check_module(model: Any, input_size: int | None) -> None:
    """Raise InputError for what is no module, and for sizes that a module has by itself."""
    from torch import nn

    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise InputError(
            f"the model is {what}; give a name, an ONNX file or a module, such as "
            "trappm.estimate(torchvision.models.resnet50(), torch.empty(8, 3, 224, 224))"
        )
    if input_size is not None:
        raise InputError("input_size is for models by name; a module knows its inputs")


def _example(
    module: nn.Module, inputs: Sequence[Any], keywords: Mapping[str, Any], targets: Any
) -> ExampleInputs:
    """Return what `forward()` and the loss are called with.

    Raises:
        InputError: `forward()` does not take these inputs; with a call that works.
    """
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # not of Python, such as a scripted module
        signature = inspect.signature(lambda *_, **__: None)
    if targets is not None and "targets" in signature.parameters:
        keywords, targets = {**keywords, "targets": targets}, None
    try:
        signature.bind(*inputs, **keywords)
    except TypeError as error:
        if targets is not None or len(inputs) < 2 or not _binds(signature, inputs[:-1], keywords):
            needed = [
                name for name, p in signature.parameters.items()
                if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            ]  # fmt: skip
            unknown = next((n for n in keywords if n not in signature.parameters), None)
            why = str(error) if unknown is None else str(unknown_argument(estimate, unknown))
            raise InputError(
                f"{type(module).__name__}.forward() does not take these inputs: {why}; call "
                f"trappm.estimate(model, {', '.join(needed)}), with targets=labels for the loss"
            ) from error
        inputs, targets = inputs[:-1], inputs[-1]
    example = ExampleInputs.of(*inputs, **keywords)
    if targets is None:
        return example
    return ExampleInputs(
        example.args, {**example.kwargs, TARGETS: targets}, example.batch_size, example.in_lists
    )


def _binds(
    signature: inspect.Signature, inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> bool:
    try:
        signature.bind(*inputs, **keywords)
    except TypeError:
        return False
    return True
