"""Normalisations, which allocate something else on a GPU than on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten


@cache
def _arguments(func: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((a.name, a.default_value) for a in func._schema.arguments)


def bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one call by their names in the operator's schema, defaults filled in."""
    names = _arguments(func)
    values = {name: args[place] for place, (name, _) in enumerate(names[: len(args)])}
    for name, default in names[len(args) :]:
        values[name] = kwargs.get(name, default)
    return values


def new(like: Tensor, *shape: Any) -> Tensor:
    """A contiguous tensor of this shape, and of the type and device of another."""
    return torch.empty(*shape, dtype=like.dtype, device=like.device)


def like(tensor: Tensor) -> Tensor:
    """As `torch.empty_like`, which is slow on the meta device."""
    if tensor.is_contiguous():
        return new(tensor, tensor.shape)
    return torch.empty_like(tensor)


def _batch_norm(call: Mapping[str, Any]) -> Sequence[Tensor]:
    images = call["input"]
    # Statistics are fp32 whatever the images are (batch_norm_cuda in Normalization.cu).
    statistics = call["weight"] if call["weight"] is not None else images
    channels = images.shape[1] if call["training"] else 0
    return like(images), new(statistics, channels), new(statistics, channels)


def _batch_norm_backward(call: Mapping[str, Any]) -> Sequence[Tensor | None]:
    images, wanted = call["input"], call["output_mask"]
    of_weights = call["weight"] if call["weight"] is not None else images
    channels = images.shape[1]
    return (
        like(images) if wanted[0] else None,
        new(of_weights, channels) if wanted[1] else None,
        new(of_weights, channels) if wanted[2] else None,
    )


def _layer_norm(call: Mapping[str, Any]) -> Sequence[Tensor]:
    tokens, shape = call["input"], call["normalized_shape"]
    statistics = (*tokens.shape[: -len(shape)], *(1 for _ in shape))
    normalised = like(tokens.contiguous())
    # Mean and deviation are fp32 whatever the tokens are (layer_norm_kernel.cu).
    kind = torch.float32 if tokens.dtype in _HALVES else tokens.dtype
    means = [torch.empty(statistics, dtype=kind, device=tokens.device) for _ in range(2)]
    return normalised, *means


def _layer_norm_backward(call: Mapping[str, Any]) -> Sequence[Tensor | None]:
    tokens, shape, wanted = call["input"], call["normalized_shape"], call["output_mask"]
    copies = call["grad_out"].contiguous(), tokens.contiguous()
    of_weights = [
        new(call[name], shape) if wanted[place] and call[name] is not None else None
        for place, name in ((1, "weight"), (2, "bias"))
    ]
    return like(copies[1]) if wanted[0] else None, *of_weights


_HALVES = (torch.float16, torch.bfloat16)

RESULTS: Mapping[Any, Callable[[Mapping[str, Any]], Any]] = {
    _ATEN.native_batch_norm.default: _batch_norm,
    _ATEN.native_batch_norm_backward.default: _batch_norm_backward,
    _ATEN.native_layer_norm.default: _layer_norm,
    _ATEN.native_layer_norm_backward.default: _layer_norm_backward,
}
"""What an operator of PyTorch returns on a GPU, by its arguments; called in its place."""
