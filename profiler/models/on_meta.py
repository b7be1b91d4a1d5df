"""Models without weights: shapes and types only, on PyTorch's meta device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils._device import DeviceContext

from trappm.profiler.errors import InputError, UnsupportedModelError, one_line
from trappm.profiler.models.own_modules import is_own_module
from trappm.profiler.models.sources import source_of
from trappm.profiler.records import MemoryFormat, Precision

EAGER = "torch.compile is left out: this is the step in eager mode"
"""Remark about a compiled module."""


def eager(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wrapped, or the module itself."""
    while isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
        module = inner
    return module


def is_compiled(module: nn.Module) -> bool:
    return any(
        part._compiled_call_impl is not None or eager(part) is not part for part in module.modules()
    )


def on_meta(
    model: str | nn.Module,
    input_size: object,
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
    precision: Precision = Precision.FP32,
) -> nn.Module:
    """Return the model of this name, or a copy of this module, on the meta device.

    Args:
        model: Name of an architecture, or a module on any device, which stays as it is.
        input_size: Input size of an architecture, in pixels or tokens.
        memory_format: Layout of the weights.
        precision: Precision of the step; `bf16` is the weights' own.

    Raises:
        UnknownArchitectureError, InputError, UnsupportedModelError: As `sources.create_model`; or a
        module that cannot be copied, has lazy layers, or no such memory format.
    """
    module = _create(model, input_size)
    if precision is Precision.BF16:
        module = module.to(torch.bfloat16)
    if memory_format is MemoryFormat.CONTIGUOUS:
        return module
    if any(p.dim() == 5 for p in module.parameters()):
        raise InputError("PyTorch has no channels-last for modules of 3-D convolutions")
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


class _OnMeta(DeviceContext):
    """The meta device without the computation of initial weights, which takes half the time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FILLING and args[0].is_meta:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


_NAMES = "normal_ uniform_ zero_ fill_ mul_ div_ add_ sub_ clamp_ erfinv_"
_FILLING = frozenset(getattr(torch.Tensor, name) for name in _NAMES.split())


def _create(model: str | nn.Module, input_size: object) -> nn.Module:
    if isinstance(model, str):
        if not isinstance(input_size, int):
            raise InputError(f"{model} is asked for samples of {input_size}; give their size")
        source = source_of(model)  # its imports make real tensors
        if is_own_module(model):  # its constructor may read numbers
            return _create(source.create_model(model, input_size), input_size)
        with _OnMeta("meta"):
            return source.create_model(model, input_size)
    if any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        raise UnsupportedModelError(
            f"{type(model).__name__} has lazy layers, which do not know their sizes yet; run the "
            "module once, on an input as it will get, and try again"
        )
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        raise UnsupportedModelError(
            f"{type(model).__name__} has code of torch.jit, which cannot be traced; give the "
            "module that torch.jit.script or torch.jit.trace was called with"
        )
    weights: dict[int, Any] = {
        id(tensor): tensor.detach().to("meta")
        for part in model.modules()
        for tensor in (*part.buffers(recurse=False), *vars(part).values())
        if isinstance(tensor, torch.Tensor)
    }
    weights |= {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()
    }
    try:
        for part in reversed(list(model.modules())):  # the innermost first
            if eager(part) is not part:
                weights[id(part)] = copy.deepcopy(eager(part), weights)
        return copy.deepcopy(eager(model), weights)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be copied to be traced: {one_line(error)}"
        ) from error
