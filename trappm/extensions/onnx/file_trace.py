"""The traced step of an ONNX file: that of a module rebuilt from it.

A model by its name and as a file have the same graph, except for the differences in
docs/research/tracing.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trappm.extensions.onnx.checked_model import input_shapes, load_checked
from trappm.extensions.onnx.folded_norms import restore_norms
from trappm.extensions.onnx.module import RebuiltModule
from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.models.model_input import Inputs
from trappm.profiler.records import GraphTemplate, Phase
from trappm.profiler.trace import trace
from trappm.profiler.traced_step import Trace, TraceSettings, TraceSource


@dataclass(frozen=True)
class FileInputs(Inputs):
    """Positional inputs of a module rebuilt from a file."""

    shapes: tuple[tuple[int | None, ...], ...]
    """Shape of each; None for the batch axis."""
    dtypes: tuple[torch.dtype, ...]
    only_batch_size: int | None = None
    """None if the file leaves the batch size open."""

    def tensors(self, batch_size: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        shapes = [[batch_size if n is None else n for n in shape] for shape in self.shapes]
        return tuple(
            torch.empty(shape, dtype=dtype, device="meta")
            for shape, dtype in zip(shapes, self.dtypes, strict=True)
        ), {}

    def __str__(self) -> str:
        return " and ".join(
            f"({', '.join('batch' if size is None else str(size) for size in shape)})"
            for shape in self.shapes
        )


def file_trace(
    path: Path,
    input_size: int | None = None,
    settings: TraceSettings = TraceSettings(),  # noqa: B008  (it cannot change)
    phase: Phase = Phase.TRAIN,
    *,
    is_tokens: bool = False,
    batch_size: int | None = None,
    with_origins: bool = False,
) -> Trace:
    """Return a step of the module that an ONNX file describes.

    Of a file with a fixed batch size, the step is that of this one only.

    Raises:
        ModelFileError, InputError, UnsupportedModelError: As `rebuild` and `profiler.trace.trace`.
    """
    module, inputs = rebuild(path, input_size, is_tokens=is_tokens)
    made = trace(module, inputs, settings, phase, batch_size=batch_size, with_origins=with_origins)
    if made.allocations is None or made.graph is None:
        return made
    remark = _remark(made.graph, module.restored_norms)
    return replace(made, source=TraceSource.REBUILT, remark=remark)


def rebuild(
    path: Path, input_size: int | None = None, *, is_tokens: bool = False
) -> tuple[RebuiltModule, FileInputs]:
    """Return a module rebuilt from an ONNX file, and its inputs.

    Args:
        path: The file.
        input_size: Size of its open axes except the batch, in pixels or tokens.
        is_tokens: True if it is a number of tokens.

    Raises:
        ModelFileError: As `load_checked`, or a size is open.
        InputError: `input_size` contradicts the file.
        UnsupportedModelError: No module can be made of it.
    """
    model = restore_norms(load_checked(path))
    try:
        module = RebuiltModule(model, str(path))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    shapes, batch_size = input_shapes(path, model, input_size, is_tokens=is_tokens)
    return module, FileInputs(tuple(shapes), module.input_types, batch_size)


def _remark(graph: GraphTemplate, restored_norms: int) -> str | None:
    """Return a remark on batch norms that the exporter folded, or None."""
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
"""Remark on files without batch norms, for the exporters of PyTorch 2.13."""
