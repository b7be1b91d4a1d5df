"""Attention as a GPU runs it: one fused kernel, where PyTorch has one for it."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trappm.profiler.tracing.kernel_log import KernelLog
from trappm.profiler.tracing.tensors import HALVES


def attention(
    kernels: KernelLog,
    fused: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention`, by the kernel that PyTorch chooses on a GPU.

    NotImplemented where it chooses none and computes it of parts.
    """
    grouped = query.dim() == 4 and key.shape[-3] != query.shape[-3]
    if not fused:  # as models wrote it before there was a kernel
        if grouped:
            key, value = (_repeat_heads(t, query.shape[-3]) for t in (key, value))
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        scores = (query * factor) @ key.transpose(-2, -1)
        if is_causal:
            attn_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        return F.dropout(scores.softmax(dim=-1), dropout_p) @ value
    flash = _runs_flash(query, value, attn_mask)
    # Only flash attention shares keys among groups of heads; else they are repeated.
    if query.is_meta and (flash or (_fits_efficient(query, value) and not grouped)):
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            # The kernels add masks (convert_boolean_attn_mask in attention.cpp).
            hidden = torch.full((), float("-inf"), dtype=query.dtype, device=query.device)
            attn_mask = torch.where(attn_mask, 0.0, hidden)
        output = _FusedAttention.apply(  # type: ignore[no-untyped-call]
            kernels, flash, is_causal, query, key, value, attn_mask
        )
        return cast(Tensor, output)
    return NotImplemented


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values of groups of heads, for every head."""
    return tensor.repeat_interleave(heads // tensor.shape[-3], -3)


def _runs_flash(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Flash attention comes first, but takes 16 bits and no mask (sdp_utils.cpp)."""
    widest = max(query.shape[-1], value.shape[-1])
    return query.dim() == 4 and query.dtype in HALVES and mask is None and widest <= 256


def _fits_efficient(query: Tensor, value: Tensor) -> bool:
    """Check that widths are multiples of 16 bytes, as the kernel needs (sdp_utils.cpp)."""
    step = 16 // query.element_size()
    return query.dim() == 4 and query.shape[-1] % step == 0 and value.shape[-1] % step == 0


class _FusedAttention(torch.autograd.Function):
    """Allocates what the kernels do: output and log-sum-exp, then gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: KernelLog,
        flash: bool,
        causal: bool,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        batch, heads, length, _ = query.shape
        if flash and value.shape[-1] == query.shape[-1]:  # as the queries (flash_api.cpp, mha_fwd)
            output = torch.empty_like(query)
        else:  # so that joining the heads again copies nothing (attention.cu)
            output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        kernels.attention(query, key, value, mask, output, causal)
        if torch.is_inference_mode_enabled():
            return output
        padded = length if flash else (length + 31) // 32 * 32
        log_sum_exp = query.new_empty((batch, heads, padded), dtype=torch.float32)
        ctx.kernels, ctx.flash, ctx.causal = kernels, flash, causal
        ctx.save_for_backward(query, key, value, mask, output, log_sum_exp)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, output, _ = ctx.saved_tensors
        batch, heads, length, width = query.shape
        passing = [query.new_empty((batch, heads, length), dtype=torch.float32)]
        if ctx.flash:  # the queries' gradient is summed in 32 bits (flash_api.cpp, mha_bwd)
            rounded = (batch, heads, -(-length // 128) * 128, -(-width // 32) * 32)
            passing.append(query.new_empty(rounded, dtype=torch.float32))
        gradients = [torch.empty_like(t) for t in (query, key, value)]
        ctx.kernels.attention(query, key, value, mask, output, ctx.causal, gradients)
        mask_gradient = None
        if mask is not None and ctx.needs_input_grad[6]:
            full = query.new_empty(*query.shape[:3], key.shape[-2])
            mask_gradient = full.sum_to_size(mask.shape)
        del passing
        return (None, None, None, *gradients, mask_gradient)
