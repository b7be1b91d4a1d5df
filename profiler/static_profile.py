"""The static profile of a model: graph, allocations and kernels without running it.

    timm name or module ----> graph template (every batch size) + step profile

The step profile, from the same trace, has allocations, kernels, saved bytes and trained parameters.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from trappm.profiler.errors import TrappmError, UnsupportedModelError
from trappm.profiler.models.model_input import Inputs, Sample
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.models.sources import source_of
from trappm.profiler.records import GraphTemplate, MemoryFormat, Phase, Precision
from trappm.profiler.simulation.kernel_profile import KernelProfile, KernelTable
from trappm.profiler.simulation.step_profile import StaticProfile, StepProfile, StepSource
from trappm.profiler.simulation.step_trace import TRACED_BATCH_SIZES, StepTrace
from trappm.profiler.tracing.fusion import prefers_channels_last
from trappm.profiler.tracing.tracer import StepOptions, Tracer


def static_profile(
    model: str | nn.Module,
    input_size: int | Inputs,
    options: StepOptions | None = None,
    batch_sizes: tuple[int, int] = TRACED_BATCH_SIZES,
    *,
    by_values: bool = False,
) -> StaticProfile:
    """Return the static profile of a timm architecture (or a module) at one input size.

    If the step cannot be traced, the profile has the reason in place of the step.

    Args:
        model, input_size, options, batch_sizes, by_values: As `step_profile`.

    Raises:
        UnknownArchitectureError, InputError, UnsupportedModelError: As `graph_template`.
    """
    source = StepSource.RUN if by_values else StepSource.TRACED
    tracer = _tracer(model, input_size, options, batch_sizes, by_values=by_values)
    return _profile(tracer, model, input_size, source)


def graph_template(model: str | nn.Module, input_size: int | Inputs) -> GraphTemplate:
    """Return the graph of a timm architecture (or a module), for every batch size.

    Args:
        model: A timm architecture, or a module whose inputs have the batch first; a copy runs.
        input_size: Height and width of square images in pixels, or the inputs of a module.

    Raises:
        UnknownArchitectureError, InputError: As `profiler.models.zoo.create_model`, or a wrong
            input size.
        UnsupportedModelError: No graph can be made of the model.
    """
    return _graph(_tracer(model, input_size), model, input_size)


def step_profile(
    model: str | nn.Module,
    input_size: int | Inputs,
    options: StepOptions | None = None,
    batch_sizes: tuple[int, int] = TRACED_BATCH_SIZES,
    *,
    by_values: bool = False,
) -> StepProfile:
    """Return allocations and kernels of the steps of a timm architecture, or of a module.

    Args:
        model, input_size: As `graph_template`.
        options: How the steps are run; by default in fp32, contiguous, with cross-entropy.
            Kernels are those of the compiled step, if it is compiled; allocations never are.
        batch_sizes: Two different ones, or twice the only one of the model.
        by_values: Run the steps of a module on its values and on those of the inputs, on the CPU.

    Raises:
        UnknownArchitectureError, InputError: As `profiler.models.zoo.create_model`.
        UnsupportedModelError: A step cannot be traced.
    """
    options = options or StepOptions()
    if by_values and options.is_compiled:
        raise UnsupportedModelError("its operators depend on values, so parts of it run in eager")
    eager = replace(options, is_compiled=False)
    step = _tracer(model, input_size, eager, batch_sizes, by_values=by_values).step()
    if not options.is_compiled:
        return step
    train, infer = (
        compiled_kernels(model, input_size, phase, options, step.kernels.table(phase), batch_sizes)
        for phase in (Phase.TRAIN, Phase.INFER)
    )
    return replace(step, kernels=replace(step.kernels, train=train, infer=infer))


def kernel_profile(
    model: str | nn.Module,
    input_size: int | Inputs,
    *,
    precision: Precision = Precision.FP32,
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
    fused_attention: bool = True,
) -> KernelProfile:
    """Return the kernels of both steps; arguments as `step_profile`."""
    options = StepOptions(
        precision=precision, memory_format=memory_format, fused_attention=fused_attention
    )
    return step_profile(model, input_size, options).kernels


def traced_phase(
    model: str | nn.Module,
    input_size: int | Inputs,
    phase: Phase,
    options: StepOptions,
    batch_sizes: tuple[int, int] = TRACED_BATCH_SIZES,
) -> tuple[StepTrace, KernelTable]:
    """Return allocations and kernels of one phase's step; arguments as `step_profile`."""
    return _tracer(model, input_size, options, batch_sizes).phase(phase)


def compiled_kernels(
    model: str | nn.Module,
    input_size: int | Inputs,
    phase: Phase,
    options: StepOptions,
    eager: KernelTable,
    batch_sizes: tuple[int, int] = TRACED_BATCH_SIZES,
) -> KernelTable:
    """Return the kernels of one phase's step under `torch.compile`.

    Args:
        model, input_size, batch_sizes: As `step_profile`.
        phase: Training or inference.
        options: How the eager step is run.
        eager: Kernels of the eager step, which decide inductor's layout.
    """
    layout = options.memory_format
    if prefers_channels_last(eager, phase):
        layout = MemoryFormat.CHANNELS_LAST
    compiled = replace(options, memory_format=layout, is_compiled=True)
    return traced_phase(model, input_size, phase, compiled, batch_sizes)[1]


def _tracer(
    model: str | nn.Module,
    input_size: int | Inputs,
    options: StepOptions | None = None,
    batch_sizes: tuple[int, int] = TRACED_BATCH_SIZES,
    *,
    by_values: bool = False,
) -> Tracer:
    options = options or StepOptions()
    module = on_meta(model, input_size, options.memory_format, options.precision)
    original = model if by_values and isinstance(model, nn.Module) else None
    inputs, is_named = _inputs(model, input_size), isinstance(model, str)
    return Tracer(module, inputs, options, batch_sizes, original=original, is_named=is_named)


def _inputs(model: str | nn.Module, input_size: int | Inputs) -> Inputs:
    if isinstance(model, str) and isinstance(input_size, int):
        return source_of(model).inputs(model, input_size)
    return Sample.of(input_size) if isinstance(input_size, int) else input_size


def _profile(
    tracer: Tracer, model: str | nn.Module, inputs: int | Inputs, source: StepSource
) -> StaticProfile:
    graph = _graph(tracer, model, inputs)
    try:
        step = tracer.step()
    except TrappmError as error:
        return StaticProfile(graph=graph, step=None, step_refusal=str(error), step_source=None)
    remark = " ".join(sorted(tracer.assumed)) or None
    return StaticProfile(
        graph=graph, step=step, step_refusal=None, step_source=source, step_remark=remark
    )


def _graph(tracer: Tracer, model: str | nn.Module, inputs: int | Inputs) -> GraphTemplate:
    try:
        return tracer.graph()
    except TrappmError as error:
        name: str = model if isinstance(model, str) else model._get_name()  # type: ignore[no-untyped-call]
        what = _inputs(model, inputs)
        raise UnsupportedModelError(f"{name} at {what}: {error}") from error
