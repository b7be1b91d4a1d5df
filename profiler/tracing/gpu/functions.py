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

from trappm.profiler.graphs.nodes import bound
from trappm.profiler.tracing.gpu import torchvision_operators
from trappm.profiler.tracing.gpu.attention import attention
from trappm.profiler.tracing.gpu.autocast import CAST, Autocast
from trappm.profiler.tracing.gpu.ctc import ctc_loss
from trappm.profiler.tracing.gpu.flex_attention import FLEX_ATTENTION, flex_attention
from trappm.profiler.tracing.gpu.recurrent import GATES, recurrent
from trappm.profiler.tracing.kernel_log import KernelLog
from trappm.profiler.tracing.known_values import USUAL, KnownValues

_CONSTRUCTORS = frozenset(_device_constructors())
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_FROM_DATA = (torch.tensor, torch.as_tensor, Tensor.new_tensor)
"""Constructors that read no data for the meta device."""


@cache
def _unchecked(function: Any) -> Any:
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
        return self._called(func, args, kwargs or {})

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
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
        if func in (Tensor.numpy, Tensor.__array__) and args[0].is_meta:
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
                return _unchecked(func)(*args, **kwargs)
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
        if name == "softmax":
            call = bound(func, args, kwargs)
            if call["self"].dtype != (call["dtype"] or call["self"].dtype):
                # The meta device would cast first, a GPU casts on the way.
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
    """A product of tokens that do not lie next to each other (aten/src/ATen/native/Linear.cpp).

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
