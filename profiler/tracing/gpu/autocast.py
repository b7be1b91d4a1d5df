"""Casts of autocast on a GPU, by the lists of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trappm.profiler.errors import InputError
from trappm.profiler.tracing.tensors import HALVES

# The lists are those of aten/src/ATen/autocast_mode.h (PyTorch 2.13), by the names of functions in
# Python; a test compares them with what PyTorch registers. Operators that are in no list keep their
# type or follow type promotion, as they do anyway. Functions of `torch.nn.functional` that are in
# no list run line by line, so that the functions which they call are found here.

_HALF = {
    "__matmul__", "__rmatmul__", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm",
    "chain_matmul", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "convolution", "einsum", "gru", "gru_cell",
    "linalg_matmul", "linalg_multi_dot", "linalg_vecdot", "linear", "lstm", "lstm_cell", "matmul",
    "mm", "mv", "prelu", "rnn_relu", "rnn_relu_cell", "rnn_tanh", "rnn_tanh_cell",
    "scaled_dot_product_attention",
}  # fmt: skip
_FULL = {
    "__pow__", "__rdiv__", "__rpow__", "acos", "asin", "arccos", "arcsin",
    "binary_cross_entropy_with_logits", "cdist", "cosh", "cosine_embedding_loss",
    "cosine_similarity", "cross_entropy", "dist", "erfinv", "exp", "expm1", "frobenius_norm",
    "group_norm", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "layer_norm",
    "log", "log10", "log1p", "log2", "logsumexp", "margin_ranking_loss", "mse_loss",
    "multi_margin_loss", "multilabel_margin_loss", "native_layer_norm", "nll_loss",
    "nll_loss2d", "nll_loss_nd", "normalize", "nuclear_norm", "pairwise_distance", "pdist",
    "poisson_nll_loss", "pow", "reciprocal", "renorm", "rms_norm", "rsqrt", "sinh",
    "smooth_l1_loss", "soft_margin_loss", "softplus", "special_erfinv", "special_expm1",
    "special_log1p", "special_logsumexp", "square", "tan", "triplet_margin_loss",
    "upsample_bicubic2d", "_upsample_bicubic2d_aa", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "upsample_trilinear3d",
}  # fmt: skip
"""Some of these are no operators of their own, but call one that is in this list."""
_FULL_RESULT = {
    "cumprod", "cumsum", "linalg_matrix_norm", "linalg_norm", "linalg_vector_norm", "log_softmax",
    "norm", "prod", "softmax", "special_log_softmax", "special_softmax", "sum",
}  # fmt: skip
"""These read 16 bits and write 32 without a cast of their own."""
_WIDEST = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put",
    "linalg_cross", "scatter_add", "tensordot", "vdot",
}  # fmt: skip
"""These want one type, and get 32 bits if any tensor has them."""
CAST = frozenset(_HALF | _FULL | _FULL_RESULT | _WIDEST)
"""Functions whose arguments or results autocast casts."""
REFUSED = frozenset({"binary_cross_entropy"})
"""Functions that PyTorch refuses to run under autocast."""


class Autocast:
    """Casts the arguments of functions within `torch.autocast("cuda")`, every parameter once."""

    def __init__(self) -> None:
        self._half = torch.float16
        self._keeps = True
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def is_enabled(self) -> bool:
        return torch.is_autocast_enabled("cuda")

    def arguments(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the arguments that the function of this name gets."""
        if not self.is_enabled:
            return args, kwargs
        if (half := torch.get_autocast_dtype("cuda")) != self._half:
            self._half = half
            self._weights.clear()
        if name in REFUSED:
            raise InputError(
                f"PyTorch refuses {name} under autocast; use binary_cross_entropy_with_logits, or "
                'compute the loss within torch.autocast("cuda", enabled=False)'
            )
        if name in _HALF:
            return self._cast(args, self._half), self._cast(kwargs, self._half)
        if name in _FULL:
            return self._cast(args, torch.float32), self._cast(kwargs, torch.float32)
        if name in _WIDEST and any(
            isinstance(t, Tensor) and t.dtype == torch.float32 for t in tree_leaves((args, kwargs))
        ):
            return self._cast(args, torch.float32), self._cast(kwargs, torch.float32)
        first = args[0] if args else kwargs.get("input")
        has_type = kwargs.get("dtype") or any(isinstance(value, torch.dtype) for value in args)
        is_half = isinstance(first, Tensor) and first.dtype in HALVES
        if name in _FULL_RESULT and is_half and not has_type:
            kwargs = {**kwargs, "dtype": torch.float32}
        return args, kwargs

    def forget(self) -> None:
        """Release the cast weights, as PyTorch does where autocast ends.

        Later, where a part of the forward pass is computed again, none is kept for long.
        """
        self._weights.clear()
        self._keeps = False

    def _cast(self, value: Any, kind: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            known = value.dtype is torch.float32 or value.dtype in HALVES
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
