"""State of PyTorch that a caller has set, which answers neither depend on nor change."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def independent_of_caller(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Run a function in PyTorch's defaults, and leave all modes and random states as they were.

    Before torch is imported the caller cannot have set anything, so it is not imported for this.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with _defaults():
            return function(*args, **kwargs)

    return run


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Switch off the caller's hooks of saved tensors, such as those of `save_on_cpu`."""
    from torch._C import _autograd
    from torch.autograd.graph import saved_tensors_hooks

    why = _autograd._saved_tensors_hooks_get_disabled_error_message()
    if why is not None:
        _autograd._saved_tensors_hooks_enable()
    has_hooks = _autograd._top_saved_tensors_default_hooks(False) is not None
    same: AbstractContextManager[object] = nullcontext()
    if has_hooks:  # only the last hooks apply
        same = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    try:
        with same:
            yield
    finally:
        if why is not None:
            _autograd._saved_tensors_hooks_disable(why)


@contextmanager
def _defaults() -> Iterator[None]:
    """Provide PyTorch's defaults: gradients, fp32 on the CPU, no autocast, no anomaly detection."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy"):
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        if sys.modules.get("torch"):
            import torch
            from torch._C import _len_torch_function_stack
            from torch.overrides import _pop_mode_temporarily
            from torch.utils._python_dispatch import _disable_current_modes

            stack.callback(torch.random.set_rng_state, torch.random.get_rng_state())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            if torch.get_default_dtype() is not torch.float32:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(torch.float32)
            stack.enter_context(_without_hooks())
            stack.enter_context(torch._C._EnableTorchFunction())
            stack.enter_context(_disable_current_modes())
            for _ in range(_len_torch_function_stack()):  # such as the default device
                stack.enter_context(_pop_mode_temporarily())
        yield
