"""Results of operators, on the meta device and where a GPU allocates something else.

PyTorch finds the shape of many results in Python, in up to milliseconds. Networks repeat their
layers, so results are cached by the shapes, strides and types of the arguments. Normalizations
allocate something else on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trappm.profiler.tracing.tensors import HALVES, tensors_of

_ATEN = torch.ops.aten


def new(like: Tensor, *shape: Any) -> Tensor:
    """Return a contiguous tensor of this shape, with type and device of another."""
    return torch.empty(*shape, dtype=like.dtype, device=like.device)


def like(tensor: Tensor) -> Tensor:
    """Return `torch.empty_like`, which is slow on the meta device."""
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
    kind = torch.float32 if tokens.dtype in HALVES else tokens.dtype
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


def _grouped_product(call: Mapping[str, Any]) -> Tensor:
    left, right = call["self"], call["mat2"]
    groups: Sequence[int] = left.shape[:-2] if right.dim() == 3 else ()
    if left.dim() == right.dim() == 2:
        groups = [len(call["offs"])]
    return new(left, (*groups, left.shape[-2], right.shape[-1]))


RESULTS: Mapping[Any, Callable[[Mapping[str, Any]], Any]] = {
    _ATEN.native_batch_norm.default: _batch_norm,
    _ATEN.native_batch_norm_backward.default: _batch_norm_backward,
    _ATEN._grouped_mm.default: _grouped_product,  # the meta device takes bf16 only
}
"""Results of operators on a GPU by their arguments."""

COPYING: Mapping[Any, Callable[[Mapping[str, Any]], Any]] = {
    _ATEN.native_layer_norm.default: _layer_norm,
    _ATEN.native_layer_norm_backward.default: _layer_norm_backward,
}
"""Results of operators that may copy their arguments first."""

_Kind = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and type."""

MAX_CALLS = 50_000
"""Size of the cache, some 20 MiB; a large model has 2,000 different calls."""
_KINDS: dict[Any, tuple[bool, list[_Kind | None]] | None] = {}
"""Kinds by operator and arguments; None if results share memory with other tensors."""


def result_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operator on the meta device: `func(*args, **kwargs)`."""
    if not _is_new(func):
        return func(*args, **kwargs)
    try:
        key = func, _key(args), _key(kwargs.items())
        known = _KINDS.get(key)
    except TypeError:
        return func(*args, **kwargs)
    if known is None:
        output = func(*args, **kwargs)
        if key not in _KINDS:
            if len(_KINDS) >= MAX_CALLS:
                _KINDS.clear()
            _KINDS[key] = _kinds_of(output, tensors_of((*args, *kwargs.values())))
        return output
    several, kinds = known
    results = [
        None if k is None else torch.empty_strided(k[0], k[1], dtype=k[2], device="meta")
        for k in kinds
    ]
    return tuple(results) if several else results[0]


@cache
def _is_new(func: Any) -> bool:
    """Return whether the operator returns new tensors, and writes to none of its arguments."""
    schema = func._schema
    results = [str(r.type) for r in schema.returns]
    return (
        bool(results)
        and set(results) == {"Tensor"}
        and not (any(a.alias_info is not None for a in (*schema.arguments, *schema.returns)))
    )


def _key(values: Any) -> tuple[Any, ...]:
    """Return a key that is equal for calls with equal results.

    Raises:
        TypeError: A tensor that shape, strides and type do not describe: without axes (whose type
            may count less in promotion), sparse or complex.
    """
    parts: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            plain = value.layout is torch.strided and not value.dtype.is_complex
            if not (plain and value.dim() and value.is_meta):
                raise TypeError
            parts.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, list | tuple):
            parts.append(_key(value))
        else:
            parts.append((type(value), value))  # 1 and 1.0 are equal, and give different types
    return tuple(parts)


def _kinds_of(output: Any, given: Sequence[Tensor]) -> tuple[bool, list[_Kind | None]] | None:
    """Return the kind of each result; None where one is a view or shares memory.

    Some operators return views of their arguments without saying so in their schema.
    """
    several = isinstance(output, tuple)
    results = list(output) if several else [output]
    seen = {t.untyped_storage()._cdata for t in given}
    for tensor in results:
        if tensor is not None:
            storage = tensor.untyped_storage()
            needed = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
            whole = storage.nbytes() == needed.untyped_storage().nbytes()
            if not (whole and tensor.is_meta) or storage._cdata in seen:
                return None
            seen.add(storage._cdata)
    return several, [None if t is None else (t.shape, t.stride(), t.dtype) for t in results]
