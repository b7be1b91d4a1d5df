"""How many bytes autograd keeps between a model's forward and backward pass, exactly.

The model runs forward in training mode on the meta device, and autograd's own hooks tell which
tensors it keeps; no weight is made and nothing is computed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the usual name
from torch.overrides import TorchFunctionMode

from profiler.errors import InputError, UnsupportedModelError, one_line
from profiler.graph_nodes import BATCH_SIZES
from profiler.module_graph import on_meta
from profiler.step_profile import SavedBytes


def saved_bytes(model: str | nn.Module, input_size: int) -> SavedBytes:
    """The bytes that autograd keeps for a timm architecture, or a copy of a module.

    Every storage counts once and whole, as it stays alive; parameters and buffers, which are there
    anyway, do not count. Attention keeps what CUDA's fused kernels keep.

    Raises:
        UnknownArchitectureError, InputError: as `profiler.zoo.create_model`.
        UnsupportedModelError: the model does not run without values, or what it keeps is not
            affine in the batch size.
    """
    name = model if isinstance(model, str) else type(model).__name__
    if input_size < 1:
        raise InputError(f"input size is {input_size}; it must be 1 or more pixels")
    module = on_meta(model, input_size).train()
    first, second, check = (_saved_at(module, b, input_size, name) for b in BATCH_SIZES)
    slope, rest = divmod(second - first, BATCH_SIZES[1] - BATCH_SIZES[0])
    saved = SavedBytes(first - slope * BATCH_SIZES[0], slope)
    if rest or saved.at(BATCH_SIZES[2]) != check:
        raise UnsupportedModelError(
            f"{name}: the bytes kept for the backward pass are not affine in the batch size"
        )
    return saved


def _saved_at(module: nn.Module, batch_size: int, input_size: int, name: str) -> int:
    present = {_storage(t) for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in present:
            kept[_storage(tensor)] = tensor
        return tensor

    images = torch.empty(batch_size, 3, input_size, input_size, device="meta")
    try:
        with (
            warnings.catch_warnings(),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            _AttentionOfCuda(),
        ):
            warnings.simplefilter("ignore")
            result = module(images)  # held: autograd frees what nobody can ask for any more
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} does not train without values: {one_line(error)}"
        ) from error
    del result
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


class _AttentionOfCuda(TorchFunctionMode):
    """Replaces attention on the meta device, which keeps all scores, where CUDA would fuse it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, key, value, *rest = args
            mask = rest[0] if rest else kwargs.get("attn_mask")
            if query.dim() == 4 and query.shape[-1] % 4 == 0:
                return _FusedAttention.apply(query, key, value, mask)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


class _FusedAttention(torch.autograd.Function):
    """Keeps its inputs, its result and one number for each query and head."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        batch, heads, queries, _ = query.shape
        # CUDA's kernels lay the result out so that joining the heads again copies nothing.
        result = query.new_empty(batch, queries, heads, value.shape[-1]).transpose(1, 2)
        normalisers = query.new_empty(batch, heads, queries)
        ctx.save_for_backward(query, key, value, mask, result, normalisers)
        return result


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
