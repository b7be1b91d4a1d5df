"""What PyTorch's autocast does on a GPU, done to tensors on the meta device, where it does nothing.

The lists are those of "Autocast Op Reference" in PyTorch's documentation, CUDA. Operators that are
in no list keep their type or follow type promotion, as they do anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_HALF = {
    "__matmul__",
    "__rmatmul__",
    "addbmm",
    "addmm",
    "addmv",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "einsum",
    "gru",
    "linear",
    "lstm",
    "matmul",
    "mm",
    "mv",
    "prelu",
    "rnn_relu",
    "rnn_tanh",
    "scaled_dot_product_attention",
}
_FULL = {
    "__pow__",
    "__rpow__",
    "binary_cross_entropy_with_logits",
    "cdist",
    "cosine_similarity",
    "cross_entropy",
    "exp",
    "expm1",
    "group_norm",
    "layer_norm",
    "log",
    "log10",
    "log1p",
    "log2",
    "logsumexp",
    "nll_loss",
    "normalize",
    "pow",
    "reciprocal",
    "rsqrt",
    "softplus",
}
_FULL_RESULT = {"cumprod", "cumsum", "log_softmax", "norm", "prod", "softmax", "sum"}
"""These read 16 bits and write 32 without a cast of their own."""
_WIDEST = {
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "grid_sample",
    "index_put",
    "scatter_add",
    "tensordot",
    "vdot",
}
"""These want one type, and get 32 bits if any tensor has them."""


class Autocast:
    """Casts the arguments of functions, and every parameter once."""

    def __init__(self, half: torch.dtype) -> None:
        self._half = half
        self._keeps = True
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}

    def arguments(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """What the function of this name gets for these arguments."""
        if name in _HALF:
            return self._cast(args, self._half), self._cast(kwargs, self._half)
        if name in _FULL:
            return self._cast(args, torch.float32), self._cast(kwargs, torch.float32)
        if name in _WIDEST and any(
            isinstance(t, Tensor) and t.dtype == torch.float32 for t in tree_leaves((args, kwargs))
        ):
            return self._cast(args, torch.float32), self._cast(kwargs, torch.float32)
        first = args[0] if args else None
        if name in _FULL_RESULT and isinstance(first, Tensor) and first.dtype == self._half:
            kwargs = {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}
        return args, kwargs

    def forget(self) -> None:
        """Gives up the cast weights, as PyTorch does where autocast ends.

        Later, where a part of the forward pass is computed again, none is kept for long.
        """
        self._weights.clear()
        self._keeps = False

    def _cast(self, value: Any, kind: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            known = value.dtype in (torch.float32, self._half)
            return self._cast_tensor(value, kind) if known and value.dtype != kind else value
        if isinstance(value, dict):
            return {key: self._cast(item, kind) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._cast(item, kind) for item in value)
        return value

    def _cast_tensor(self, tensor: Tensor, kind: torch.dtype) -> Tensor:
        if not (self._keeps and tensor.is_leaf and tensor.requires_grad and kind == self._half):
            return tensor.to(kind)
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = (tensor, tensor.to(kind))
        return self._weights[id(tensor)][1]
