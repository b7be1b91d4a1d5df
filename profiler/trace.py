"""`trace` follows a step of a model without running it.

name or module + inputs + settings + phase ----> graph, allocations and kernels of the step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import nn

from trappm.profiler.errors import (
    BatchOrderError,
    TrappmError,
    UnevenSizesError,
    UnsupportedModelError,
)
from trappm.profiler.host.environment import independent_of_caller
from trappm.profiler.models.model_input import ExampleInputs, Inputs, Sample
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.models.own_modules import is_own_module
from trappm.profiler.models.sources import source_of
from trappm.profiler.records import Execution, MemoryFormat, Phase
from trappm.profiler.traced_step import (
    TRACED_BATCH_SIZES,
    KernelTable,
    Trace,
    TraceSettings,
    TraceSource,
)
from trappm.profiler.tracing.fusion import prefers_channels_last
from trappm.profiler.tracing.known_values import AS_IN_THE_EXAMPLE, HostRead
from trappm.profiler.tracing.losses import Loss, default_loss
from trappm.profiler.tracing.tracer import Tracer

ONLY_BATCH = "the file has this one only; export it with a dynamic batch axis"
BY_VALUES = "its operators depend on the values of its inputs"


@independent_of_caller
def trace(
    model: str | nn.Module,
    inputs: int | Inputs,
    settings: TraceSettings = TraceSettings(),  # noqa: B008  (it cannot change)
    phase: Phase = Phase.TRAIN,
    *,
    loss: Loss = default_loss,
    batch_size: int | None = None,
    with_origins: bool = False,
) -> Trace:
    """Return one step of a model, traced at two batch sizes for all others.

    >>> step = trace("resnet18", 224)
    >>> step.graph.at(batch_size=32).parameters.sum()
    np.int64(11689512)

    With a batch size, a step whose sizes do not grow evenly is traced at this one alone. A module
    whose operators depend on values then runs on the CPU, on those of its example.

    Args:
        model: Name of an architecture, or a module whose inputs have the batch first; a copy runs.
        inputs: Size of the inputs of a name in pixels or tokens, or the inputs of a module.
        settings, phase: How the step is run.
        loss: Loss of a training step.
        batch_size: Batch size of the question, or None.
        with_origins: Whether to find the origin of each tensor, which takes longer.

    Raises:
        UnknownArchitectureError: There is no such model.
        InputError: PyTorch refuses the step, or a wrong input size.
        UnsupportedModelError: It cannot be traced, not even its forward pass.
        UnevenSizesError, BatchOrderError: Its sizes do not grow evenly with the batch, and there is
            no batch size.
    """
    step = _StepToTrace(model, _inputs(model, inputs), inputs, phase, loss, with_origins)
    made = step.traced(settings._replace(execution=Execution.EAGER), batch_size)
    if settings.execution is Execution.EAGER or made.kernels is None:
        return made
    if made.source is TraceSource.RUN or AS_IN_THE_EXAMPLE in (made.remark or ""):
        raise UnsupportedModelError(f"{BY_VALUES}, so parts of it run in eager")
    layouts = [settings]
    if prefers_channels_last(made.kernels.table, phase):
        layouts.insert(0, settings._replace(memory_format=MemoryFormat.CHANNELS_LAST))
    sizes = TRACED_BATCH_SIZES if made.batch_size is None else (made.batch_size,) * 2
    return replace(made, kernels=replace(made.kernels, table=step.fused(layouts, sizes)))


def _inputs(model: str | nn.Module, inputs: int | Inputs) -> Inputs:
    if isinstance(model, str) and isinstance(inputs, int):
        return source_of(model).inputs(model, inputs)
    return Sample.of(inputs) if isinstance(inputs, int) else inputs


@dataclass(frozen=True)
class _StepToTrace:
    """A step to trace, in any settings and at any batch sizes."""

    model: str | nn.Module
    inputs: Inputs
    input_size: object
    phase: Phase
    loss: Loss
    with_origins: bool

    def at(self, settings: TraceSettings, batch_sizes: tuple[int, int]) -> Trace:
        return self._tracer(settings, batch_sizes).trace()

    def _tracer(
        self,
        settings: TraceSettings,
        batch_sizes: tuple[int, int],
        original: nn.Module | None = None,
        reads: Sequence[HostRead] = (),
    ) -> Tracer:
        module = on_meta(self.model, self.input_size, settings.memory_format, settings.precision)
        return Tracer(
            module,
            self.inputs,
            settings,
            self.phase,
            batch_sizes,
            loss=self.loss,
            with_origins=self.with_origins,
            original=original,
            reads=reads,
            is_named=isinstance(self.model, str) and not is_own_module(self.model),
        )

    def fused(self, layouts: Sequence[TraceSettings], batch_sizes: tuple[int, int]) -> KernelTable:
        """Return the kernels under `torch.compile`, in the first of the layouts that runs.

        Raises:
            UnsupportedModelError: None does.
        """
        why = ""
        for settings in layouts:
            try:
                made = self.at(settings, batch_sizes)
            except UnsupportedModelError as error:
                why = str(error)
                continue
            if made.kernels is not None:
                return made.kernels.table
            why = made.refusal or ""
        raise UnsupportedModelError(why)

    def traced(self, settings: TraceSettings, batch_size: int | None) -> Trace:
        """Return the step at all batch sizes, or else at this one."""
        if (only := self.inputs.only_batch_size) is not None:
            return replace(self.at(settings, (only, only)), only_because=ONLY_BATCH)
        try:
            at_all = self.at(settings, TRACED_BATCH_SIZES)
            if at_all.allocations is not None or batch_size is None:
                return at_all
            why: TrappmError = UnsupportedModelError(at_all.refusal or "")
        except TrappmError as error:
            if batch_size is None:
                raise self._with_name(error) from error
            at_all, why = None, error
        try:
            at_one = self._alone(settings, batch_size)
        except UnsupportedModelError:
            if at_all is None:
                raise
            return at_all
        if at_all is not None and at_one.allocations is None:
            return at_all
        if at_one.batch_size is None:
            return at_one
        return replace(at_one, only_because=at_one.only_because or _why_alone(why))

    def _alone(self, settings: TraceSettings, batch_size: int) -> Trace:
        sizes = batch_size, batch_size
        try:
            at_one = self.at(settings, sizes)
            if at_one.allocations is not None or not isinstance(self.inputs, ExampleInputs):
                return at_one
        except UnsupportedModelError:
            if not isinstance(self.inputs, ExampleInputs):
                raise
        return self._by_values(settings, batch_size)

    def _by_values(self, settings: TraceSettings, batch_size: int) -> Trace:
        """Return the step as it runs on the values of the example.

        If it only looks at values, such as whether a loss is finite, those of the example are
        taken at all batch sizes.
        """
        run = self._tracer(settings, (batch_size, batch_size), cast(nn.Module, self.model))
        at_one = replace(run.trace(), only_because=BY_VALUES)
        if not run.reads:
            return at_one
        try:
            at_all = self._tracer(settings, TRACED_BATCH_SIZES, reads=run.reads).trace()
        except TrappmError:
            return at_one
        return at_one if at_all.allocations is None else at_all

    def _with_name(self, error: TrappmError) -> TrappmError:
        """Return the error with the model's name, if the reason is the model."""
        if not isinstance(error, UnsupportedModelError):
            return error
        name: str = self.model if isinstance(self.model, str) else self.model._get_name()  # type: ignore[no-untyped-call]
        return type(error)(f"{name} at {self.inputs}: {error}")


def _why_alone(error: TrappmError) -> str:
    """Return why a step is traced at one batch size only."""
    if isinstance(error, UnevenSizesError):
        return str(error)
    if isinstance(error, BatchOrderError):
        return "other operators run at every batch size, as where it loops over its samples"
    return (
        f"at other batch sizes {str(error).rstrip('.')}; if the loss has labels of a fixed batch, "
        "give them as targets=labels"
    )
