"""Functions and composite operators of the meta device, run as on a GPU.

Attention is one fused kernel on a GPU and a product of matrices on the meta device; dropout is one
kernel and not three; a recurrent layer is cuDNN's products and not one operator for each time step;
autocast casts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from trappm.profiler.errors import InputError
from trappm.profiler.graphs.nodes import bound
from trappm.profiler.tracing.gpu import torchvision_operators
from trappm.profiler.tracing.gpu.attention import attention
from trappm.profiler.tracing.gpu.ctc import ctc_loss
from trappm.profiler.tracing.gpu.flex_attention import FLEX_ATTENTION, flex_attention
from trappm.profiler.tracing.gpu.recurrent import GATES, recurrent
from trappm.profiler.tracing.kernel_log import KernelLog
from trappm.profiler.tracing.known_values import USUAL, KnownValues
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


_CONSTRUCTORS = frozenset(_device_constructors())
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_FROM_DATA = (torch.tensor, torch.as_tensor, Tensor.new_tensor)
"""Constructors that read no data for the meta device."""
_READING = (Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.__format__)
"""Functions that copy a tensor to the CPU."""


@cache
def _without_checks(function: Any) -> Any:
    """Return a function of PyTorch written in Python without its first lines, which ask for modes.

    PyTorch runs such functions with all modes switched off; this copy runs with them.
    """
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


_ALWAYS_ENTERED = frozenset(
    (
        F.multi_head_attention_forward,
        Tensor.backward,  # these run what a checkpoint computes again
        torch.autograd.backward,
        torch.autograd.grad,
    )
)
"""Functions within which others are replaced."""
_CALLING = (vars(F), vars(torch.functional))
"""Globals of functions in Python that call functions which autocast casts."""


def _on_meta(value: Any) -> Any:
    """Return the meta device for the name or index of a GPU, and other values as they are."""
    is_gpu = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return "meta" if is_gpu or type(value) is int else value


class GpuFunctions(TorchFunctionMode):
    """Mode in which functions of tensors on the meta device run as on a GPU.

    New tensors, and those of a model that names the GPU, are on the meta device. The mode applies
    to its own thread only.

    Args:
        kernels: Log for the kernels that no operator represents.
        fused_attention: True if the software stack has a kernel for attention.
        values: Known values, which the functions that are replaced here have as well.
    """

    def __init__(
        self, kernels: KernelLog, fused_attention: bool = True, values: KnownValues | None = None
    ) -> None:
        super().__init__()
        self._kernels = kernels
        self._fused = fused_attention
        self._values = values or KnownValues()
        self._autocast = Autocast()
        self._entered: list[Any] = []
        """Functions that run line by line at present."""

    def end_forward(self) -> None:
        """Release the cast weights, as autocast does at its end."""
        self._autocast.forget()

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is FLEX_ATTENTION:
            return flex_attention(self._values.get, *args, **(kwargs or {}))
        if name := torchvision_operators.name_of(func):
            return torchvision_operators.call(name, func, args, kwargs or {})
        return self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a function of PyTorch."""
        if func is Tensor.cuda:
            func, args, kwargs = Tensor.to, args[:1], {**kwargs, "device": "meta"}
        elif func is Tensor.to:
            args = args[0], *map(_on_meta, args[1:])
        elif func == _SET_DATA and args[0].shape == args[1].shape:
            return None  # the new memory is kept and as much is freed
        device = kwargs.get("device")
        if device is not None:
            kwargs = {**kwargs, "device": _on_meta(device)}
        elif func in _CONSTRUCTORS:
            kwargs = {**kwargs, "device": "meta"}
        if func in _READING and args[0].is_meta and args[1:] != ("",):
            args = args[0].cpu(), *args[1:]
        name = getattr(func, "__name__", "")
        args, kwargs = self._autocast.arguments(name, args, kwargs)
        if func in _FROM_DATA:
            return self._with_values(func, args, kwargs, func(*args, **kwargs))
        if not self._enters(func, name):
            output = func(*args, **kwargs)
            if name in USUAL:
                self._values.assume(name, args[0], output)
            return output
        self._entered.append(func)
        try:
            with self:
                return _without_checks(func)(*args, **kwargs)
        finally:
            self._entered.pop()

    def _enters(self, func: Any, name: str) -> bool:
        """Return whether a function runs line by line, with this mode."""
        if func in _ALWAYS_ENTERED:
            return self._autocast.is_enabled or not torch.is_inference_mode_enabled()
        if not self._autocast.is_enabled or name in CAST or not isinstance(func, FunctionType):
            return False
        # Some functions, such as meshgrid, only call another one, which asks for the modes of both.
        is_asked_again = func in self._entered
        return not is_asked_again and any(func.__globals__ is names for names in _CALLING)

    def whole(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a composite operator that a GPU runs in another way.

        NotImplemented where it takes the operator apart as PyTorch does.
        """
        name = func._schema.name.removeprefix("aten::")
        if name == "scaled_dot_product_attention":
            return attention(self._kernels, self._fused, *args, **kwargs)
        if name == "linear":
            return linear(*args, **kwargs)
        if name == "ctc_loss":
            return ctc_loss(self._kernels, *args, **kwargs)
        if name in GATES and len(args) == 9:
            return recurrent(self._kernels, name, *args)
        if name == "dropout":
            return _dropout(*args, **kwargs)
        if name == "softmax" and not torch.is_inference_mode_enabled():
            call = bound(func, args, kwargs)
            if call["self"].dtype != (call["dtype"] or call["self"].dtype):
                # The meta device would cast first, a GPU casts on the way. In inference the cast
                # stays a kernel of its own, as in the steps that the shipped heads learned from.
                return torch._softmax(call["self"], call["dim"], True)
        return NotImplemented

    def _with_values(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> Any:
        with _disable_current_modes(), torch.no_grad():
            self._values.replace(func, args, kwargs, output)
        return output


def linear(
    input: Tensor,  # noqa: A002  (as in torch)
    weight: Tensor,
    bias: Tensor | None = None,
) -> Any:
    """Return the product of tokens that are not contiguous (aten/src/ATen/native/Linear.cpp).

    They are copied into one matrix, as the weights want a gradient, and the bias is added in place;
    neither happens while a dispatch mode is watching. NotImplemented for all other products.
    """
    is_plain = bias is not None and input.is_contiguous()
    if input.dim() < 3 or is_plain or not weight.requires_grad:
        return NotImplemented
    product = input.reshape(-1, input.shape[-1]) @ weight.t()
    product = torch.ops.aten._unsafe_view(product, (*input.shape[:-1], weight.shape[0]))
    return product if bias is None else product.add_(bias)


def _dropout(tensor: Tensor, p: float, training: bool) -> Any:
    if not training or p == 0.0 or not tensor.is_meta:
        return NotImplemented
    return torch.native_dropout(tensor, p, True)[0]
