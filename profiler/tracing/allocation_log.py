"""The allocations of one step as it is traced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from trappm.profiler.records import IntArray
from trappm.profiler.traced_step import ConvolutionKind, Event, Origin, Pass
from trappm.profiler.tracing.kernel_log import convolution_kind

NO_BLOCK = -1
"""Number of a storage from before the step."""


class AllocationLog:
    """Numbers the storages of one step at one batch size.

    Args:
        present: Parameters, buffers and other tensors from before the step.
        origin: Callback that returns the origin of an allocation.
    """

    def __init__(
        self, present: Iterable[Tensor], origin: Callable[[Any], Origin] | None = None
    ) -> None:
        self.closed = False
        self.gradients: dict[int, int] = {}
        """Block of the gradient by the id of its parameter."""
        self.saved_bytes = 0
        """Bytes that autograd keeps at the end of the forward pass."""
        self.operator: Any = None
        self.origins: list[Origin] = []
        """Origin of each block, if `origin` is given."""
        self._origin = origin
        self._events: list[tuple[int, int, int]] = []
        self._live: dict[int, int] = {}
        self._kept: dict[int, int] = {}
        self._watchers: dict[int, weakref.ref[Any]] = {}
        self._count = 0
        self._present = {t.untyped_storage()._cdata for t in present}

    def events(self) -> IntArray:
        """Return kind, block and size of every event (E, 3)."""
        return np.array(self._events, dtype=np.int64).reshape(-1, 3)

    def see(self, tensor: Tensor) -> None:
        """Log an allocation if this tensor's storage is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._present:
            return
        number = self._count
        self._count += 1
        self._live[key] = number
        size = storage.nbytes()

        def log_free(_: Any) -> None:
            self._watchers.pop(number, None)
            if self._live.get(key) == number:
                del self._live[key]
            if not self.closed:
                self._events.append((Event.FREE, number, size))

        self._watchers[number] = weakref.ref(storage, log_free)
        self._events.append((Event.ALLOCATE, number, size))
        if self._origin is not None:
            self.origins.append(self._origin(self.operator))

    def begin(self, inputs: Iterable[Tensor]) -> None:
        """Log the storages of the step's inputs."""
        for tensor in inputs:
            self.see(tensor)

    def workspace(
        self, which: Pass, images: Tensor, weight: Tensor, output: Tensor, groups: int
    ) -> None:
        """Log a convolution that needs scratch memory."""
        kind = ConvolutionKind(convolution_kind(weight, groups))
        touched = sum(t.numel() * t.element_size() for t in (images, weight, output))
        self._events.append((Event.WORKSPACE, kind * 3 + which, touched))

    def keep(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd keeps (PyTorch's `pack` hook)."""
        storage = tensor.untyped_storage()
        number = self._live.get(storage._cdata)
        if number is not None:
            self._kept[number] = storage.nbytes()
        return tensor

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage; negative for one from before the step."""
        key: int = tensor.untyped_storage()._cdata
        return self._live.get(key, -key)

    def end_forward(self) -> None:
        alive = set(self._live.values())
        self.saved_bytes = sum(size for number, size in self._kept.items() if number in alive)
        self._events.append((Event.END_OF_FORWARD, 0, 0))

    @contextmanager
    def log_gradients(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Note within the block when the gradient of each parameter is complete."""
        hooks = [
            p.register_post_accumulate_grad_hook(self.log_gradient)  # type: ignore[no-untyped-call]
            for p in parameters
            if p.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def log_gradient(self, parameter: Tensor) -> None:
        """Log a complete gradient of this parameter."""
        if parameter.grad is not None:
            storage = parameter.grad.untyped_storage()
            number = self._live.get(storage._cdata)
            if number is not None:
                self._events.append((Event.ACCUMULATE, number, storage.nbytes()))

    def note_gradients(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                number = self._live.get(parameter.grad.untyped_storage()._cdata, NO_BLOCK)
                self.gradients[id(parameter)] = number
