"""The static profile of an architecture: all that is known of it without running a training step.

    timm name or module ----> graph template (every batch size) + step profile
    ONNX file --------------> graph template + step profile of a module rebuilt from it, or rules

Two ways lead to a graph: `profiler.module_graph` for models that PyTorch can run, and
`profiler.onnx_reader` for files. Both give the same graph of the same model, up to the differences
listed in docs/static_profile.md. The step profile is what a graph cannot tell: the allocations of
a whole training step, the bytes that autograd keeps, and which parameters are trained.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from profiler.errors import UnsupportedModelError
from profiler.module_graph import module_template
from profiler.records import GraphTemplate
from profiler.step_profile import StepProfile, step_profile


@dataclass(frozen=True, kw_only=True, eq=False)
class StaticProfile:
    """A graph template and, where a training step can be traced, the step's profile."""

    graph: GraphTemplate
    step: StepProfile | None
    step_refusal: str | None
    """Why there is no step profile; None if there is one."""


def static_profile(model: str | nn.Module, input_size: int) -> StaticProfile:
    """The static profile of a timm architecture (or a module) at one input size.

    A model whose graph is known but whose step cannot be traced has a refusal for the step.

    Raises:
        UnknownArchitectureError, InputError, UnsupportedModelError: as `module_template`.
    """
    graph = module_template(model, input_size)
    try:
        step, refusal = step_profile(model, input_size), None
    except UnsupportedModelError as error:
        step, refusal = None, str(error)
    return StaticProfile(graph=graph, step=step, step_refusal=refusal)


def graph_template(model: str | nn.Module, input_size: int) -> GraphTemplate:
    """The graph alone of a timm architecture (or a module), for every batch size.

    Raises:
        UnknownArchitectureError, InputError, UnsupportedModelError: as `module_template`.
    """
    return module_template(model, input_size)
