"""The static profile of a model: all that is known of it without running a training step.

    timm name or module ----> graph template (every batch size) + step profile
    ONNX file --> a module rebuilt from it --> the same of this one

A model by its name and as a file have the same graph, up to the differences listed in
docs/studies/graphs.md. The step profile comes from the same trace and has
what a graph cannot have: allocations and kernels of whole steps, the bytes that autograd keeps, and
which parameters are trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import nn

from trappm.profiler.errors import TrappmError, UnsupportedModelError
from trappm.profiler.models.model_input import Inputs, Sample
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.models.sources import source_of
from trappm.profiler.records import GraphTemplate, MemoryFormat, Precision
from trappm.profiler.simulation.kernel_profile import KernelProfile
from trappm.profiler.simulation.step_profile import StaticProfile, StepProfile, StepSource
from trappm.profiler.simulation.step_trace import TRACED_BATCH_SIZES
from trappm.profiler.tracing.tracer import StepOptions, Tracer

if TYPE_CHECKING:
    from trappm.profiler.onnx_files.module import RebuiltModule


def static_profile(model: str | nn.Module, input_size: int | Inputs) -> StaticProfile:
    """The static profile of a timm architecture (or a module) at one input size.

    A model whose graph is known but whose step cannot be traced has a refusal for the step.

    Raises:
        UnknownArchitectureError, InputError, UnsupportedModelError: as `graph_template`.
    """
    tracer = _tracer(model, input_size)
    graph = _graph(tracer, model, input_size)
    try:
        step = tracer.step()
    except TrappmError as error:
        return _without_step(graph, error)
    return StaticProfile(graph=graph, step=step, step_refusal=None, step_source=StepSource.TRACED)


def graph_template(
    model: str | nn.Module, input_size: int | Inputs, batch_size: int | None = None
) -> GraphTemplate:
    """The graph alone of a timm architecture (or a module), for every batch size.

    A module stays as it is: what runs is a copy of it without weights.

    Args:
        model: a timm architecture, or a module whose inputs have the batch first.
        input_size: height and width of square images, in pixels; or the inputs of a module.
        batch_size: the only one that the model knows; the graph then is for that one.

    Raises:
        UnknownArchitectureError, InputError: as `profiler.models.zoo.create_model`, or an input
            size that the module does not take.
        UnsupportedModelError: no graph can be made of the model; with the reason.
    """
    tracer = _tracer(model, input_size, batch_sizes=_traced(batch_size))
    return _graph(tracer, model, input_size)


def step_profile(
    model: str | nn.Module,
    input_size: int | Inputs,
    options: StepOptions | None = None,
    batch_sizes: tuple[int, int] = TRACED_BATCH_SIZES,
) -> StepProfile:
    """Allocations and kernels of the steps of a timm architecture, or of a copy of a module.

    Args:
        model, input_size: as `graph_template`.
        options: how the steps are run; by default in fp32, contiguous, with cross-entropy.
        batch_sizes: two different ones at which the steps are traced; twice the same for a model
            that knows one only.

    Raises:
        UnknownArchitectureError, InputError: as `profiler.models.zoo.create_model`.
        UnsupportedModelError: a step cannot be traced; with the reason.
    """
    return _tracer(model, input_size, options, batch_sizes).step()


def kernel_profile(
    model: str | nn.Module,
    input_size: int | Inputs,
    *,
    precision: Precision = Precision.FP32,
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
    fused_attention: bool = True,
    batch_size: int | None = None,
) -> KernelProfile:
    """The kernels of both steps alone; as `step_profile`.

    Args:
        batch_size: the only one that the model knows; the profile then holds for that one.
    """
    options = StepOptions(
        precision=precision, memory_format=memory_format, fused_attention=fused_attention
    )
    step = step_profile(model, input_size, options, _traced(batch_size))
    return cast(KernelProfile, step.kernels)


def _traced(batch_size: int | None) -> tuple[int, int]:
    """The batch sizes to trace at: twice the only one that there is, if there is one."""
    return TRACED_BATCH_SIZES if batch_size is None else (batch_size, batch_size)


def _tracer(
    model: str | nn.Module,
    input_size: int | Inputs,
    options: StepOptions | None = None,
    batch_sizes: tuple[int, int] = TRACED_BATCH_SIZES,
) -> Tracer:
    options = options or StepOptions()
    module = on_meta(model, input_size, options.memory_format, options.precision)
    return Tracer(module, _inputs(model, input_size), options, batch_sizes)


def _inputs(model: str | nn.Module, input_size: int | Inputs) -> Inputs:
    if not isinstance(input_size, int):
        return input_size
    return (
        source_of(model).inputs(model, input_size)
        if isinstance(model, str)
        else Sample.of(input_size)
    )


def _graph(tracer: Tracer, model: str | nn.Module, inputs: int | Inputs) -> GraphTemplate:
    try:
        return tracer.graph()
    except TrappmError as error:
        name: str = model if isinstance(model, str) else model._get_name()  # type: ignore[no-untyped-call]
        what = _inputs(model, inputs)
        raise UnsupportedModelError(f"{name} at {what}: {error}") from error


def file_profile(path: Path, input_size: int | None = None) -> StaticProfile:
    """The static profile of an ONNX file: that of a module rebuilt from it.

    A file with a fixed batch size has a graph and a step for that one only.

    Raises:
        ModelFileError, InputError, UnsupportedModelError: as `rebuilt`, and as `graph_template`.
    """
    module, sample, batch_size = rebuilt(path, input_size)
    tracer = _tracer(module, sample, batch_sizes=_traced(batch_size))
    graph = _graph(tracer, module, sample)
    try:
        step = tracer.step()
    except TrappmError as error:
        return _without_step(graph, error)
    return StaticProfile(
        graph=graph,
        step=step,
        step_refusal=None,
        step_source=StepSource.REBUILT,
        step_remark=_remark(graph, module.restored_norms),
    )


def rebuilt(path: Path, input_size: int | None = None) -> tuple[RebuiltModule, Sample, int | None]:
    """A trainable module rebuilt from an ONNX file, one sample of its input, its only batch size.

    The batch size is None if the file leaves it open.

    Raises:
        ModelFileError: as `onnx_files.opening.load_checked`, or the image's size is left open.
        InputError: `input_size` contradicts the file.
        UnsupportedModelError: valid ONNX that no module can be made of.
    """
    from trappm.profiler.onnx_files.folded_norms import with_norms
    from trappm.profiler.onnx_files.module import RebuiltModule
    from trappm.profiler.onnx_files.opening import image_sizes, load_checked

    model = with_norms(load_checked(path))
    try:
        module = RebuiltModule(model, str(path))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    sizes = image_sizes(path, model, input_size)
    return module, Sample(sizes, module.image_type), model.image_shape[0]


def _remark(graph: GraphTemplate, restored_norms: int) -> str | None:
    """What a file does not say of the training step: norms that its exporter folded."""
    if restored_norms:
        return (
            f"{restored_norms} batch norms that the exporter folded into convolutions "
            "are put back, as training needs them"
        )
    kinds = set(graph.operators)
    if "Conv" in kinds and not any(kind.endswith("Normalization") for kind in kinds):
        return _NO_NORM
    return None


_NO_NORM = (
    "no BatchNormalization in the file; if the exporter folded it into convolutions, training "
    "needs more memory than this: export again with torch.onnx.export(..., dynamo=True, "
    "optimize=False), or by the older exporter with dynamo=False, do_constant_folding=False"
)
"""Each exporter of PyTorch 2.13 has an option of its own that keeps the norms."""


def _without_step(graph: GraphTemplate, error: TrappmError) -> StaticProfile:
    return StaticProfile(graph=graph, step=None, step_refusal=str(error), step_source=None)
