"""PyTorch as on a machine with an idle GPU, as long as a step is traced."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import wraps
from threading import Lock, local
from typing import Any, Self

import torch

from trappm.profiler.tracing.gpu import torchvision_operators
from trappm.profiler.tracing.gpu.flex_attention import OVERRIDABLE

_construct_autocast, _enter_autocast = torch.autocast.__init__, torch.autocast.__enter__


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
    if device_type in ("cuda", "meta") and TRACED_GPU.is_of_this_thread:
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
    if self.device != "cuda" or not TRACED_GPU.is_of_this_thread:
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
        self._local = local()

    @property
    def is_of_this_thread(self) -> bool:
        """True while this thread traces."""
        return getattr(self._local, "traces", 0) > 0

    def __enter__(self) -> None:
        self._local.traces = getattr(self._local, "traces", 0) + 1
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
        self._local.traces -= 1
        with self._lock:
            self._traces -= 1
            if self._traces == 0:
                self._changes.close()


TRACED_GPU = _TracedGpu()
