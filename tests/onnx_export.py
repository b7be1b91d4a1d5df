"""Writes the ONNX file of a model, without its weights: a graph needs their shapes only.

PyTorch's TorchScript-based exporter (`dynamo=False`) runs the model once at batch 1 and records
what it does. Weights become graph inputs, so the file stays under a megabyte, nothing is folded
away, and BatchNormalization stays visible as the training step will run it.
"""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import onnx
import torch
from torch import nn
from torch.onnx import symbolic_helper
from torch.onnx.utils import register_custom_op_symbolic, unregister_custom_op_symbolic

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.models.zoo import create_model
from trappm.profiler.records import GraphTemplate, Phase

OPSET = 17
"""Pinned: operators, and so MACs and memory, differ between opsets."""

_SINCE_OPSET = 9

IMAGE = "image"
"""Name of the graph input that is the batch of images; the other inputs are weights."""


def export_onnx(
    model: str | nn.Module, input_size: int, path: Path, *, batch_size: int | None = None
) -> None:
    """Writes the forward pass of a model on square RGB images as ONNX, without weights.

    Args:
        model: a timm architecture, or a module that maps (B, 3, H, W) to one tensor.
        input_size: height and width of the images, in pixels.
        path: the file to write.
        batch_size: None for a dynamic batch axis, else the one batch size of the file.
    """
    from trappm.extensions.onnx.checked_model import BUFFERS_KEY

    module = create_model(model, input_size) if isinstance(model, str) else model
    axes = {IMAGE: {0: "batch"}, "logits": {0: "batch"}} if batch_size is None else None
    buffer = io.BytesIO()
    with _quiet(), _with_rms_norm():
        torch.onnx.export(
            module,
            (torch.zeros(batch_size or 1, 3, input_size, input_size),),
            buffer,  # type: ignore[arg-type]  # a buffer is accepted, if not declared
            dynamo=False,
            opset_version=OPSET,
            input_names=[IMAGE],
            output_names=["logits"],
            dynamic_axes=axes,
            export_params=False,
            # Without this, weights of equal value would be merged into one.
            keep_initializers_as_inputs=True,
            do_constant_folding=False,
        )
    proto = onnx.load_from_string(buffer.getvalue())
    buffers = [buffer_name for buffer_name, _ in module.named_buffers()]
    onnx.helper.set_model_props(proto, {BUFFERS_KEY: json.dumps(buffers)})
    path.write_bytes(proto.SerializeToString())


def export_quietly(model: nn.Module, example: tuple[Any, ...], path: Path, **options: Any) -> Path:
    """Export a module with its weights as PyTorch does by itself; return the path."""
    with _quiet():
        torch.onnx.export(model, example, path, **options)
    return path


def file_graph(
    path: Path, input_size: int | None = None, batch_size: int | None = None
) -> GraphTemplate:
    """Return the graph of an ONNX file; with a batch size, perhaps of this one only."""
    from trappm.extensions.onnx.file_trace import file_trace

    made = file_trace(path, input_size, phase=Phase.INFER, batch_size=batch_size)
    if made.graph is None:
        raise UnsupportedModelError(made.refusal or "")
    return made.graph


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of its own future and of every size that it reads while tracing, and
    prints the whole graph when it fails.
    """
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch.object(torch._C, "_jit_onnx_log"),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _with_rms_norm() -> Iterator[None]:
    """Inside, the exporter writes RMS norms, which it cannot by itself at this opset."""
    register_custom_op_symbolic("aten::rms_norm", _rms_norm, _SINCE_OPSET)
    try:
        yield
    finally:
        unregister_custom_op_symbolic("aten::rms_norm", _SINCE_OPSET)


def _rms_norm(g: Any, x: Any, normalized_shape: Any, weight: Any, epsilon: Any) -> Any:
    """x / sqrt(mean(x^2) + epsilon) * weight, over the last axes."""
    axes = symbolic_helper._get_const(normalized_shape, "is", "normalized_shape")  # type: ignore[no-untyped-call]
    value = symbolic_helper._maybe_get_const(epsilon, "f")
    if not isinstance(value, float):  # torch takes the precision of the type by default
        value = torch.finfo(torch.float32).eps
    square = g.op("Mul", x, x)
    mean = g.op("ReduceMean", square, axes_i=list(range(-len(axes), 0)), keepdims_i=1)
    shifted = g.op("Add", mean, g.op("Constant", value_t=torch.tensor(value)))
    normal = g.op("Div", x, g.op("Sqrt", shifted))
    return normal if symbolic_helper._is_none(weight) else g.op("Mul", normal, weight)
