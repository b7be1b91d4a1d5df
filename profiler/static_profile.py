"""The static profile of a model: all that is known of it without running a training step.

    timm name or module ----> graph template (every batch size) + step profile
    ONNX file --> a module rebuilt from it --> the same of this one

A model by its name and as a file have the same graph, up to the differences listed in
docs/static_profile.md. The step profile has what a graph cannot have: the
allocations of a whole training step, the bytes that autograd keeps, and which parameters are
trained.
"""

from __future__ import annotations

import contextlib
import enum
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from trappm.profiler.errors import TrappmError
from trappm.profiler.graphs.module_graph import module_template
from trappm.profiler.models.model_input import Sample
from trappm.profiler.records import GraphTemplate, Optimizer
from trappm.profiler.simulation.memory_simulation import Loop, SimulatedMemory
from trappm.profiler.simulation.step_profile import StepProfile
from trappm.profiler.simulation.step_recorder import step_profile
from trappm.profiler.simulation.step_trace import TRACED_BATCH_SIZES

if TYPE_CHECKING:
    from trappm.profiler.onnx_files.module import RebuiltModule

_QUANTIZED = re.compile(r"QuantizeLinear$|QLinear|ConvInteger$|MatMulInteger$|^com\.microsoft\.Q")


class StepSource(enum.StrEnum):
    """Which model's training step was traced."""

    TRACED = "traced"
    """The model's own."""
    REBUILT = "rebuilt"
    """That of a module rebuilt from an ONNX file."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StaticProfile:
    """A graph template and, where a training step can be traced, the step's profile."""

    graph: GraphTemplate
    step: StepProfile | None
    step_refusal: str | None
    """Why there is no step profile; None if there is one."""
    step_source: StepSource | None
    """None if there is no step profile."""
    step_remark: str | None = None
    """What the step's source could not see; None if it saw all."""

    @property
    def quantized(self) -> str | None:
        """An operator on quantised numbers, which no training step has; None without one."""
        return next((name for name in self.graph.operators if _QUANTIZED.search(name)), None)

    def memory(
        self,
        batch_size: int,
        optimizer: Optimizer = Optimizer.SGD,
        loop: Loop = Loop.PLAIN,
    ) -> SimulatedMemory | None:
        """GPU memory of a training step in fp32, contiguous; None where no step could be traced.

        Args:
            batch_size: any; the file's own for a file that has one.
            optimizer: whose states and temporaries are added.
            loop: what happens around the steps; by default as in our protocol.

        Raises:
            InputError: the batch size is below 1, or not the only one that the graph has.
        """
        self.graph.at(batch_size)  # refuses what the graph cannot have
        return None if self.step is None else self.step.memory(batch_size, optimizer, loop)


def static_profile(model: str | nn.Module, input_size: int | Sample) -> StaticProfile:
    """The static profile of a timm architecture (or a module) at one input size.

    A model whose graph is known but whose step cannot be traced has a refusal for the step.

    Raises:
        UnknownArchitectureError, InputError, UnsupportedModelError: as `module_template`.
    """
    # What a module of anyone makes in its forward pass, it may make without naming a device.
    place = contextlib.nullcontext() if isinstance(model, str) else torch.device("meta")
    with place:
        graph = module_template(model, input_size)
        try:
            step = step_profile(model, input_size)
        except TrappmError as error:
            return _without_step(graph, error)
    return StaticProfile(graph=graph, step=step, step_refusal=None, step_source=StepSource.TRACED)


def file_profile(path: Path, input_size: int | None = None) -> StaticProfile:
    """The static profile of an ONNX file: that of a module rebuilt from it.

    A file with a fixed batch size has a graph and a step for that one only.

    Raises:
        ModelFileError, InputError, UnsupportedModelError: as `rebuilt`, and as `module_template`.
    """
    module, sample, batch_size = rebuilt(path, input_size)
    graph = module_template(module, sample, batch_size)
    try:
        step = step_profile(
            module, sample, (batch_size, batch_size) if batch_size else TRACED_BATCH_SIZES
        )
    except TrappmError as error:
        return _without_step(graph, error)
    return StaticProfile(
        graph=graph,
        step=step,
        step_refusal=None,
        step_source=StepSource.REBUILT,
        step_remark=_NO_NORM if _may_be_folded(graph) else None,
    )


def rebuilt(
    path: Path, input_size: int | None = None
) -> tuple[RebuiltModule, Sample, int | None]:
    """A trainable module rebuilt from an ONNX file, one sample of its input, its only batch size.

    The batch size is None if the file leaves it open.

    Raises:
        ModelFileError: as `onnx_files.opening.load_checked`, or the image's size is left open.
        InputError: `input_size` contradicts the file.
        UnsupportedModelError: valid ONNX that no module can be made of.
    """
    from trappm.profiler.onnx_files.module import RebuiltModule
    from trappm.profiler.onnx_files.opening import image_sizes, load_checked

    model = load_checked(path)
    try:
        module = RebuiltModule(model, str(path))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    sizes = image_sizes(path, model, input_size)
    return module, Sample(sizes, module.image_type), model.image_shape[0]


def _may_be_folded(graph: GraphTemplate) -> bool:
    """Convolutions without any normalisation are what folding leaves behind."""
    kinds = set(graph.operators)
    return "Conv" in kinds and not any(kind.endswith("Normalization") for kind in kinds)


_NO_NORM = (
    "no BatchNormalization in the file; if the exporter folded it into convolutions, training the "
    "model needs more memory than this"
)


def _without_step(graph: GraphTemplate, error: TrappmError) -> StaticProfile:
    return StaticProfile(graph=graph, step=None, step_refusal=str(error), step_source=None)


def graph_template(model: str | nn.Module, input_size: int | Sample) -> GraphTemplate:
    """The graph alone of a timm architecture (or a module), for every batch size.

    Raises:
        UnknownArchitectureError, InputError, UnsupportedModelError: as `module_template`.
    """
    return module_template(model, input_size)
