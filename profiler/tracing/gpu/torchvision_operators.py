"""Operators of torchvision on the meta device, as its CUDA kernels allocate.

Their backward passes and autocast are in torchvision's C++ part, which may not be installed, and
which does not know the meta device for all of them. So both are here (torchvision/csrc/ops).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.tracing.tensors import HALVES


def has_operators() -> Mapping[Any, Mapping[str, Any]]:
    """Return what lets torchvision call its operators, if it is imported."""
    extension = sys.modules.get("torchvision.extension")
    return {} if extension is None else {extension: {"_has_ops": lambda: True}}


def name_of(func: object) -> str:
    """Return `nms` for `torch.ops.torchvision.nms`, and an empty text for other functions."""
    name = getattr(func, "_qualified_op_name", "")
    return name.removeprefix("torchvision::") if name.startswith("torchvision::") else ""


def call(name: str, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator with gradients, and under autocast in 32 bits."""
    if name not in FUNCTIONS:
        return operator(*args, **kwargs)
    first, kind = args[0], args[0].dtype
    if torch.is_autocast_enabled("cuda"):
        args = [t.float() if isinstance(t, Tensor) and t.dtype in HALVES else t for t in args]
    results = FUNCTIONS[name].apply(operator, *args, **kwargs)
    if kind == args[0].dtype:
        return results
    if isinstance(results, Tensor):
        return results.to(first.dtype)
    return results[0].to(first.dtype), *results[1:]


class _Pooled(torch.autograd.Function):
    """Pools regions of images: results, and places of theirs for the backward pass."""

    @staticmethod
    def forward(ctx: Any, operator: Any, images: Tensor, regions: Tensor, *sizes: Any) -> Any:
        results = operator(images, regions, *sizes)
        places = () if isinstance(results, Tensor) else results[1:]
        ctx.mark_non_differentiable(*places)
        ctx.save_for_backward(regions, *places)
        ctx.name, ctx.sizes, ctx.shape = name_of(operator), sizes, images.shape
        return results

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        operator = getattr(torch.ops.torchvision, f"_{ctx.name}_backward")
        regions, *places = ctx.saved_tensors
        sizes = [*ctx.sizes, *ctx.shape]
        if ctx.name == "roi_align":
            sizes = [*ctx.sizes[:3], *ctx.shape, *ctx.sizes[3:]]
        of_images = operator(gradient, regions, *places, *sizes)
        return None, of_images, None, *(None for _ in ctx.sizes)


class _DeformConv(torch.autograd.Function):
    """Convolution of images, weight, offsets, mask and bias."""

    @staticmethod
    def forward(ctx: Any, operator: Any, *args: Any) -> Any:
        ctx.save_for_backward(*args[:5])
        ctx.sizes = args[5:]
        return operator(*args)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        operator = torch.ops.torchvision._deform_conv2d_backward
        gradients = operator(gradient, *ctx.saved_tensors, *ctx.sizes)
        return None, *gradients, *(None for _ in ctx.sizes)


class _NoGradient(torch.autograd.Function):
    """Non-maximum suppression, whose result is whole numbers."""

    @staticmethod
    def forward(ctx: Any, operator: Any, *args: Any) -> Any:
        results = operator(*args)
        ctx.mark_non_differentiable(results)
        return results


POOLING = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool")
FUNCTIONS: Mapping[str, Any] = {
    **dict.fromkeys(POOLING, _Pooled),
    "deform_conv2d": _DeformConv,
    "nms": _NoGradient,
}
"""Functions with gradients by operators."""


def result(name: str, args: Sequence[Any], kept: int | None) -> Any:
    """Return the result of an operator; what it allocates are operators of their own.

    Args:
        name: Name of the operator in `torch.ops.torchvision`.
        args: All of its arguments.
        kept: Boxes that `nms` keeps, or None if that is unknown: all of them.

    Raises:
        UnsupportedModelError: There is no rule for it.
    """
    if name == "nms":
        return _nms(args[0], args[1], kept)
    rule = _RULES.get(name)
    if rule is None:
        known = ", ".join(FUNCTIONS)
        raise UnsupportedModelError(
            f"torchvision's operator {name} cannot be traced; those that can are {known}"
        )
    return rule(*args)


def _nms(boxes: Tensor, scores: Tensor, kept: int | None) -> Tensor:
    """Sort the boxes, and compare all pairs of them: one bit for each (nms_kernel.cu)."""
    count = len(boxes)
    _sorted = boxes[scores.sort(descending=True)[1]]
    _pairs = boxes.new_empty(count * -(-count // 64), dtype=torch.long)
    return boxes.new_empty(count if kept is None else kept, dtype=torch.long)


def _pool(images: Tensor, regions: Tensor, _: float, height: int, width: int, *__: Any) -> Tensor:
    _copies = images.contiguous(), regions.contiguous()
    return images.new_zeros(len(regions), images.shape[1], height, width)


def _pool_with_places(*args: Any) -> tuple[Tensor, Tensor]:
    pooled = _pool(*args)
    return pooled, torch.zeros_like(pooled, dtype=torch.int32)


def _pool_by_place(
    images: Tensor, regions: Tensor, scale: float, height: int, width: int, *_: Any
) -> tuple[Tensor, Tensor]:
    """Pool channels of their own for each place of the result."""
    _copies = images.contiguous(), regions.contiguous()
    channels = images.shape[1] // (height * width)
    pooled = images.new_zeros(len(regions), channels, height, width)
    return pooled, torch.zeros_like(pooled, dtype=torch.int32)


def _deform_conv2d(
    images: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor, *sizes: Any
) -> Tensor:
    images, _offset, _mask = images.contiguous(), offset.contiguous(), mask.contiguous()
    output = images.new_zeros(len(images), len(weight), *offset.shape[2:])
    columns = _columns(images, weight, offset, sizes)
    output.copy_(_products(_by_group(weight, sizes), columns).view(output.shape))
    return output + bias.view(1, -1, 1, 1)


def _deform_conv2d_backward(
    gradient: Tensor,
    images: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor,
    bias: Tensor,
    *sizes: Any,
) -> tuple[Tensor, ...]:
    images, gradient = images.contiguous(), gradient.contiguous()
    of_inputs = _gradients_of_inputs(gradient, images, weight, offset, mask, sizes)
    by_channel = _by_group(gradient.transpose(0, 1).contiguous(), sizes)
    columns = _columns(images, weight, offset, sizes)
    of_weight = _products(by_channel, columns.transpose(1, 2)).view(weight.shape)
    of_images, of_offset, of_mask = of_inputs
    return of_images, of_weight, of_offset, of_mask, gradient.sum((0, 2, 3))


def _gradients_of_inputs(
    gradient: Tensor,
    images: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    of_offset, of_mask = torch.zeros_like(offset), torch.zeros_like(mask)
    by_channel = _by_group(gradient.transpose(0, 1).contiguous(), sizes)
    columns = _products(_by_group(weight, sizes).transpose(1, 2), by_channel)
    columns = columns.view(len(images), -1, gradient.shape[2:].numel())
    window = _window(weight, sizes)
    return torch.ops.aten.col2im(columns, images.shape[2:], *window), of_offset, of_mask


def _window(weight: Tensor, sizes: Sequence[int]) -> tuple[Sequence[int], ...]:
    """Return size, dilation, padding and stride of the kernel."""
    return weight.shape[2:], sizes[4:6], sizes[2:4], sizes[0:2]


def _columns(images: Tensor, weight: Tensor, offset: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the pixels under the kernel at each place, by groups of channels.

    PyTorch does so for up to 32 images at once; here they are all of them.
    """
    columns: Tensor = torch.ops.aten.im2col(images, *_window(weight, sizes))
    places = offset.shape[2:].numel()
    if columns.shape[2] != places:
        raise ValueError(
            f"deform_conv2d has offsets of {tuple(offset.shape[2:])} places, and a result of "
            f"{columns.shape[2]}"
        )
    return columns.view(sizes[6], -1, len(images) * places)


def _by_group(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    return tensor.reshape(sizes[6], len(tensor) // sizes[6], -1)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices of each group; a single one is a product with a weight."""
    return left[0] @ right[0] if len(left) == 1 else left @ right


_RULES: Mapping[str, Callable[..., Any]] = {
    "roi_align": _pool,
    "_roi_align_backward": lambda gradient, *args: gradient.new_zeros(args[4:8]),
    "roi_pool": _pool_with_places,
    "ps_roi_align": _pool_by_place,
    "ps_roi_pool": _pool_by_place,
    **dict.fromkeys(
        ("_roi_pool_backward", "_ps_roi_align_backward", "_ps_roi_pool_backward"),
        lambda gradient, *args: gradient.new_zeros(args[-4:]),
    ),
    "deform_conv2d": _deform_conv2d,
    "_deform_conv2d_backward": _deform_conv2d_backward,
}
"""Results by operators; their last arguments are sizes."""
