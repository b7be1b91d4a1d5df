"""`trappm.estimate`: the GPU memory of any module's step, without a GPU and without a trial.

    >>> import torch, trappm
    >>> estimate = trappm.estimate("resnet50", batch_size=64, optimizer="adam")
    >>> estimate.fits("a100"), estimate.largest_batch("a100")
    (True, 376)

Nothing is learned here: a step is traced on the meta device and replayed through a model of
PyTorch's allocator (docs/details/static_profile.md), so any module, loss and inputs can be used.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from trappm.call_arguments import checked_call, unknown_argument
from trappm.learner.heads.predictions import StepSettings
from trappm.prediction.models.sizes import check_size, size_of
from trappm.profiler.devices.capacity import USABLE_SHARE, memory_mib
from trappm.profiler.devices.catalogue import CONTEXT_MIB, card_of
from trappm.profiler.errors import BatchOrderError, InputError, TrappmError
from trappm.profiler.files.array_archive import pack, unpack
from trappm.profiler.models.known_names import is_file, refuse_unknown
from trappm.profiler.models.model_input import TARGETS, ExampleInputs, Inputs
from trappm.profiler.records import MemoryFormat, Optimizer, Phase, Precision, member
from trappm.profiler.simulation.memory_breakdown import MemoryBreakdown, Part, break_down
from trappm.profiler.simulation.memory_simulation import SimulatedMemory, simulate_memory
from trappm.profiler.simulation.step_trace import (
    MAX_EVENTS,
    TRACED_BATCH_SIZES,
    Origin,
    StepTrace,
)
from trappm.profiler.simulation.training_loop import Implementation, TrainingLoop

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from trappm.profiler.tracing.tracer import StepOptions

LARGEST_BATCH = 65_536
"""Nobody trains with more on one device: where the search for the largest batch ends."""


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
        batch_size=batch_size,
        loop=loop,
        phase=which,
        trace=traced.trace,
        origins=traced.origins,
        only_batch=traced.only_batch,
        only_batch_reason=traced.reason,
        remarks=tuple(remarks),
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Estimate:
    """The simulated memory of a step, for every batch size."""

    name: str
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

    def memory_mib(self, device: str = "a100", batch_size: int | None = None) -> float:
        """What the step takes of a device: PyTorch's allocator and CUDA's context.

        Raises:
            InputError: no such device, or a batch size that the step was not traced for.
        """
        size = self._size(batch_size)
        return self._simulated(size).reserved_with_workspace_mib + sum(self._fixed(device).values())

    def fits(self, device: str, batch_size: int | None = None) -> bool:
        """Whether the step's memory is within the share of a device's that runs can use."""
        return self.memory_mib(device, batch_size) <= USABLE_SHARE * self.capacity_mib(device)

    def capacity_mib(self, device: str) -> float:
        """Memory of a device.

        Raises:
            InputError: no such card is known.
        """
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
        return largest_batch(lambda size: self.fits(device, size))

    def breakdown(
        self, device: str | None = None, batch_size: int | None = None
    ) -> MemoryBreakdown:
        """What the memory is made of at its peak; with a device its context counts as well."""
        size = self._size(batch_size)
        fixed = {} if device is None else self._fixed(device)
        parameter_bytes = int(self.trace.parameter_bytes.sum())
        return break_down(
            self.trace,
            self.origins,
            size,
            self._simulated(size),
            parameter_bytes * self.loop.states_per_parameter,
            fixed_mib=fixed,
            keeps_gradients=self.loop.keeps_gradients,
        )

    def to_dict(self, devices: Sequence[str] = ("a100",), depth: int = 1) -> dict[str, Any]:
        """Return the answer of each device and the peak for JSON; sizes are in MiB.

        Args:
            devices: Cards, such as `v100`.
            depth: Levels of the tree of modules.

        Raises:
            InputError: No such device.
        """
        breakdown = self.breakdown()
        return {
            "model": self.name,
            "batch_size": self.batch_size,
            "phase": self.phase,
            "devices": {device: self._on_device(device) for device in devices},
            "moment": breakdown.moment,
            "modules_mib": {m.name: m.size_mib for m in breakdown.modules.walk(depth)},
            "largest": [
                {"size_mib": t.size_mib, "part": t.part, **t.origin._asdict()}
                for t in breakdown.largest
            ],
            "remarks": list(self.remarks),
        }

    def _on_device(self, device: str) -> dict[str, Any]:
        parts_mib = self.breakdown(device).parts_mib
        return {
            "memory_mib": self.memory_mib(device),
            "capacity_mib": self.capacity_mib(device),
            "fits": self.fits(device),
            "largest_batch": None if self.only_batch is not None else self.largest_batch(device),
            "parts_mib": {part.value: size_mib for part, size_mib in parts_mib.items()},
        }

    def __repr__(self) -> str:
        step_mib = self._simulated(self.batch_size).reserved_with_workspace_mib
        total_mib = self.memory_mib()
        remarks = "".join(f"; {remark}" for remark in self.remarks)
        return (
            f"<Estimate: {self.name}, batch {self.batch_size}, {self.phase}: {total_mib:,.0f} MiB "
            f"on a100 ({step_mib:,.0f} for the step, {total_mib - step_mib:,.0f} for CUDA)"
            f"{remarks}>"
        )

    def _simulated(self, batch_size: int) -> SimulatedMemory:
        if batch_size not in self._known:
            self._known[batch_size] = simulate_memory(self.trace, batch_size, self.loop)
        return self._known[batch_size]

    @cached_property
    def _known(self) -> dict[int, SimulatedMemory]:
        return {}

    def _size(self, batch_size: int | None) -> int:
        size = self.batch_size if batch_size is None else batch_size
        if self.only_batch not in (None, size):
            raise InputError(
                f"the step of {self.name} is known at batch {self.only_batch} only, not {size}: "
                f"{self.only_batch_reason}"
            )
        return size

    def _fixed(self, device: str) -> dict[Part, float]:
        """Of a device, whatever the step."""
        self.capacity_mib(device)
        context_mib = CONTEXT_MIB[self.phase]
        workspace_mib = beside_step_mib(device, self.phase) - context_mib
        return {Part.CONTEXT: context_mib, Part.WORKSPACES: workspace_mib}


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

    def __post_init__(self) -> None:
        member("phase", Phase, self.phase)
        member("memory_format", MemoryFormat, self.memory_format)
        loop_of(self.optimizer, member("precision", Precision, self.precision))
        for device in self.devices:
            capacity_of(device)

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
        )
        return made.to_dict(self.devices, self.depth)


def capacity_of(device: str) -> float:
    """Memory of a card in MiB; raises InputError where no such card is known."""
    capacity = memory_mib(device)
    if capacity is None:
        raise InputError(
            f"no card is known as {device!r}; name one as `nvidia-smi` does, such as a100, "
            "a100-80gb, v100 or rtx-4090"
        )
    return capacity


def beside_step_mib(device: str, phase: Phase) -> float:
    """What a process takes of a card beside the step: CUDA's context, and cuBLAS's workspaces."""
    card = card_of(device)
    return CONTEXT_MIB[phase] + (0.0 if card is None else card.library_workspace_mib(phase))


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


def largest_batch(fits: Callable[[int], bool]) -> int:
    """The largest batch size that fits, of at most `LARGEST_BATCH`; 0 if none does."""
    fitting, beyond = 0, 1
    while beyond <= LARGEST_BATCH and fits(beyond):
        fitting, beyond = beyond, 2 * beyond
    while fitting and beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        fitting, beyond = (middle, beyond) if fits(middle) else (fitting, middle)
    return min(fitting, LARGEST_BATCH)


class TracedStep(NamedTuple):
    """Allocations of a step, and who makes them."""

    trace: StepTrace
    origins: Sequence[Origin]
    """Of each block of the trace."""
    only_batch: int | None
    """The only batch size that it holds for, if there is only one."""
    reason: str
    """Why there is only one."""

    def to_bytes(self) -> bytes:
        """Return the step as a compressed archive."""
        arrays = {name: np.asarray(getattr(self.trace, name)) for name in _ARRAYS}
        rest = json.dumps([self.origins, self.only_batch, self.reason]).encode()
        return pack({**arrays, "rest": np.frombuffer(rest, dtype=np.uint8)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the step that `to_bytes` wrote."""
        arrays = unpack(data, {**_ARRAYS, "rest": np.uint8}, 64 * MAX_EVENTS)
        origins, only_batch, reason = json.loads(arrays.pop("rest").tobytes())
        sizes = arrays.pop("batch_sizes").tolist()
        trace = StepTrace(batch_sizes=tuple(sizes), **arrays)
        return cls(trace, [Origin(*origin) for origin in origins], only_batch, reason)


_ARRAYS = {
    "kinds": np.int8, "blocks": np.int32, "sizes": np.int64, "gradients": np.int32,
    "parameter_bytes": np.int64, "buffer_bytes": np.int64, "batch_sizes": np.int64,
}  # fmt: skip


def traced_step(
    module: nn.Module,
    inputs: Inputs,
    options: StepOptions,
    phase: Phase,
    batch_size: int,
    only_because: str = "",
) -> TracedStep:
    """Trace a step for all batch sizes, or for a single one where it is no line over them.

    Args:
        module: On the meta device.
        inputs: What it is called with.
        options: How the step is run.
        phase: Training or inference.
        batch_size: The single one.
        only_because: Why no other one can be traced, if that is known.

    Raises:
        TrappmError: It cannot be traced at that batch size either.
    """
    from trappm.profiler.tracing.tracer import Tracer

    reason = only_because
    try:
        if not only_because:
            tracer = Tracer(module, inputs, options, with_origins=True)
            trace, _ = tracer.phase(phase)
            if tracer.is_affine(phase):
                return TracedStep(trace, tracer.origins[phase], None, "")
            reason = "some tensors grow faster than the batch, as where all samples are compared"
    except BatchOrderError:
        reason = "other operators run at every batch size, as where it loops over its samples"
    except TrappmError as error:
        reason = (
            f"at batch {TRACED_BATCH_SIZES[0]} {str(error).rstrip('.')}; if the loss has labels of "
            "a fixed batch, give them as targets=labels"
        )
    tracer = Tracer(module, inputs, options, (batch_size, batch_size), with_origins=True)
    trace, _ = tracer.phase(phase)
    return TracedStep(trace, tracer.origins[phase], batch_size, reason)


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
