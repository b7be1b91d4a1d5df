"""How a GPU runs the functions that the meta device would take apart, or run in other types.

Attention is one fused kernel on a GPU and a product of matrices on the meta device; dropout is one
kernel and not three; a recurrent layer is cuDNN's products and not one operator for each time step;
autocast casts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from trappm.profiler.tracing.autocast import Autocast
from trappm.profiler.tracing.kernel_log import HALVES, KernelLog
from trappm.profiler.tracing.recurrent import recurrent

_CONSTRUCTORS = frozenset(_device_constructors())


def _unchecked(function: Any) -> Any:
    """A function of PyTorch written in Python without its first lines, which ask for modes."""
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    never = dict.fromkeys(checks, lambda *_: False)
    body = FunctionType(
        function.__code__,
        {**function.__globals__, **never},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body


_BODIES = {
    function: _unchecked(function)
    for function in (
        F.multi_head_attention_forward,
        Tensor.backward,  # these run what a checkpoint computes again
        torch.autograd.backward,
        torch.autograd.grad,
    )
}
"""Functions within which others are replaced; PyTorch runs them with all modes switched off."""


class GpuFunctions(TorchFunctionMode):
    """Within, functions of tensors on the meta device run as on a GPU, and make tensors there.

    A mode holds for its own thread only.

    Args:
        kernels: told of the kernels that no operator stands for.
        half: the type that autocast casts to; None without autocast.
        fused_attention: whether the software stack has a kernel for attention.
    """

    def __init__(
        self, kernels: KernelLog, half: torch.dtype | None = None, fused_attention: bool = True
    ) -> None:
        super().__init__()
        self._kernels = kernels
        self._fused = fused_attention
        self._autocast = None if half is None else Autocast(half)

    def end_forward(self) -> None:
        """Autocast ends: what it cast the weights to is no longer its own."""
        if self._autocast is not None:
            self._autocast.forget()

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CONSTRUCTORS and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        name = getattr(func, "__name__", "")
        if self._autocast is not None:
            args, kwargs = self._autocast.arguments(name, args, kwargs)
        # In inference mode operators reach the recorder whole.
        if torch.is_inference_mode_enabled():
            return func(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            output = self.attention(*args, **kwargs)
            return func(*args, **kwargs) if output is NotImplemented else output
        if name == "linear":
            output = linear(*args, **kwargs)
            return func(*args, **kwargs) if output is NotImplemented else output
        if name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and len(args) == 9:
            return recurrent(self._kernels, name, *args)
        if name == "dropout":
            return _dropout(*args, **kwargs)
        if name == "softmax" and args[0].dtype != (kwargs.get("dtype") or args[0].dtype):
            # The meta device would cast first, a GPU casts on the way.
            return torch._softmax(
                args[0], kwargs.get("dim", args[1] if len(args) > 1 else -1), True
            )
        if func in _BODIES:
            with self:
                return _BODIES[func](*args, **kwargs)
        return func(*args, **kwargs)

    def attention(
        self,
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
        if not self._fused:  # as models wrote it before there was a kernel
            if grouped:
                key, value = (_repeated(t, query.shape[-3]) for t in (key, value))
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
                self._kernels, flash, is_causal, query, key, value, attn_mask
            )
            return cast(Tensor, output)
        return NotImplemented


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values of groups of heads, for every head."""
    return tensor.repeat_interleave(heads // tensor.shape[-3], -3)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A product of tokens that do not lie next to each other (aten/src/ATen/native/Linear.cpp).

    They are copied into one matrix, as the weights want a gradient, and the bias is added in place;
    neither happens while a dispatch mode is watching. NotImplemented for all other products.
    """
    if x.dim() < 3 or (bias is not None and x.is_contiguous()) or not weight.requires_grad:
        return NotImplemented
    product = x.reshape(-1, x.shape[-1]) @ weight.t()
    product = torch.ops.aten._unsafe_view(product, (*x.shape[:-1], weight.shape[0]))
    return product if bias is None else product.add_(bias)


def _runs_flash(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Flash attention comes first, but takes 16 bits and no mask (sdp_utils.cpp)."""
    widest = max(query.shape[-1], value.shape[-1])
    return query.dim() == 4 and query.dtype in HALVES and mask is None and widest <= 256


def _fits_efficient(query: Tensor, value: Tensor) -> bool:
    """The memory-efficient kernel takes widths in steps of 16 bytes (sdp_utils.cpp)."""
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
        ctx.kernels.attention(query, key, value, mask, output, ctx.causal, backward=True)
        batch, heads, length, width = query.shape
        passing = [query.new_empty((batch, heads, length), dtype=torch.float32)]
        if ctx.flash:  # the queries' gradient is summed in 32 bits (flash_api.cpp, mha_bwd)
            rounded = (batch, heads, -(-length // 128) * 128, -(-width // 32) * 32)
            passing.append(query.new_empty(rounded, dtype=torch.float32))
        gradients = [torch.empty_like(t) for t in (query, key, value)]
        mask_gradient = None
        if mask is not None and ctx.needs_input_grad[6]:
            full = query.new_empty(*query.shape[:3], key.shape[-2])
            mask_gradient = full.sum_to_size(mask.shape)
        del passing
        return (None, None, None, *gradients, mask_gradient)


def _dropout(
    input: Tensor,  # noqa: A002  (as in torch)
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if not training or p == 0.0 or inplace or not input.is_meta:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]
