"""The static profile of an ONNX file: that of a module rebuilt from it.

A model by its name and as a file have the same graph, except for the differences in
docs/research/static_profile.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trappm.extensions.onnx.folded_norms import with_norms
from trappm.extensions.onnx.module import RebuiltModule
from trappm.extensions.onnx.opening import input_shapes, load_checked
from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.models.model_input import Inputs
from trappm.profiler.records import GraphTemplate
from trappm.profiler.records.trace import StaticProfile, StepSource
from trappm.profiler.records.allocations import TRACED_BATCH_SIZES
from trappm.profiler.static_profile import static_profile


@dataclass(frozen=True)
class FileInputs(Inputs):
    """Positional inputs of a module rebuilt from a file."""

    shapes: tuple[tuple[int | None, ...], ...]
    """Shape of each; None for the batch axis."""
    dtypes: tuple[torch.dtype, ...]

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


def file_profile(
    path: Path, input_size: int | None = None, *, is_tokens: bool = False
) -> StaticProfile:
    """Return the static profile of an ONNX file: that of a module rebuilt from it.

    A file with a fixed batch size has a graph and a step for that one only.

    Raises:
        ModelFileError, InputError, UnsupportedModelError: As `rebuilt`, and as `graph_template`.
    """
    module, sample, batch_size = rebuilt(path, input_size, is_tokens=is_tokens)
    batch_sizes = TRACED_BATCH_SIZES if batch_size is None else (batch_size, batch_size)
    profile = static_profile(module, sample, batch_sizes=batch_sizes)
    if profile.step is None:
        return profile
    remark = _remark(profile.graph, module.restored_norms)
    return replace(profile, step_source=StepSource.REBUILT, step_remark=remark)


def rebuilt(
    path: Path, input_size: int | None = None, *, is_tokens: bool = False
) -> tuple[RebuiltModule, Inputs, int | None]:
    """Return a module rebuilt from an ONNX file, its inputs, and its batch size.

    The batch size is None if the file leaves it open.

    Args:
        path: The file.
        input_size: Size of its open axes except the batch, in pixels or tokens.
        is_tokens: True if it is a number of tokens.

    Raises:
        ModelFileError: As `load_checked`, or a size is open.
        InputError: `input_size` contradicts the file.
        UnsupportedModelError: No module can be made of it.
    """
    model = with_norms(load_checked(path))
    try:
        module = RebuiltModule(model, str(path))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    shapes, batch_size = input_shapes(path, model, input_size, is_tokens=is_tokens)
    return module, FileInputs(tuple(shapes), module.input_types), batch_size


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
