"""FlexAttention on the meta device, as its fused kernel allocates on a GPU.

`flex_attention` refuses the meta device, and compiles itself by dynamo. While a step is traced,
its calls become two operators: the kernels that inductor makes of it (torch/_inductor/kernel/flex).
They keep queries, keys, values, the output and a log-sum-exp of each row, but no matrix of scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import _disable_current_modes

from trappm.profiler.errors import InputError

FLEX_ATTENTION: Any = flex.flex_attention
_original = FunctionType(
    FLEX_ATTENTION.__code__,
    FLEX_ATTENTION.__globals__,
    FLEX_ATTENTION.__name__,
    FLEX_ATTENTION.__defaults__,
)
_original.__kwdefaults__ = FLEX_ATTENTION.__kwdefaults__


def _overridable(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Ask the function modes of this thread; its globals are those of PyTorch's module."""
    from importlib import import_module

    ours = import_module("trappm.profiler.tracing.gpu.flex_attention")
    return ours.ask_modes(query, key, value, *args, **kwargs)


OVERRIDABLE = {FLEX_ATTENTION: {"__code__": _overridable.__code__}}
"""Attributes by which `flex_attention` can be overridden, also where it was imported by its name.

Like functions of `torch.nn.functional`, it then asks the modes of its thread.
"""


def ask_modes(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `flex_attention` as a function that modes can override."""
    tensors = query, key, value
    if has_torch_function(tensors):
        return handle_torch_function(FLEX_ATTENTION, tensors, *tensors, *args, **kwargs)
    return _original(*tensors, *args, **kwargs)


_LIBRARY = torch.library.Library("trappm", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "flex_attention(Tensor query, Tensor key, Tensor value, int keys) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "flex_attention_backward(Tensor query, Tensor key, Tensor value, int keys, Tensor grad, "
    "Tensor output, Tensor logsumexp, Tensor delta) -> (Tensor, Tensor, Tensor)"
)


def _forward(query: Tensor, key: Tensor, value: Tensor, keys: int) -> tuple[Tensor, ...]:
    """Return the output in the queries' layout, and the statistics of all rows of scores."""
    output = torch.empty_like(query)
    if value.shape[-1] != query.shape[-1]:
        order = sorted(range(4), key=query.stride, reverse=True)
        shape = [(*query.shape[:-1], value.shape[-1])[axis] for axis in order]
        output = query.new_empty(shape).permute([order.index(axis) for axis in range(4)])
    statistics = [query.new_empty(query.shape[:-1], dtype=torch.float32) for _ in range(2)]
    return output, *statistics


def _backward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _on_values(query: Tensor, key: Tensor, value: Tensor, keys: int) -> tuple[Tensor, ...]:
    """Return attention without its mask, for steps whose later operators depend on values."""
    output = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    statistics = query.new_zeros(query.shape[:-1], dtype=torch.float32)
    return output, statistics, statistics.clone()


for _name, _kernel, _device in (
    ("flex_attention", _forward, "Meta"),
    ("flex_attention", _on_values, "CPU"),
    ("flex_attention_backward", _backward, "Meta"),
):
    _LIBRARY.impl(_name, _kernel, _device)  # type: ignore[no-untyped-call]


class _FlexAttention(torch.autograd.Function):
    """Saves what PyTorch's does, apart from the small tensors of the block mask."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, keys: int, score: Tensor | None
    ) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = torch.ops.trappm.flex_attention(query, key, value, keys)
        output, logsumexp, largest = results
        ctx.keys, ctx.score = keys, score
        ctx.mark_non_differentiable(largest)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        return results

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(output)
        delta = torch.empty_like(logsumexp)  # sums of output times gradient
        gradients = torch.ops.trappm.flex_attention_backward(
            query, key, value, ctx.keys, grad, output, logsumexp, delta
        )
        of_score = None if ctx.score is None else torch.empty_like(ctx.score)
        return *gradients, None, of_score


def flex_attention(
    known: Callable[[Tensor], Tensor | None],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Return the result of `torch.nn.attention.flex_attention.flex_attention` on the meta device.

    Args:
        known: Returns the values of a tensor on the meta device, or None if they are unknown.
        query, key, value: Tensors (batch, heads, length, width).
        score_mod, block_mask: Its gradients and the share of its blocks are considered.
        scale, kernel_options: Without influence on sizes.
        enable_gqa, return_lse, return_aux: As in PyTorch.

    Raises:
        InputError: PyTorch refuses such shapes.
    """
    _check(query, key, value, block_mask, enable_gqa)
    keys = _keys(block_mask, key.shape[-2], known)
    score = None
    if score_mod is not None and torch.is_grad_enabled():
        score = _score(score_mod, query)
    results = _FlexAttention.apply(query, key, value, keys, score)  # type: ignore[no-untyped-call]
    output, logsumexp, largest = results
    wants_sum = return_aux.lse if return_aux is not None else return_lse
    natural = logsumexp * math.log(2) if wants_sum else None  # kernels count in powers of two
    if return_aux is not None:
        largest = largest * math.log(2) if return_aux.max_scores else None
        return output, flex.AuxOutput(lse=natural, max_scores=largest)
    return (output, natural) if return_lse else output


def _check(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, grouped: bool) -> None:
    shapes = " and ".join(str(tuple(t.shape)) for t in (query, key, value))
    if not query.dim() == key.dim() == value.dim() == 4:
        raise InputError(f"flex_attention takes four axes, and has {shapes}")
    heads, key_heads = query.shape[1], key.shape[1]
    if heads % key_heads or (heads != key_heads and not grouped) or query.shape[3] != key.shape[3]:
        raise InputError(
            f"flex_attention cannot multiply {shapes}; give keys of the queries' width and heads, "
            "or enable_gqa=True for several query heads per key head"
        )
    lengths = (query.shape[2], key.shape[2])
    # A slice of a mask, or none at all, has blocks beyond any length.
    is_whole = block_mask is not None and max(block_mask.BLOCK_SIZE) < 1 << 30
    if is_whole and tuple(block_mask.shape[-2:]) != lengths:
        raise InputError(
            f"flex_attention has {lengths[0]} queries and {lengths[1]} keys, but its block mask is "
            f"of {tuple(block_mask.shape[-2:])}; create one of these lengths"
        )


def _keys(block_mask: Any, length: int, known: Callable[[Tensor], Tensor | None]) -> int:
    """Return the mean number of keys per query whose blocks the kernel computes.

    Those of the first sample, as the number must be the same at every batch size; all of them if
    the mask depends on unknown values.
    """
    if block_mask is None:
        return length
    blocks: float = 0
    with _disable_current_modes():
        for counts in (block_mask.kv_num_blocks, block_mask.full_kv_num_blocks):
            if counts is not None:
                values = known(counts) if counts.is_meta else counts
                if values is None:
                    return length
                blocks += values[0].double().mean().item()
    width: int = block_mask.BLOCK_SIZE[1]
    return min(length, math.ceil(blocks * width))


def _score(score_mod: Callable[..., Tensor], query: Tensor) -> Tensor | None:
    """Return one modified score if a captured tensor wants a gradient of it, such as a bias.

    Its backward pass allocates the gradient of the whole tensor, as the kernel does.
    """
    with _disable_current_modes():  # a part of the kernel, not operators of their own
        places = [query.new_zeros(1, dtype=torch.int32) for _ in range(4)]
        score = score_mod(query.detach().new_zeros(1), *places)
    return score if score.requires_grad else None
