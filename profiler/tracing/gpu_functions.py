"""GPU kernels of functions that the meta device would take apart or run in other types.

Attention is one fused kernel on a GPU and a product of matrices on the meta device; dropout is one
kernel and not three; a recurrent layer is cuDNN's products and not one operator for each time step;
autocast casts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache, wraps
from threading import Lock
from types import FunctionType
from typing import Any, Self, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from trappm.profiler.errors import InputError
from trappm.profiler.simulation.kernel_profile import KernelKind, Pass
from trappm.profiler.tracing import torchvision_operators
from trappm.profiler.tracing.flex_attention import FLEX_ATTENTION, OVERRIDABLE, flex_attention
from trappm.profiler.tracing.kernel_log import HALVES, KernelLog, Product
from trappm.profiler.tracing.known_values import USUAL, KnownValues

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


# The time steps of a layer wait for each other, so their products are small; those with the inputs,
# and those of the weights' gradients, are of all time steps at once.

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def recurrent(kernels: KernelLog, name: str, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the results of `torch.lstm`, `gru` and `rnn_*`: output and last states.

    `arguments` are theirs, also those of packed sequences, whose time steps have their mean rows.
    """
    if isinstance(arguments[4], bool):  # packed
        outputs, batch_sizes, state, weights, _, layers, dropout, training, both_ways = arguments
        steps = len(batch_sizes)
    else:
        outputs, state, weights, _, layers, dropout, training, both_ways, batch_first = arguments
        steps = outputs.shape[1 if batch_first else 0]
    states = (state,) if isinstance(state, Tensor) else tuple(state)
    directions = 2 if both_ways else 1
    per_direction = len(weights) // (layers * directions)
    for layer in range(layers):
        own = weights[layer * directions * per_direction :][: directions * per_direction]
        outputs = cast(
            Tensor,
            _Layer.apply(kernels, GATES[name], directions, steps, outputs, *own),  # type: ignore[no-untyped-call]
        )
        if dropout and training and layer + 1 < layers:
            outputs = torch.native_dropout(outputs, dropout, True)[0]
    return outputs, *(torch.empty_like(s) for s in states)


class _Layer(torch.autograd.Function):
    """All directions of one layer; a direction has at least two weights, of inputs and state."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: KernelLog,
        gates: int,
        directions: int,
        steps: int,
        inputs: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        per_direction = len(weights) // directions
        width = weights[1].shape[1]
        outputs = inputs.new_empty(*inputs.shape[:-1], directions * width)
        ctx.kernels, ctx.steps = kernels, steps
        ctx.per_direction = per_direction
        reserved = None
        if not torch.is_inference_mode_enabled():
            # cuDNN's reserve space: the gates and the state of each time step.
            reserved = inputs.new_empty(*inputs.shape[:-1], directions * (gates + 1) * width)
            ctx.save_for_backward(inputs, outputs, reserved, *weights)
        rows = inputs.shape[:-1].numel()
        gate_values = inputs.new_empty(rows, gates * width)
        one_step = inputs.new_empty(rows // steps, gates * width)
        for at in range(0, len(weights), per_direction):
            of_input, of_state = weights[at], weights[at + 1]
            product = Product(rows, gates * width, of_input.shape[1])
            kernels.add(KernelKind.LINEAR, Pass.FORWARD, [inputs, of_input], [gate_values], product)
            product = Product(rows // steps, gates * width, width)
            read = [one_step[:, :width], of_state]
            kernels.add(KernelKind.LINEAR, Pass.FORWARD, read, [one_step], product, ctx.steps)
            written = [one_step[:, :width]]
            kernels.add(KernelKind.ELEMENTWISE, Pass.FORWARD, [one_step], written, count=steps)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, outputs, _, *weights = ctx.saved_tensors
        kernels, steps = ctx.kernels, ctx.steps
        rows = inputs.shape[:-1].numel()
        columns = weights[0].shape[0]
        width = weights[1].shape[1]
        of_gates = inputs.new_empty(rows, columns)
        one_step = inputs.new_empty(rows // steps, columns)
        data, weight = Pass.DATA_GRADIENT, Pass.WEIGHT_GRADIENT
        for at in range(0, len(weights), ctx.per_direction):
            of_input, of_state = weights[at], weights[at + 1]
            written = [one_step[:, :width]]
            kernels.add(KernelKind.ELEMENTWISE, data, written, [one_step], count=steps)
            product = Product(rows // steps, width, columns)
            kernels.add(KernelKind.LINEAR, data, [one_step, of_state], written, product, steps)
            if ctx.needs_input_grad[4]:
                product = Product(rows, of_input.shape[1], columns)
                kernels.add(KernelKind.LINEAR, data, [of_gates, of_input], [inputs], product)
            for read, matrix in ((inputs, of_input), (outputs, of_state)):
                product = Product(columns, matrix.shape[1], rows)
                kernels.add(KernelKind.LINEAR, weight, [of_gates, read], [matrix], product)
        del of_gates, one_step
        of_inputs = torch.empty_like(inputs) if ctx.needs_input_grad[4] else None
        return (None, None, None, None, of_inputs, *(torch.empty_like(w) for w in weights))


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


_construct_autocast, _enter_autocast = torch.autocast.__init__, torch.autocast.__enter__


def _is_tracing() -> bool:
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, GpuFunctions) for mode in modes)


# `wraps` lets torch.jit.script find PyTorch's own source.
@wraps(_construct_autocast)
def _construct(
    self: torch.autocast,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    """Construct `torch.autocast`; while a step is traced, for a GPU that has every type.

    PyTorch disables it on machines without a GPU, and refuses the meta device.
    """
    if device_type in ("cuda", "meta") and _is_tracing():
        _construct_autocast(self, "cuda", dtype, False, cache_enabled)
    else:
        _construct_autocast(self, device_type, dtype, enabled, cache_enabled)
    vars(self)["_asked_enabled"] = enabled


@wraps(_enter_autocast)
def _enter(self: torch.autocast) -> Any:
    """Enter `torch.autocast`; while a step is traced, as on a machine with a GPU.

    One that was constructed before the trace leaves autocast as it is: without a GPU, PyTorch does
    not keep whether it was enabled.
    """
    if self.device != "cuda" or not _is_tracing():
        return _enter_autocast(self)  # type: ignore[no-untyped-call]
    before = self._enabled
    self._enabled = vars(self).get("_asked_enabled", torch.is_autocast_enabled("cuda"))
    try:
        return _enter_autocast(self)  # type: ignore[no-untyped-call]
    finally:
        self._enabled = before


class _Idle:
    """A stream, an event or a range of a GPU that has nothing to do."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Self) -> float:
        return 0.0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    @classmethod
    def __torch_function__(cls, *_: Any) -> None:
        """Do nothing, in `Tensor.record_stream`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _nothing(*_: Any, **__: Any) -> None:
    pass


_AUTOCAST = {torch.autocast: {"__init__": _construct, "__enter__": _enter}}
"""Methods of PyTorch that behave otherwise while a step is traced, by their class."""
_ORDERS: Mapping[Any, Mapping[str, Any]] = {
    torch.cuda: {
        "synchronize": _nothing,
        "set_stream": _nothing,
        **dict.fromkeys(("Stream", "Event", "stream", "current_stream", "default_stream"), _Idle),
    },
    torch.cuda.nvtx: {
        "range": _Idle,
        **dict.fromkeys(("mark", "range_push", "range_pop", "range_start", "range_end"), _nothing),
    },
    torch.accelerator: {"synchronize": _nothing, "current_stream": _Idle},
}
"""Calls that only order or mark the work of a GPU, by their module in PyTorch."""


class _TracedGpu:
    """Lets PyTorch behave as on a GPU that is idle while a step is traced.

    Autocast for CUDA can be enabled, and calls that order or mark a GPU's work do nothing where
    PyTorch finds none. The first of the threads that trace changes PyTorch, and the last one
    restores it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._traces = 0
        self._changes = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._traces == 0:
                changed: dict[Any, Mapping[str, Any]] = {
                    **_AUTOCAST,
                    **OVERRIDABLE,
                    **torchvision_operators.has_operators(),
                }
                if not torch.cuda.is_available():
                    changed |= _ORDERS
                for owner, names in changed.items():
                    for name, value in names.items():
                        self._changes.callback(setattr, owner, name, getattr(owner, name))
                        setattr(owner, name, value)
            self._traces += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._traces -= 1
            if self._traces == 0:
                self._changes.close()


TRACED_GPU = _TracedGpu()


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
        # In inference mode operators reach the recorder whole.
        if not torch.is_inference_mode_enabled():
            output = self._replaced(func, name, args, kwargs)
            if output is not NotImplemented:
                return output
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

    def _replaced(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the result of a function that a GPU runs in another way, or NotImplemented."""
        if name == "scaled_dot_product_attention":
            output = self.attention(*args, **kwargs)
            if output is not NotImplemented:
                self._with_values(func, args, kwargs, output)
            return output
        if name == "linear":
            return linear(*args, **kwargs)
        if name == "ctc_loss":
            return _ctc_loss(self._kernels, *args, **kwargs)
        if name in GATES and len(args) == 9:
            return self._with_values(func, args, kwargs, recurrent(self._kernels, name, *args))
        if name == "dropout":
            return _dropout(*args, **kwargs)
        if name == "softmax":
            tensor = args[0] if args else kwargs["input"]
            if tensor.dtype != (kwargs.get("dtype") or tensor.dtype):
                # The meta device would cast first, a GPU casts on the way.
                axis = kwargs.get("dim", args[1] if len(args) > 1 else -1)
                return torch._softmax(tensor, axis, True)
        return NotImplemented

    def _with_values(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> Any:
        with _disable_current_modes(), torch.no_grad():
            self._values.replace(func, args, kwargs, output)
        return output

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
        batch, heads, length, width = query.shape
        passing = [query.new_empty((batch, heads, length), dtype=torch.float32)]
        if ctx.flash:  # the queries' gradient is summed in 32 bits (flash_api.cpp, mha_bwd)
            rounded = (batch, heads, -(-length // 128) * 128, -(-width // 32) * 32)
            passing.append(query.new_empty(rounded, dtype=torch.float32))
        gradients = [torch.empty_like(t) for t in (query, key, value)]
        ctx.kernels.attention(query, key, value, mask, output, ctx.causal, gradients)
        mask_gradient = None
        if mask is not None and ctx.needs_input_grad[6]:
            full = query.new_empty(*query.shape[:3], key.shape[-2])
            mask_gradient = full.sum_to_size(mask.shape)
        del passing
        return (None, None, None, *gradients, mask_gradient)


class _Ctc(torch.autograd.Function):
    """Allocates what the loss of Graves et al. (2006) keeps: probabilities of all prefixes."""

    @staticmethod
    def forward(ctx: Any, kernels: KernelLog, log_probs: Tensor, targets: Tensor) -> Tensor:
        steps, batch = log_probs.shape[:2]
        longest = targets.shape[-1] if targets.dim() == 2 else -(-targets.shape[0] // batch)
        prefixes = log_probs.new_empty((batch, steps, 2 * longest + 1))
        losses = log_probs.new_empty(batch)
        kernels.add(KernelKind.OTHER, Pass.FORWARD, [log_probs, targets], [prefixes, losses])
        ctx.kernels = kernels
        ctx.save_for_backward(log_probs, targets, losses, prefixes)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, _, _, prefixes = ctx.saved_tensors
        suffixes = torch.empty_like(prefixes)
        gradients = torch.empty_like(log_probs)
        read = [prefixes, log_probs, gradient]
        ctx.kernels.add(KernelKind.OTHER, Pass.DATA_GRADIENT, read, [suffixes, gradients])
        return None, gradients, None


def _ctc_loss(
    kernels: KernelLog,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: object,
    target_lengths: object,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Any:
    """`ctc_loss` of log probabilities (time, batch, classes) or (time, classes)."""
    batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    losses = cast(Tensor, _Ctc.apply(kernels, batched, targets))  # type: ignore[no-untyped-call]
    if zero_infinity:
        losses = torch.where(losses == float("inf"), torch.zeros_like(losses), losses)
    if reduction in ("mean", 1):
        return losses.mean()
    if reduction in ("sum", 2):
        return losses.sum()
    return losses if log_probs.dim() == 3 else losses.squeeze(0)


def _dropout(
    input: Tensor,  # noqa: A002  (as in torch)
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if not training or p == 0.0 or inplace or not input.is_meta:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]
