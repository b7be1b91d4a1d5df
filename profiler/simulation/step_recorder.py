"""Traces one training step without memory, weights or arithmetic.

    model on the meta device --forward, loss, backward--> every tensor's birth and death, in order

Where the meta device would take another path than a GPU, the trace imitates the GPU: fused
attention, fused dropout, gradients that accumulate in place.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trappm.profiler.errors import UnsupportedModelError, one_line
from trappm.profiler.graphs.module_graph import on_meta
from trappm.profiler.models.model_input import Sample
from trappm.profiler.records import IntArray
from trappm.profiler.simulation.gpu_functions import ALLOCATIONS, GpuFunctions
from trappm.profiler.simulation.step_profile import SavedBytes, StepProfile
from trappm.profiler.simulation.step_trace import (
    TRACED_BATCH_SIZES,
    ConvolutionKind,
    Event,
    Pass,
    StepTrace,
)

_ATEN = torch.ops.aten


def trace_step(
    model: nn.Module,
    input_size: int | Sample,
    batch_sizes: tuple[int, int] = TRACED_BATCH_SIZES,
) -> tuple[StepTrace, SavedBytes]:
    """Traces forward, cross-entropy and backward of a model that lives on the meta device.

    Args:
        model: maps (B, 3, H, W) to class scores; made under `torch.device("meta")`.
        input_size: height and width of the images, in pixels; or the sample of another input.
        batch_sizes: two different ones, at which the step is traced; twice the same for a model
            that knows one only, whose trace then holds for that one.

    Returns:
        The allocations, and those of them that autograd keeps between forward and backward pass,
        by its own hooks: every storage once and whole; parameters and buffers do not count.

    Raises:
        UnsupportedModelError: the step cannot run without data, or its order of allocations
            depends on the batch size; with the reason.
    """
    sample = Sample.of(input_size)
    first, second = (_record(model, sample, batch_size) for batch_size in batch_sizes)
    events, other = first.events(), second.events()
    if not _same_order(events, other):
        # Some models keep what their first step makes, such as ConViT its table of positions.
        first = _record(model, sample, batch_sizes[0])
        events = first.events()
        if not _same_order(events, other):
            raise UnsupportedModelError("the order of allocations changes with the batch size")
    span = max(batch_sizes[1] - batch_sizes[0], 1)
    slope, rest = divmod(second.saved - first.saved, span)
    if rest:
        raise UnsupportedModelError("what autograd keeps does not grow evenly with the batch size")
    parameters = [p for p in model.parameters() if id(p) in first.trained]
    fixed = [*(p for p in model.parameters() if id(p) not in first.trained), *model.buffers()]
    trace = StepTrace(
        kinds=events[:, 0].astype(np.int8),
        blocks=events[:, 1].astype(np.int32),
        sizes=np.stack([events[:, 2], other[:, 2]], axis=1),
        gradients=np.array(sorted(first.gradients), dtype=np.int32),
        parameter_bytes=_storage_bytes(parameters),
        buffer_bytes=_storage_bytes(fixed),
        batch_sizes=(batch_sizes[0], batch_sizes[0] + span),
    )
    return trace, SavedBytes(first.saved - slope * batch_sizes[0], slope)


def _same_order(first: IntArray, second: IntArray) -> bool:
    return np.array_equal(first[:, :2], second[:, :2])


def _storage_bytes(tensors: Sequence[Tensor]) -> IntArray:
    return np.array([t.untyped_storage().nbytes() for t in tensors], dtype=np.int64)


def _record(model: nn.Module, sample: Sample, batch_size: int) -> _Recorder:
    """Runs one step and returns what was recorded of it."""
    model.train()
    model.zero_grad(set_to_none=True)
    recorder = _Recorder(model)
    keeping = torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda tensor: tensor)
    try:
        with torch.device("meta"):
            images = sample.batch(batch_size)
            target = torch.empty(batch_size, dtype=torch.long)
        with recorder, GpuFunctions(), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes read while tracing, for instance
            recorder.see(images)
            recorder.see(target)
            with keeping:
                output = model(images)
            loss = loss_of(output, target)
            del output
            recorder.end_forward()
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


def loss_of(output: Any, target: Tensor) -> Tensor:
    """Cross-entropy of class scores (distilled models give those of two heads); else the mean."""
    parts = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not parts:
        raise UnsupportedModelError("no output depends on a trainable parameter")
    scores = (F.cross_entropy(p, target) if p.dim() == 2 else p.mean() for p in parts)
    return torch.stack(list(scores)).sum()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers every storage at its birth and logs its death."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not to be wrapped for torch.compile, which would take a tenth of the time."""
        return False

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.closed = False
        self.gradients: set[int] = set()
        self.trained: set[int] = set()
        """Ids of the parameters that got a gradient."""
        self.saved = 0
        """Bytes that autograd keeps, once the forward pass has ended."""
        self._backward = False
        self._last = _references_to_the_last()
        self._events: list[tuple[int, int, int]] = []
        self._live: dict[int, int] = {}
        self._kept: dict[int, int] = {}
        self._watchers: dict[int, weakref.ref[Any]] = {}
        self._convolutions: dict[Any, list[tuple[Any, Any, torch.dtype] | None]] = {}
        self._count = 0
        # Parameters and buffers are there before the step begins.
        self._static = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}

    def events(self) -> IntArray:
        """Kind, block and size of every event (E, 3)."""
        return np.array(self._events, dtype=np.int64).reshape(-1, 3)

    def end_forward(self) -> None:
        alive = set(self._live.values())
        self.saved = sum(size for number, size in self._kept.items() if number in alive)
        self._events.append((Event.END_OF_FORWARD, 0, 0))
        self._backward = True

    def keep(self, tensor: Tensor) -> Tensor:
        """Notes what autograd keeps; the hook of the same name in PyTorch is called `pack`."""
        storage = tensor.untyped_storage()
        number = self._live.get(storage._cdata)
        if number is not None:
            self._kept[number] = storage.nbytes()
        return tensor

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
                self._events.append((Event.FREE, number, size))

        self._watchers[number] = weakref.ref(storage, died)
        self._events.append((Event.ALLOCATE, number, size))

    def note_gradients(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                self.trained.add(id(parameter))
                number = self._live.get(parameter.grad.untyped_storage()._cdata)
                if number is not None:
                    self.gradients.add(number)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._backward and func is _ATEN.add.Tensor and _accumulates(args, self._last):
            # The engine adds gradients in place, but not while a dispatch mode is watching.
            return args[0]
        if func is _ATEN.convolution.default:
            (output,) = self._convolved(func, args)
            self.see(output)
            self._workspace(Pass.FORWARD, args[0], args[1], output, args[8])
            return output
        if func is _ATEN.convolution_backward.default:
            return self._convolution_backward(func, args)
        allocations = ALLOCATIONS.get(func)
        if allocations is not None:
            with self:
                output = allocations(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = func(*args, **kwargs)
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, Tensor):
                self.see(tensor)
        return output

    def _convolved(self, func: Any, args: Sequence[Any]) -> tuple[Any, ...]:
        """What a convolution gives; PyTorch's slow search for its shape is done once for each kind.

        Networks repeat theirs, and so do files that are long to cost time.
        """
        kind = (func, *map(_as_key, args))
        known = self._convolutions.get(kind)
        if known is None:
            output = func(*args)
            several = output if isinstance(output, tuple) else (output,)
            self._convolutions[kind] = [
                None if t is None else (t.shape, t.stride(), t.dtype) for t in several
            ]
            return several
        make = args[0].new_empty_strided
        return tuple(t and make(t[0], t[1], dtype=t[2]) for t in known)

    def _convolution_backward(self, func: Any, args: Sequence[Any]) -> Any:
        gradients = self._convolved(func, args)
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
        self._events.append((Event.WORKSPACE, kind * 3 + which, touched))


def _as_key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(value) if isinstance(value, list) else value


def _accumulates(args: Sequence[Any], last: tuple[int, int]) -> bool:
    """Whether the engine would add these two gradients in place, as it decides it itself.

    `can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp: the buffer is dense and holds
    the last reference to the first gradient.
    """
    first, second = args[0], args[1]
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return False
    alike = first.shape == second.shape and first.dtype == second.dtype
    dense = _ATEN.is_non_overlapping_and_dense.default(first)
    return alike and dense and _references(first) == last


def _references(tensor: Tensor) -> tuple[int, int]:
    """How many hold the tensor, and its storage; this function's caller included."""
    storage = tensor.untyped_storage()._cdata
    return tensor._use_count(), torch._C._storage_Use_Count(storage)  # type: ignore[attr-defined]


@cache
def _references_to_the_last() -> tuple[int, int]:
    """What `_references` says in a dispatch mode of a gradient that only the engine holds."""
    seen: list[tuple[int, int]] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is _ATEN.add.Tensor:
                seen.append(_references(args[0]))
            return func(*args, **(kwargs or {}))

    leaf = torch.empty(1, device="meta", requires_grad=True)
    both = leaf * 2 + leaf * 3
    with Watch():  # type: ignore[no-untyped-call]
        both.backward()  # type: ignore[no-untyped-call]
    return seen[0]


def step_profile(
    model: str | nn.Module,
    input_size: int | Sample,
    batch_sizes: tuple[int, int] = TRACED_BATCH_SIZES,
) -> StepProfile:
    """Traces a training step of a timm architecture, or of a copy of a module.

    Args:
        model: a timm architecture, or a module of one input, batch first.
        input_size: height and width of square images, in pixels; or the sample of a module.
        batch_sizes: as `trace_step`.

    Raises:
        UnknownArchitectureError, InputError: as `profiler.models.zoo.create_model`.
        UnsupportedModelError: the step cannot be traced; with the reason.
    """
    module = on_meta(model, input_size)
    parameters = list(module.parameters())
    trace, saved_bytes = trace_step(module, input_size, batch_sizes)
    return StepProfile(
        trace=trace,
        saved_bytes=saved_bytes,
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        frozen_parameters=sum(p.numel() for p in parameters if not p.requires_grad),
    )
