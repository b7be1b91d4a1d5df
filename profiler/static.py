"""The static profile of a configuration: from an architecture's name to its graph."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch import nn

from profiler.export import export_onnx
from profiler.onnx_reader import read_onnx
from profiler.records import GraphTemplate


def graph_template(model: str | nn.Module, input_size: int) -> GraphTemplate:
    """The graph of a timm architecture (or a module) at one input size, for every batch size.

    Raises:
        UnknownArchitectureError, InputError, UnsupportedModelError: as `export_onnx`.
    """
    with tempfile.TemporaryDirectory(prefix="trappm-") as folder:
        path = Path(folder) / "model.onnx"
        export_onnx(model, input_size, path)
        return read_onnx(path)
