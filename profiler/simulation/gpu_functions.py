"""How a GPU runs the functions for which the meta device would allocate something else, or slowly.

Attention is one fused kernel on a GPU and a product of matrices on the meta device; dropout is one
kernel and not three. Normalisations and a few more allocate the same on both, but PyTorch finds
their shapes through Python decompositions that take milliseconds a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ATEN = torch.ops.aten


class GpuFunctions(TorchFunctionMode):
    """Within, attention and dropout of tensors on the meta device run as on a GPU.

    A mode holds for its own thread only.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None:
            return replacement(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    # The kernels take (batch, heads, length, width) in steps of 16 bytes.
    fused = query.dim() == 4 and query.shape[-1] % 4 == 0 and value.shape[-1] % 4 == 0
    if not (fused and query.is_meta):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
    return cast(Tensor, _FusedAttention.apply(query, key, value, attn_mask))  # type: ignore[no-untyped-call]


class _FusedAttention(torch.autograd.Function):
    """Allocates what the memory-efficient kernel does: output and log-sum-exp, then gradients."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, length, _ = query.shape
        # Laid out so that joining the heads again copies nothing.
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        padded = (length + 31) // 32 * 32
        log_sum_exp = query.new_empty((batch, heads, padded), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, log_sum_exp)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, output, _ = ctx.saved_tensors
        delta = query.new_empty(output.shape[:3], dtype=torch.float32)
        gradients = [torch.empty_like(t) for t in (query, key, value)]
        mask_gradient = None
        if mask is not None and ctx.needs_input_grad[3]:
            full = query.new_empty(*query.shape[:3], key.shape[-2])
            mask_gradient = full.sum_to_size(mask.shape)
        del delta
        return (*gradients, mask_gradient)


def _dropout(
    input: Tensor,  # noqa: A002  (as in torch)
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if not training or p == 0.0 or inplace or not input.is_meta:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


_REPLACEMENTS: Mapping[Any, Callable[..., Tensor]] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
}


def _new(like: Tensor, *shape: Any) -> Tensor:
    return torch.empty(*shape, dtype=like.dtype, device=like.device)


def _like(tensor: Tensor) -> Tensor:
    """As `torch.empty_like`, which is slow on the meta device."""
    if tensor.is_contiguous():
        return _new(tensor, tensor.shape)
    return torch.empty_like(tensor)


def _batch_norm(
    images: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *_: Any
) -> Sequence[Tensor]:
    channels = images.shape[1] if training else 0
    return _like(images), _new(images, channels), _new(images, channels)


def _batch_norm_backward(
    gradient: Tensor, images: Tensor, *args: Any, output_mask: Sequence[bool] = ()
) -> Sequence[Tensor | None]:
    wanted = output_mask or args[-1]
    channels = images.shape[1]
    return (
        _like(images) if wanted[0] else None,
        _new(images, channels) if wanted[1] else None,
        _new(images, channels) if wanted[2] else None,
    )


def _layer_norm(
    tokens: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> Sequence[Tensor]:
    statistics = (*tokens.shape[: -len(shape)], *(1 for _ in shape))
    output = _like(tokens.contiguous())
    return output, _new(tokens, statistics), _new(tokens, statistics)


def _layer_norm_backward(
    gradient: Tensor,
    tokens: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    deviation: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: Sequence[bool],
) -> Sequence[Tensor | None]:
    copies = gradient.contiguous(), tokens.contiguous()
    return (
        _like(copies[1]) if wanted[0] else None,
        _new(tokens, shape) if wanted[1] and weight is not None else None,
        _new(tokens, shape) if wanted[2] and bias is not None else None,
    )


def _like_the_input(gradient: Tensor, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return _like(tensor)


def _like_itself(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return _like(tensor)


def _binary(left: Tensor, right: Any, **_: Any) -> Any:
    """The usual case: the right side is like the left, or broadcast to it."""
    if not isinstance(right, Tensor):
        return _like(left) if left.is_floating_point() else NotImplemented
    fits = right.dim() <= left.dim() and all(
        have in (1, want) for have, want in zip(right.shape[::-1], left.shape[::-1], strict=False)
    )
    return _like(left) if fits and left.dtype == right.dtype else NotImplemented


def _linear(bias: Tensor, left: Tensor, right: Tensor, **_: Any) -> Tensor:
    return _new(left, left.shape[0], right.shape[1])


ALLOCATIONS: Mapping[Any, Callable[..., Any]] = {
    _ATEN.native_batch_norm.default: _batch_norm,
    _ATEN.native_batch_norm_backward.default: _batch_norm_backward,
    _ATEN.native_layer_norm.default: _layer_norm,
    _ATEN.native_layer_norm_backward.default: _layer_norm_backward,
    _ATEN.gelu.default: _like_itself,
    _ATEN.gelu_backward.default: _like_the_input,
    _ATEN.threshold_backward.default: _like_the_input,
    _ATEN.sigmoid_backward.default: _like_the_input,
    _ATEN.add.Tensor: _binary,
    _ATEN.mul.Tensor: _binary,
    _ATEN.div.Scalar: _binary,
    _ATEN.mul.Scalar: _binary,
    _ATEN.addmm.default: _linear,
}
"""What an operator of PyTorch allocates on a GPU, results and copies; called in its place. One that
does not know returns NotImplemented."""
