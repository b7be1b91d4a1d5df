"""Traces one training step without memory, weights or arithmetic.

    model on the meta device --forward, loss, backward--> every tensor's birth and death, in order

Where the meta device would take another path than a GPU, the trace imitates the GPU: fused
attention, fused dropout, gradients that accumulate in place.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.errors import UnsupportedModelError, one_line
from profiler.records import IntArray
from profiler.step_trace import TRACED_BATCH_SIZES, ConvolutionKind, Event, Pass, StepTrace

_ATEN = torch.ops.aten


def trace_step(
    model: nn.Module, input_size: int, batch_sizes: tuple[int, int] = TRACED_BATCH_SIZES
) -> StepTrace:
    """Traces forward, cross-entropy and backward of a model that lives on the meta device.

    Args:
        model: maps (B, 3, H, W) to class scores; made under `torch.device("meta")`.
        input_size: height and width of the images, in pixels.
        batch_sizes: two different ones, at which the step is traced.

    Raises:
        UnsupportedModelError: the step cannot run without data, or its order of allocations
            depends on the batch size; with the reason.
    """
    first, second = (_record(model, input_size, batch_size) for batch_size in batch_sizes)
    events, other = first.events(), second.events()
    if not np.array_equal(events[:, :2], other[:, :2]):
        raise UnsupportedModelError("the order of allocations changes with the batch size")
    parameters = [p for p in model.parameters() if p.requires_grad]
    fixed = [*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]
    return StepTrace(
        kinds=events[:, 0].astype(np.int8),
        blocks=events[:, 1].astype(np.int32),
        sizes=np.stack([events[:, 2], other[:, 2]], axis=1),
        gradients=np.array(sorted(first.gradients), dtype=np.int32),
        parameter_bytes=_storage_bytes(parameters),
        buffer_bytes=_storage_bytes(fixed),
        batch_sizes=batch_sizes,
    )


def _storage_bytes(tensors: Sequence[Tensor]) -> IntArray:
    return np.array([t.untyped_storage().nbytes() for t in tensors], dtype=np.int64)


def _record(model: nn.Module, input_size: int, batch_size: int) -> _Recorder:
    """Runs one step and returns what was recorded of it."""
    model.train()
    model.zero_grad(set_to_none=True)
    recorder = _Recorder(model)
    try:
        with torch.device("meta"):
            images = torch.empty(batch_size, 3, input_size, input_size)
            target = torch.empty(batch_size, dtype=torch.long)
        with recorder, _gpu_functions():
            recorder.see(images)
            recorder.see(target)
            output = model(images)
            # Distilled models give the scores of two heads in training.
            parts = output if isinstance(output, tuple | list) else (output,)
            loss = torch.stack([F.cross_entropy(part, target) for part in parts]).sum()
            del output, parts
            recorder.log(Event.END_OF_FORWARD)
            recorder.backward = True
            loss.backward()  # type: ignore[no-untyped-call]
            recorder.note_gradients(model)
    except Exception as error:
        raise UnsupportedModelError(
            f"the training step cannot be traced: {one_line(error)}"
        ) from error
    finally:
        recorder.closed = True
        model.zero_grad(set_to_none=True)
    return recorder


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers every storage at its birth and logs its death."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.backward = False
        self.closed = False
        self.gradients: set[int] = set()
        self._events: list[tuple[int, int, int]] = []
        self._live: dict[int, int] = {}
        self._watchers: dict[int, weakref.ref[Any]] = {}
        self._count = 0
        # Parameters and buffers are there before the step begins.
        self._static = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}

    def events(self) -> IntArray:
        """Kind, block and size of every event (E, 3)."""
        return np.array(self._events, dtype=np.int64).reshape(-1, 3)

    def log(self, kind: Event, block: int = 0, size: int = 0) -> None:
        self._events.append((kind, block, size))

    def see(self, tensor: Tensor) -> None:
        """Logs an allocation if this tensor's storage is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._static:
            return
        number = self._count
        self._count += 1
        self._live[key] = number
        size = storage.nbytes()

        def died(_: Any) -> None:
            self._watchers.pop(number, None)
            if self._live.get(key) == number:
                del self._live[key]
            if not self.closed:
                self.log(Event.FREE, number, size)

        self._watchers[number] = weakref.ref(storage, died)
        self.log(Event.ALLOCATE, number, size)

    def note_gradients(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                number = self._live.get(parameter.grad.untyped_storage()._cdata)
                if number is not None:
                    self.gradients.add(number)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.backward and func is _ATEN.add.Tensor and _accumulates(args):
            # The engine adds gradients in place, but not while a dispatch mode is watching.
            return args[0]
        if func is _ATEN.convolution.default:
            output = func(*args, **kwargs)
            self.see(output)
            self._workspace(Pass.FORWARD, args[0], args[1], output, args[8])
            return output
        if func is _ATEN.convolution_backward.default:
            return self._convolution_backward(func, args, kwargs)
        output = func(*args, **kwargs)
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, Tensor):
                self.see(tensor)
        return output

    def _convolution_backward(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        gradients = func(*args, **kwargs)
        groups, wanted = args[9], args[10]
        for index, kind in ((0, Pass.DATA_GRADIENT), (1, Pass.WEIGHT_GRADIENT)):
            if wanted[index]:
                self.see(gradients[index])
                self._workspace(kind, args[1], args[2], args[0], groups)
        if wanted[2]:
            self.see(gradients[2])
        return gradients

    def _workspace(
        self, which: Pass, images: Tensor, weight: Tensor, output: Tensor, groups: int
    ) -> None:
        if groups == 1:
            pointwise = all(k == 1 for k in weight.shape[2:])
            kind = ConvolutionKind.POINTWISE if pointwise else ConvolutionKind.DENSE
        else:
            depthwise = weight.shape[1] == 1
            kind = ConvolutionKind.DEPTHWISE if depthwise else ConvolutionKind.GROUPED
        touched = sum(t.numel() * t.element_size() for t in (images, weight, output))
        self.log(Event.WORKSPACE, kind * 3 + which, touched)


def _accumulates(args: Sequence[Any]) -> bool:
    """Whether this addition of two gradients would run in place: the first is a whole tensor."""
    first, second = args[0], args[1]
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return False
    whole = first.numel() * first.element_size() == first.untyped_storage().nbytes()
    return whole and first.shape == second.shape and first.dtype == second.dtype


@contextlib.contextmanager
def _gpu_functions() -> Iterator[None]:
    """Attention and dropout as a GPU runs them, which the meta device would take apart."""
    attention, dropout = F.scaled_dot_product_attention, F.dropout

    def fused_dropout(
        input: Tensor,  # noqa: A002  (as in torch)
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or p == 0.0 or inplace:
            return dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    F.scaled_dot_product_attention = _fused_attention(attention)
    F.dropout = fused_dropout
    try:
        yield
    finally:
        F.scaled_dot_product_attention = attention
        F.dropout = dropout


def _fused_attention(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        fused = query.dim() == 4 and query.shape[-1] % 4 == 0 and value.shape[-1] % 4 == 0
        if not fused:
            return plain(query, key, value, attn_mask, dropout_p, is_causal, **options)
        return cast(Tensor, _FusedAttention.apply(query, key, value, attn_mask))  # type: ignore[no-untyped-call]

    return attention


class _FusedAttention(torch.autograd.Function):
    """Allocates what the memory-efficient kernel does: output and log-sum-exp, then gradients."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, length, _ = query.shape
        width = value.shape[-1]
        output = query.new_empty(batch, length, heads, width).transpose(1, 2)
        padded = (length + 31) // 32 * 32
        log_sum_exp = query.new_empty((batch, heads, padded), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, log_sum_exp)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, output, _ = ctx.saved_tensors
        delta = query.new_empty(output.shape[:3], dtype=torch.float32)
        gradients = [torch.empty_like(t) for t in (query, key, value)]
        mask_gradient = None
        if mask is not None and ctx.needs_input_grad[3]:
            full = query.new_empty(*query.shape[:3], key.shape[-2])
            mask_gradient = full.sum_to_size(mask.shape)
        del delta
        return (*gradients, mask_gradient)
