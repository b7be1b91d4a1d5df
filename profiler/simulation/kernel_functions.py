"""How a GPU runs the functions that the meta device would take apart, or run in other types.

Attention is one kernel or several, as the software stack has it; an LSTM is cuDNN's few products
and not one operator for each time step; autocast casts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trappm.profiler.simulation.autocast import Autocast

OnAttention = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], None]
"""Called with query, key, value, mask and output of each fused attention, forward and backward."""


class KernelFunctions(TorchFunctionMode):
    """Within, functions of tensors on the meta device run as on a GPU."""

    def __init__(
        self, on_attention: OnAttention, half: torch.dtype | None, fused_attention: bool
    ) -> None:
        super().__init__()
        self._on_attention = on_attention
        self._autocast = None if half is None else Autocast(half)
        self._fused = fused_attention

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._autocast is not None:
            args, kwargs = self._autocast.arguments(name, args, kwargs)
        if name == "scaled_dot_product_attention":
            return self._attention(*args, **kwargs)
        if name == "lstm" and len(args) > 5:
            with self:
                return _lstm(*args, **kwargs)
        if name == "dropout":
            return _dropout(*args, **kwargs)
        if name == "softmax" and args[0].dtype != (kwargs.get("dtype") or args[0].dtype):
            # The meta device would cast first, a GPU casts on the way.
            return torch._softmax(
                args[0], kwargs.get("dim", args[1] if len(args) > 1 else -1), True
            )
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        if self._fused and query.dim() == 4:
            output = _FusedAttention.apply(self._on_attention, query, key, value, attn_mask)  # type: ignore[no-untyped-call]
            return cast(Tensor, output)
        with self:
            scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
            if attn_mask is not None:
                scores = scores + attn_mask
            return F.dropout(scores.softmax(dim=-1), dropout_p) @ value


class _FusedAttention(torch.autograd.Function):
    """One kernel forward and one backward."""

    @staticmethod
    def forward(
        ctx: Any,
        tell: OnAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        batch, heads, length, _ = query.shape
        # Laid out so that joining the heads again copies nothing.
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        ctx.tell = tell
        ctx.save_for_backward(query, key, value, mask, output)
        tell(query, key, value, mask, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, output = ctx.saved_tensors
        ctx.tell(query, key, value, mask, output)
        mask_gradient = None
        if mask is not None and ctx.needs_input_grad[4]:
            full = query.new_empty(*query.shape[:3], key.shape[-2])
            mask_gradient = full.sum_to_size(mask.shape)
        return (None, *(torch.empty_like(t) for t in (query, key, value)), mask_gradient)


def _dropout(
    input: Tensor,  # noqa: A002  (as in torch)
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if not training or p == 0.0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _lstm(
    input: Tensor,  # noqa: A002  (as in torch)
    state: tuple[Tensor, Tensor],
    weights: Sequence[Tensor],
    bias: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Both products of each layer and direction for all time steps at once, and the gates."""
    directions = 2 if bidirectional else 1
    per_direction = 4 if bias else 2
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            at = (layer * directions + direction) * per_direction
            gates = F.linear(input, weights[at])
            width = gates.shape[-1] // 4
            gates = gates + F.linear(gates[..., :width], weights[at + 1])
            outputs.append(gates[..., :width].sigmoid() * gates[..., width : 2 * width].tanh())
        input = torch.cat(outputs, dim=-1)  # noqa: A001
    return input, state[0], state[1]
