"""The static profile of a configuration: from an architecture's name to its graph.

Two ways lead to a graph: `profiler.module_graph` for models that PyTorch can run, and
`profiler.onnx_reader` for files. Both give the same graph of the same model, up to the differences
listed in docs/static_profile.md.
"""

from __future__ import annotations

from torch import nn

from profiler.module_graph import module_template
from profiler.records import GraphTemplate


def graph_template(model: str | nn.Module, input_size: int) -> GraphTemplate:
    """The graph of a timm architecture (or a module) at one input size, for every batch size.

    Raises:
        UnknownArchitectureError, InputError, UnsupportedModelError: as `module_template`.
    """
    return module_template(model, input_size)
