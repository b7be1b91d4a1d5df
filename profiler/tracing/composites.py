"""Composite operators, such as `linear`, before PyTorch takes them apart.

It does so above autograd, so that a dispatch mode of a training step sees their parts only. While a
step is traced, the meta device has kernels of its own for them, which call the trace's recorder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an operator with its arguments, and returns its result."""
_KEY = torch._C.DispatchKey


@cache
def is_composite(func: Any) -> bool:
    """Return whether PyTorch takes the operator apart on every device."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return not has_kernel(func.name(), _KEY.CPU) and bool(
        has_kernel(func.name(), _KEY.CompositeImplicitAutograd)
    )


def decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a composite operator's decomposition in C++; those in Python copy more."""
    return func._op_dk(_KEY.CompositeImplicitAutograd, *args, **kwargs)


class _CompositeKernels:
    """Kernels of composite operators of the meta device; the first trace registers them.

    Each thread has its own recorder; in others, operators run as PyTorch runs them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traces = 0
        self._library: Any = None
        self._local = threading.local()

    @contextmanager
    def use(self, run: Run) -> Iterator[None]:
        """Run composite operators of this thread by this function within the block."""
        with self._lock:
            if self._traces == 0:
                self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
                for func in _composites():
                    self._library.impl(func, partial(self._kernel, func), "AutogradMeta")
            self._traces += 1
        before = getattr(self._local, "run", decompose)
        self._local.run = run
        try:
            yield
        finally:
            self._local.run = before
            with self._lock:
                self._traces -= 1
                if self._traces == 0:
                    self._library._destroy()

    def _kernel(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        run: Run = getattr(self._local, "run", decompose)
        return run(func, args, kwargs)


@cache
def _composites() -> tuple[Any, ...]:
    """Return the composite operators of tensors, except those that name their axes."""
    composites = []
    for name in torch._C._dispatch_get_all_op_names():
        operator, _, overload = name.removeprefix("aten::").partition(".")
        packet = getattr(torch.ops.aten, operator, None) if name.startswith("aten::") else None
        func = getattr(packet, overload or "default", None)
        if func is not None and is_composite(func) and "Dimname" not in str(func._schema):
            composites.append(func)
    return tuple(composites)


KERNELS = _CompositeKernels()
