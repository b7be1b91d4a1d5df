"""The traced step of any model: its memory by simulation, and what that is made of at its peak.

A step is traced on the meta device and replayed through a model of PyTorch's allocator
(docs/details/static_profile.md), so any module, loss and inputs can be used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.learner.heads.predictions import StepSettings
from trappm.prediction.fitting import beside_step_mib
from trappm.prediction.models.traced_step import TracedStep, traced_step
from trappm.profiler.devices.catalogue import CONTEXT_MIB
from trappm.profiler.errors import InputError
from trappm.profiler.models.known_names import is_file
from trappm.profiler.models.model_input import TARGETS, ExampleInputs, Inputs
from trappm.profiler.records import Optimizer, Phase, Precision, is_cpu_device
from trappm.profiler.simulation.memory_breakdown import MemoryBreakdown, Part, break_down
from trappm.profiler.simulation.memory_simulation import SimulatedMemory, simulate_memory
from trappm.profiler.simulation.step_trace import Origin, StepTrace
from trappm.profiler.simulation.training_loop import Implementation, TrainingLoop

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedStep:
    """A traced step, whose memory is simulated at any batch size."""

    trace: StepTrace
    origins: Sequence[Origin]
    """Origin of each block of the trace."""
    loop: TrainingLoop
    """Training loop around the step."""
    phase: Phase
    batch_size: int
    """Batch size of the example inputs, or the one in question."""
    only_batch: int | None = None
    """The only batch size that the trace is valid for; None if it is valid for all."""
    only_batch_reason: str = ""
    _known: dict[int, SimulatedMemory] = field(default_factory=dict)

    def memory(self, batch_size: int) -> SimulatedMemory:
        """Return the memory that PyTorch's allocator holds.

        Raises:
            InputError: The step was not traced at this batch size.
        """
        if self.only_batch not in (None, batch_size):
            raise InputError(
                f"the step is known at batch {self.only_batch} only, not {batch_size}: "
                f"{self.only_batch_reason}"
            )
        if batch_size not in self._known:
            self._known[batch_size] = simulate_memory(self.trace, batch_size, self.loop)
        return self._known[batch_size]

    def breakdown(
        self, batch_size: int, device: str | None = None, memory_mib: float | None = None
    ) -> MemoryBreakdown:
        """Return what the memory is made of at its peak.

        Args:
            batch_size: Samples per step.
            device: GPU whose context and libraries count as well.
            memory_mib: Predicted memory of the step on the device.
        """
        memory, fixed = self.memory(batch_size), {}
        if device is not None and memory_mib is not None and not is_cpu_device(device):
            workspace_mib = beside_step_mib(device, self.phase) - CONTEXT_MIB[self.phase]
            rest_mib = memory_mib - memory.reserved_with_workspace_mib
            fixed = {Part.CONTEXT: rest_mib - workspace_mib, Part.WORKSPACES: workspace_mib}
        return break_down(
            self.trace,
            self.origins,
            batch_size,
            memory,
            int(self.trace.parameter_bytes.sum()) * self.loop.states_per_parameter,
            fixed_mib=fixed,
            keeps_gradients=self.loop.keeps_gradients,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelCall:
    """A model and how it is called: what a step is traced from."""

    model: str | Path | nn.Module
    input_size: int | None = None
    """Pixels or tokens, for names and files."""
    inputs: ExampleInputs | None = None
    """For modules, with the targets of the loss."""
    loss: Callable[..., Tensor] | None = None
    loop: TrainingLoop | None = None
    """None for the usual loop of the optimizer."""
    phase: Phase = Phase.TRAIN
    _known: dict[tuple[StepSettings, int | None], SimulatedStep] = field(default_factory=dict)

    def trace(self, settings: StepSettings, batch_size: int | None) -> SimulatedStep:
        """Trace the step with the origins of its tensors.

        Args:
            settings: Precision, memory format and optimizer.
            batch_size: Samples per step (default: that of the inputs or the file, or 1).

        Raises:
            InputError: The file has another batch size only.
            TrappmError: The step cannot be traced.
        """
        key = settings, batch_size
        if key not in self._known:
            self._known[key] = self._step(settings, batch_size)
        return self._known[key]

    def _step(self, settings: StepSettings, batch_size: int | None) -> SimulatedStep:
        if isinstance(self.model, Path) or (isinstance(self.model, str) and is_file(self.model)):
            traced, size = _traced_file(
                Path(self.model), self.input_size, batch_size, settings, self.phase
            )
        else:
            traced, size = self._traced(settings, batch_size)
        return SimulatedStep(
            trace=traced.trace,
            origins=traced.origins,
            loop=self.loop or loop_of(settings.optimizer, settings.precision),
            phase=self.phase,
            batch_size=size,
            only_batch=traced.only_batch,
            only_batch_reason=traced.reason,
        )

    def _traced(self, settings: StepSettings, batch_size: int | None) -> tuple[TracedStep, int]:
        from trappm.profiler.models.on_meta import on_meta
        from trappm.profiler.models.sources import source_of
        from trappm.profiler.tracing.losses import loss_of
        from trappm.profiler.tracing.tracer import StepOptions

        inputs: Inputs
        input_size, has_targets = self.input_size, False
        if self.inputs is not None:
            inputs, size = self.inputs, batch_size or self.inputs.batch_size
            has_targets = TARGETS in self.inputs.kwargs
        else:
            name = str(self.model)
            source = source_of(name)
            input_size = source.input_size_of(name, input_size)
            inputs, size = source.inputs(name, input_size), batch_size or 1
        options = StepOptions(
            precision=settings.precision,
            memory_format=settings.memory_format,
            loss=loss_of(self.loss, has_targets=has_targets),
        )
        model = str(self.model) if isinstance(self.model, Path) else self.model
        module = on_meta(model, input_size, settings.memory_format, settings.precision)
        return traced_step(module, inputs, options, self.phase, size), size


def _traced_file(
    path: Path, input_size: int | None, batch_size: int | None, settings: StepSettings, phase: Phase
) -> tuple[TracedStep, int]:
    """Trace an ONNX file's step in a process of its own; return it and its batch size.

    Raises:
        TrappmError: The file cannot be read or traced, or has another batch size only.
    """
    from trappm.prediction.models.subjects import subject_of
    from trappm.prediction.models.tracing import TracingRequest, own_process

    only = subject_of(path, input_size=input_size).profile().graph.fixed_batch_size
    if only is not None and batch_size not in (None, only):
        raise InputError(f"{path} has one batch size only, {only}, not {batch_size}; leave it out")
    size = batch_size or only or 1
    request = TracingRequest(
        str(path.absolute()), True, input_size, settings, batch_size=size, phase=phase.value
    )
    return TracedStep.from_bytes(own_process().look(request, str(path), None)), size


def example_inputs(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    targets: Any,
) -> ExampleInputs:
    """Return what `forward()` and the loss are called with.

    Args:
        module: The module.
        args: Positional inputs. A last one that `forward()` does not accept becomes the targets.
        kwargs: Keyword inputs.
        targets: What the loss compares the output with; None if there is nothing.

    Raises:
        InputError: `forward()` does not take these inputs; with a call that works.
    """
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # not of Python, such as a scripted module
        signature = inspect.signature(lambda *_, **__: None)
    if targets is not None and TARGETS in signature.parameters:
        kwargs, targets = {**kwargs, TARGETS: targets}, None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        if targets is not None or len(args) < 2 or not _binds(signature, args[:-1], kwargs):
            needed = [
                name for name, p in signature.parameters.items()
                if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            ]  # fmt: skip
            raise InputError(
                f"{type(module).__name__}.forward() does not take these inputs: {error}; give "
                f"example_input=({', '.join(needed)}), and targets=labels for the loss"
            ) from error
        args, targets = args[:-1], args[-1]
    example = ExampleInputs.of(*args, **kwargs)
    if targets is None:
        return example
    return ExampleInputs(
        example.args, {**example.kwargs, TARGETS: targets}, example.batch_size, example.in_lists
    )


def _binds(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def loop_of(
    optimizer: str | torch.optim.Optimizer | type | TrainingLoop | object, precision: Precision
) -> TrainingLoop:
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
