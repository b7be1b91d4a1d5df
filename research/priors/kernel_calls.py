"""Single kernels that others published, as evidence for the constants of step times.

A `KernelCall` is the forward pass of one operator with its shapes, type and layout. On the meta
device, the recorder of whole steps says which kernels it is, so its published time is evidence for
the same constants as that of a step. It differs in what surrounds it: the launch is inside, and
neither an optimizer nor the rest of a step is.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from research.priors.joint_fit import Evidence
from trappm.learner.interface import Array, Workload
from trappm.profiler.devices.catalogue import DeviceSpec
from trappm.profiler.errors import InputError
from trappm.profiler.records import Graph, MemoryFormat, Phase, Precision
from trappm.profiler.records.step_scope import StepScope
from trappm.profiler.traced_step import TRACED_BATCH_SIZES, StepKernels
from trappm.profiler.tracing.allocation_log import AllocationLog
from trappm.profiler.tracing.gpu_functions import GpuFunctions
from trappm.profiler.tracing.kernel_log import KernelLog, kernel_table
from trappm.profiler.tracing.step_recorder import StepRecorder

MAX_SIZE = 1 << 32
"""Larger sizes are damage or typing errors."""


class Operator(enum.StrEnum):
    """Operator of a call; `_SIZES` has the sizes of each."""

    LINEAR = "linear"
    """(batch, rows, inputs) times (inputs, outputs), with bias."""
    MATMUL = "matmul"
    """`batch` products of (rows, depth) and (depth, columns)."""
    CONV2D = "conv2d"
    """Square images and windows, padded by `padding` on all sides, without bias."""
    LAYER_NORM = "layer-norm"
    SOFTMAX = "softmax"
    """Over the last axis."""
    ATTENTION = "attention"
    """Fused; queries, keys and values of one length, without mask."""
    ADD = "add"
    ADD_SCALAR = "add-scalar"
    MULTIPLY = "multiply"
    MULTIPLY_SCALAR = "multiply-scalar"
    DIVIDE = "divide"
    DIVIDE_SCALAR = "divide-scalar"
    POWER = "power"
    POWER_SCALAR = "power-scalar"
    """The square."""
    RELU = "relu"
    GELU = "gelu"
    TANH = "tanh"


class DataType(enum.StrEnum):
    """Type of the tensors that are read and written."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


_SIZES: dict[Operator, tuple[str, ...]] = {
    **dict.fromkeys(Operator, ("batch", "width")),
    Operator.LINEAR: ("batch", "rows", "inputs", "outputs"),
    Operator.MATMUL: ("batch", "rows", "depth", "columns"),
    Operator.CONV2D: ("batch", "inputs", "outputs", "height", "window", "stride", "groups"),
    Operator.ATTENTION: ("batch", "heads", "length", "width"),
}
_DTYPES = {
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
}
_PRECISIONS = {
    DataType.FP32: Precision.FP32,
    DataType.FP16: Precision.AMP_FP16,
    DataType.BF16: Precision.AMP_BF16,
}
_LAYOUTS = {
    MemoryFormat.CONTIGUOUS: torch.contiguous_format,
    MemoryFormat.CHANNELS_LAST: torch.channels_last,
}


@dataclass(frozen=True)
class KernelCall:
    """An operator with everything that changes its time on a device.

    Raises:
        InputError: Wrong sizes, or channels that the groups do not divide.
    """

    operator: Operator
    sizes: tuple[int, ...]
    """Sizes in the order of `_SIZES`."""
    data_type: DataType = DataType.FP32
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    """Layout of images."""

    def __post_init__(self) -> None:
        for name, size in zip(_SIZES[self.operator], self.sizes, strict=True):
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_SIZE:
                raise InputError(
                    f"{name} of {self.operator} is {size!r}; it must be a whole number from 1 to "
                    f"{MAX_SIZE:,}"
                )
        if self.operator is Operator.CONV2D and (
            self["inputs"] % self["groups"] or self["outputs"] % self["groups"]
        ):
            raise InputError(f"{self['groups']} groups do not divide the channels of {self.sizes}")

    @classmethod
    def of(
        cls,
        operator: Operator,
        data_type: DataType = DataType.FP32,
        memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
        **sizes: int,
    ) -> Self:
        """Return a call with its sizes by name; raises InputError as the class."""
        ordered = tuple(sizes[name] for name in _SIZES[operator])
        return cls(operator, ordered, data_type, memory_format)

    def __getitem__(self, name: str) -> int:
        """Return a size by its name."""
        return self.sizes[_SIZES[self.operator].index(name)]

    @property
    def padding(self) -> int:
        """Padding of a window: half of its size, rounded down."""
        return (self["window"] - 1) // 2


_SCALAR = 2.0
_POINTWISE: dict[Operator, Callable[..., Tensor]] = {
    Operator.ADD: torch.add,
    Operator.ADD_SCALAR: lambda x: torch.add(x, _SCALAR),
    Operator.MULTIPLY: torch.mul,
    Operator.MULTIPLY_SCALAR: lambda x: torch.mul(x, _SCALAR),
    Operator.DIVIDE: torch.div,
    Operator.DIVIDE_SCALAR: lambda x: torch.div(x, _SCALAR),
    Operator.POWER: torch.pow,
    Operator.POWER_SCALAR: lambda x: torch.pow(x, _SCALAR),
    Operator.RELU: torch.relu,
    Operator.GELU: F.gelu,
    Operator.TANH: torch.tanh,
    Operator.SOFTMAX: partial(torch.softmax, dim=-1),
}
_OF_TWO = {Operator.ADD, Operator.MULTIPLY, Operator.DIVIDE, Operator.POWER}


def _prepared(call: KernelCall) -> Callable[[], Any]:
    """Return a function that runs the call on the meta device."""

    def tensor(*names: str) -> Tensor:
        shape = tuple(call[name] for name in names)
        return torch.empty(shape, dtype=_DTYPES[call.data_type], device="meta")

    match call.operator:
        case Operator.LINEAR:
            x, weight = tensor("batch", "rows", "inputs"), tensor("outputs", "inputs")
            return partial(F.linear, x, weight, tensor("outputs"))
        case Operator.MATMUL:
            left, right = tensor("batch", "rows", "depth"), tensor("batch", "depth", "columns")
            return partial(torch.bmm, left, right)
        case Operator.CONV2D:
            layout, window = _LAYOUTS[call.memory_format], call["window"]
            images = tensor("batch", "inputs", "height", "height").contiguous(memory_format=layout)
            shape = call["outputs"], call["inputs"] // call["groups"], window, window
            weight = torch.empty(shape, dtype=images.dtype, device="meta")
            return partial(
                F.conv2d,
                images,
                weight.contiguous(memory_format=layout),
                stride=call["stride"],
                padding=call.padding,
                groups=call["groups"],
            )
        case Operator.LAYER_NORM:
            x, weight, bias = tensor("batch", "width"), tensor("width"), tensor("width")
            return partial(F.layer_norm, x, (call["width"],), weight, bias)
        case Operator.ATTENTION:
            parts = (tensor("batch", "heads", "length", "width") for _ in range(3))
            return partial(F.scaled_dot_product_attention, *parts)
    count = 2 if call.operator in _OF_TWO else 1
    return partial(_POINTWISE[call.operator], *(tensor("batch", "width") for _ in range(count)))


def _recorded(call: KernelCall) -> KernelLog:
    kernels = KernelLog()
    functions = GpuFunctions(kernels)
    run = _prepared(call)
    with StepRecorder(AllocationLog(()), kernels, functions), functions, torch.inference_mode():
        run()
    return kernels


def kernels_of(call: KernelCall) -> StepKernels:
    """Return the kernels of a call for every batch size.

    Raises:
        TrappmError: A size is too large for a kernel.
    """
    first, second = (
        _recorded(replace(call, sizes=(size, *call.sizes[1:]))) for size in TRACED_BATCH_SIZES
    )
    return StepKernels(
        table=kernel_table(first, second, TRACED_BATCH_SIZES),
        parameter_tensors=0,
        parameters=0,
        precision=_PRECISIONS[call.data_type],
        memory_format=call.memory_format,
    )


@lru_cache(maxsize=4096)
def kernel_workload(call: KernelCall) -> Workload:
    """Return a kernel alone as a step of one kernel, which waits for no host."""
    kernels = kernels_of(call)
    return Workload(
        graph=Graph.empty(call["batch"]),
        precision=kernels.precision,
        memory_format=call.memory_format,
        phase=Phase.TRAIN,
        scope=StepScope(updates=False, waits_for_host=False),
        kernels=kernels,
    )


def kernel_evidence(
    device: str, source: str, spec: DeviceSpec, times_ms: Iterable[tuple[KernelCall, float]]
) -> Evidence:
    """Return kernels that one source timed on a device as evidence.

    Args:
        device: Device whose constants they are evidence for.
        source: Source whose launches are within the times.
        spec: Specification of the device, without TF32 where none of them used it.
        times_ms: Time of each call in ms.
    """
    rows = [(kernel_workload(call), time_ms) for call, time_ms in times_ms]
    values: Array = np.log([time_ms for _, time_ms in rows])
    return Evidence(device, source, spec, [workload for workload, _ in rows], values)
