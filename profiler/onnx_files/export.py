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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import onnx
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trappm.profiler.errors import InputError, UnsupportedModelError, one_line
from trappm.profiler.onnx_files.opening import BUFFERS_KEY
from trappm.profiler.onnx_files.symbolics import extra_symbolics

OPSET = 17
"""Pinned: operators, and so MACs and memory, differ between opsets."""

IMAGE = "image"
"""Name of the graph input that is the batch of images; the other inputs are weights."""


def export_onnx(
    model: str | nn.Module, input_size: int, path: Path, *, batch_size: int | None = None
) -> None:
    """Writes the forward pass of a model on square RGB images as ONNX, opset 17, without weights.

    Args:
        model: a timm architecture, or a module that maps (B, 3, H, W) to one tensor.
        input_size: height and width of the images, in pixels.
        path: the file to write.
        batch_size: None for a dynamic batch axis, else the one batch size of the file.

    Raises:
        UnknownArchitectureError, InputError: as `profiler.models.zoo.create_model`.
        UnsupportedModelError: the exporter cannot express the model at this input size.
    """
    name = model if isinstance(model, str) else type(model).__name__
    if input_size < 1 or (batch_size is not None and batch_size < 1):
        raise InputError(f"cannot export at {input_size} px, batch {batch_size}: both start at 1")
    module = _uninitialised(model, input_size) if isinstance(model, str) else model
    axes = {IMAGE: {0: "batch"}, "logits": {0: "batch"}} if batch_size is None else None
    buffer = io.BytesIO()
    try:
        with _quiet(), extra_symbolics():
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
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} cannot be exported at {input_size} px: {one_line(error)}"
        ) from error
    proto = onnx.load_from_string(buffer.getvalue())
    buffers = [buffer_name for buffer_name, _ in module.named_buffers()]
    onnx.helper.set_model_props(proto, {BUFFERS_KEY: json.dumps(buffers)})
    path.write_bytes(proto.SerializeToString())


class _NoRandomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves weights as they are instead of drawing them: their values do not reach the file."""

    _DRAWS = (
        torch.ops.aten.normal_.default,
        torch.ops.aten.uniform_.default,
        torch.ops.aten.erfinv_.default,
    )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return args[0] if func in self._DRAWS else func(*args, **(kwargs or {}))


def _uninitialised(architecture: str, input_size: int) -> nn.Module:
    from trappm.profiler.models.zoo import create_model

    with _NoRandomness():  # type: ignore[no-untyped-call]
        return create_model(architecture, input_size)


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
