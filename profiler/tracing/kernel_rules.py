"""Which kernel a GPU runs for an operator of PyTorch, and which matrix product that is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trappm.profiler.simulation.kernel_profile import KernelKind, Pass


@dataclass(frozen=True)
class Product:
    """The matrix products of one kernel: so many of (rows, depth) by (depth, columns)."""

    rows: int
    columns: int
    depth: int
    products: int = 1
    window: int = 1
    """Height times width of a convolution's kernel."""
    stride: int = 1
    pixels: int = 1
    """Height times width of a convolution's result."""

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * self.depth * self.products


_SHAPELESS = Product(0, 0, 0, 0)


def convolution_kind(weight: Tensor, groups: int) -> KernelKind:
    if groups == 1:
        pointwise = all(size == 1 for size in weight.shape[2:])
        return KernelKind.POINTWISE if pointwise else KernelKind.DENSE
    return KernelKind.DEPTHWISE if weight.shape[1] == 1 else KernelKind.GROUPED


def convolution(
    which: Pass, images: Tensor, weight: Tensor, output: Tensor, stride: Sequence[int], groups: int
) -> Product:
    """The product that a convolution amounts to in one of its passes (implicit GEMM)."""
    window = math.prod(weight.shape[2:])
    batch, pixels = output.shape[0], math.prod(output.shape[2:])
    fan_in, fan_out = images.shape[1] // groups, output.shape[1] // groups
    if which is Pass.FORWARD:
        shape = batch * pixels, fan_out, fan_in * window
    elif which is Pass.DATA_GRADIENT:
        # Strided: each pixel of the image got gradients from only some pixels of the result.
        depth = fan_out * window * pixels / math.prod(images.shape[2:])
        shape = batch * math.prod(images.shape[2:]), fan_in, max(round(depth), 1)
    else:
        shape = fan_out, fan_in * window, batch * pixels
    return Product(*shape, groups, window, max(stride, default=1), pixels)


_FACTORS = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}


def product_of(name: str, call: Mapping[str, Any]) -> Product | None:
    """Of an operator that multiplies matrices, with these arguments; None for any other."""
    if name not in _FACTORS:
        return None
    left, right = (call[factor] for factor in _FACTORS[name])
    products = left.shape[0] if left.dim() == 3 else 1
    return Product(left.shape[-2], right.shape[-1], left.shape[-1], products)


def shape_of(kind: KernelKind, name: str, call: Mapping[str, Any], written: Tensor) -> Product:
    """What decides how well a kernel without a product uses a device; its other sizes are 0."""
    first = next(iter(call.values()), None)
    first = first if isinstance(first, Tensor) else written
    if not first.dim():
        return _SHAPELESS
    if kind is KernelKind.BATCH_NORM:
        channels = first.shape[1]
        return replace(_SHAPELESS, columns=channels, depth=first.numel() // max(channels, 1))
    if kind is KernelKind.LAYER_NORM:
        width = first.shape[1 if "group" in name else -1]
        return replace(_SHAPELESS, columns=width, depth=width)
    if kind is KernelKind.SOFTMAX:
        axis = -1 if call.get("dim") is None else call["dim"]
        return replace(_SHAPELESS, columns=first.shape[axis], depth=first.shape[axis])
    if kind is KernelKind.REDUCTION:
        kept = max(written.numel(), 1)
        return replace(_SHAPELESS, columns=kept, depth=max(first.numel() // kept, 1))
    if kind is KernelKind.POOLING and "adaptive" not in name:
        sizes = call.get("kernel_size", ())
        return replace(_SHAPELESS, window=max(math.prod(sizes), 1))
    return _SHAPELESS


@cache
def kind_of(func: Any) -> KernelKind | None:
    """The kernel of an operator; None if it runs none, as for views.

    Elementwise operators are ELEMENTWISE here, whatever the layout of their tensors.
    """
    name = name_of(func)
    if name == "contiguous":
        return KernelKind.COPY
    if func.is_view or name in _NONE or name.startswith(("empty", "sym_", "_assert")):
        return None
    kind = _KIND_OF.get(name)
    if kind is not None:
        return kind
    if torch.Tag.pointwise in func.tags:
        return KernelKind.ELEMENTWISE
    for part, kind in _KIND_BY_WORD.items():
        if part in name:
            return kind
    return KernelKind.OTHER


def name_of(func: Any) -> str:
    """`add` for `aten::add_.Tensor`."""
    return str(func._schema.name).removeprefix("aten::").rstrip("_")


_NOTHING = (
    "new_empty new_empty_strided detach set resize _unsafe_view lift_fresh _local_scalar_dense "
    "scalar_tensor as_strided is_same_size _reshape_alias equal item"
)
_NONE = frozenset(_NOTHING.split())

_NAMES: dict[KernelKind, str] = {
    KernelKind.LINEAR: "mm addmm mv addmv",
    KernelKind.MATMUL: "bmm baddbmm dot",
    KernelKind.BATCH_NORM: "native_batch_norm native_batch_norm_backward",
    KernelKind.LAYER_NORM: "native_layer_norm native_layer_norm_backward native_group_norm "
    "native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward",
    KernelKind.CAST: "_to_copy",
    KernelKind.COPY: "clone copy cat stack roll flip repeat constant_pad_nd slice_backward "
    "select_backward as_strided_scatter slice_scatter select_scatter unfold_backward im2col "
    "col2im pixel_shuffle pixel_unshuffle tril triu channel_shuffle diagonal_backward",
    KernelKind.REDUCTION: "sum mean var std var_mean amax amin max min argmax argmin norm prod "
    "linalg_vector_norm cumsum logsumexp all any topk sort nll_loss_forward",
    KernelKind.ELEMENTWISE: "native_dropout native_dropout_backward where masked_fill bernoulli "
    "nll_loss_backward lerp _prelu_kernel_backward hardswish hardswish_backward "
    "hardsigmoid_backward leaky_relu_backward",
    KernelKind.INDEX: "index index_put index_add index_select gather scatter scatter_add embedding "
    "embedding_dense_backward masked_select",
    KernelKind.FILL: "zeros ones full fill zero new_zeros new_ones new_full zeros_like ones_like "
    "full_like arange linspace rand randn rand_like randn_like normal uniform eye",
}
_KIND_OF = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_KIND_BY_WORD = {
    "batch_norm": KernelKind.BATCH_NORM,
    "softmax": KernelKind.SOFTMAX,
    "pool": KernelKind.POOLING,
    "pad": KernelKind.COPY,
    "upsample": KernelKind.INDEX,
    "grid_sampler": KernelKind.INDEX,
    "index": KernelKind.INDEX,
}
