"""Runs kernel calls on a device, or on the meta device to trace the same kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trappm.profiler.errors import InputError
from trappm.profiler.kernels.kernel_call import DataType, Direction, KernelCall, Operator
from trappm.profiler.records import MemoryFormat, Precision
from trappm.profiler.simulation.kernel_profile import KernelProfile, KernelTable
from trappm.profiler.simulation.step_trace import TRACED_BATCH_SIZES, Pass
from trappm.profiler.tracing.gpu_functions import GpuFunctions
from trappm.profiler.tracing.kernel_log import AllocationLog, KernelLog, kernel_table
from trappm.profiler.tracing.step_recorder import StepRecorder

DTYPES = {
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
}
_LAYOUTS = {
    MemoryFormat.CONTIGUOUS: torch.contiguous_format,
    MemoryFormat.CHANNELS_LAST: torch.channels_last,
}
_OTHER_LAYOUT = {
    MemoryFormat.CONTIGUOUS: torch.channels_last,
    MemoryFormat.CHANNELS_LAST: torch.contiguous_format,
}
_LEARNING_RATE = 1e-6
_DRAWN = 1 << 16
"""Number of random numbers, which are repeated: zeros would draw less power."""

Run = Callable[[], Any]


class PreparedCall:
    """The tensors of a call on a device, and a function that runs it.

    Args:
        call: Call to run.
        device: Device of its tensors.
    """

    def __init__(self, call: KernelCall, device: torch.device) -> None:
        self._call = call
        self._device = device
        self._dtype = DTYPES[call.data_type]
        self._layout = _LAYOUTS[call.memory_format]
        self._inputs: list[Tensor] = []
        """Tensors whose gradients are computed."""
        self._weights: list[Tensor] = []
        self._others: list[Tensor] = []
        """Biases and the like: their gradients belong to the whole backward pass only."""
        self._forward = self._made()

    def run(self) -> Run:
        """Return a function that runs the call once; a backward pass has its forward pass done.

        Raises:
            RuntimeError: Any error of torch, including missing memory.
        """
        if self._call.direction is Direction.FORWARD:
            return partial(_without_gradients, self._forward)
        wanted = self._wanted()
        for tensor in wanted:
            tensor.requires_grad_()
        output = self._forward()
        gradient = self._filled(tuple(output.shape), output)
        return partial(
            torch.autograd.grad, [output], wanted, grad_outputs=[gradient], retain_graph=True
        )

    def _wanted(self) -> list[Tensor]:
        """Return the tensors whose gradients the call computes."""
        if self._call.direction is Direction.DATA_GRADIENT:
            return self._inputs
        if self._call.direction is Direction.WEIGHT_GRADIENT:
            return self._weights
        return self._inputs + self._weights + self._others

    def _made(self) -> Run:
        call = self._call
        operator = call.operator
        if call.form.is_collective:
            raise InputError(f"{operator} is of several ranks; name a device such as a100x4")
        if operator in _POINTWISE:
            return partial(_POINTWISE[operator], *self._rows(operator))
        return _MAKERS[operator](self)

    def _rows(self, operator: Operator) -> list[Tensor]:
        shape = self._call["batch"], self._call["width"]
        count = 2 if operator in _OF_TWO else 1
        self._inputs += [self._filled(shape) for _ in range(count)]
        if self._device.type != "meta":  # which would load PyTorch's compiler
            for tensor in self._inputs:  # there are powers and quotients of what is not close to 0
                tensor.abs_().add_(0.5)
        return self._inputs

    def _linear(self) -> Run:
        call = self._call
        x = self._input(call["batch"], call["rows"], call["inputs"])
        weight = self._weight(call["outputs"], call["inputs"])
        return partial(F.linear, x, weight, self._other(call["outputs"]))

    def _matmul(self) -> Run:
        call = self._call
        left = self._input(call["batch"], call["rows"], call["depth"])
        return partial(torch.bmm, left, self._input(call["batch"], call["depth"], call["columns"]))

    def _conv2d(self) -> Run:
        call = self._call
        images = self._images("inputs")
        window, groups = call["window"], call["groups"]
        shape = call["outputs"], call["inputs"] // groups, window, window
        weight = self._weight(*shape).contiguous(memory_format=self._layout)
        self._weights[:] = [weight]
        return partial(
            F.conv2d, images, weight, stride=call["stride"], padding=call.padding, groups=groups
        )

    def _batch_norm(self, *, training: bool = True) -> Run:
        images, channels = self._images(), self._call["channels"]
        # Statistics and weights stay in 32 bits, as under autocast.
        mean = torch.zeros(channels, device=self._device)
        weight = torch.ones(channels, device=self._device)
        bias = torch.zeros(channels, device=self._device)
        self._weights, self._others = [weight], [bias]
        return partial(
            F.batch_norm, images, mean, torch.ones_like(mean), weight, bias, training=training
        )

    def _layer_norm(self) -> Run:
        call = self._call
        x = self._input(call["batch"], call["width"])
        weight = self._weight(call["width"])
        return partial(F.layer_norm, x, (call["width"],), weight, self._other(call["width"]))

    def _softmax(self) -> Run:
        return partial(torch.softmax, self._input(self._call["batch"], self._call["width"]), dim=-1)

    def _attention(self) -> Run:
        shape = tuple(self._call[name] for name in ("batch", "heads", "length", "width"))
        query, key, value = (self._input(*shape) for _ in range(3))
        return partial(F.scaled_dot_product_attention, query, key, value)

    def _add_channels(self) -> Run:
        return partial(torch.add, self._images(), self._other(self._call["channels"], 1, 1))

    def _add_layouts(self) -> Run:
        images = self._images()
        other = images.contiguous(memory_format=_OTHER_LAYOUT[self._call.memory_format])
        return partial(torch.add, images, other)

    def _cast(self) -> Run:
        shape = self._call["batch"], self._call["width"]
        return partial(self._filled(shape, dtype=torch.float32).to, self._dtype)

    def _copy(self) -> Run:
        source = self._input(self._call["batch"], self._call["width"])
        return partial(torch.empty_like(source).copy_, source)

    def _relayout(self) -> Run:
        layout = _OTHER_LAYOUT[self._call.memory_format]
        return partial(self._images().contiguous, memory_format=layout)

    def _fill(self) -> Run:
        return partial(self._input(self._call["batch"], self._call["width"]).fill_, 0.0)

    def _mean(self) -> Run:
        return partial(torch.mean, self._images(), (2, 3))

    def _max_pool(self) -> Run:
        window, stride = self._call["window"], self._call["stride"]
        return partial(F.max_pool2d, self._images(), window, stride, self._call.padding)

    def _embedding(self) -> Run:
        call = self._call
        entries = call["entries"]
        shape = call["batch"], call["length"]
        # A step with a large odd factor: neighbours lie far apart, and all of the table is used.
        numbers = torch.arange(shape[0] * shape[1], device=self._device)
        numbers = numbers.mul_(7_919).remainder_(entries).view(shape)
        return partial(F.embedding, numbers, self._weight(entries, call["width"]))

    def _optimizer(self) -> Run:
        call = self._call
        parameters = [
            torch.nn.Parameter(self._filled((call["elements"],))) for _ in range(call["tensors"])
        ]
        for parameter in parameters:
            parameter.grad = self._filled((call["elements"],))
        if call.operator is Operator.ADAM:
            return torch.optim.Adam(parameters, lr=_LEARNING_RATE).step
        momentum = 0.9 if call.operator is Operator.MOMENTUM else 0.0
        return torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=momentum).step

    def _launch(self) -> Run:
        element = self._filled((1,))
        return partial(_repeated, partial(element.mul_, 1.0), self._call["kernels"])

    def _images(self, channels: str = "channels") -> Tensor:
        call = self._call
        shape = call["batch"], call[channels], call["height"], call["height"]
        images = self._filled(shape).contiguous(memory_format=self._layout)
        self._inputs.append(images)
        return images

    def _input(self, *shape: int) -> Tensor:
        self._inputs.append(self._filled(shape))
        return self._inputs[-1]

    def _weight(self, *shape: int) -> Tensor:
        self._weights.append(self._filled(shape))
        return self._weights[-1]

    def _other(self, *shape: int) -> Tensor:
        self._others.append(self._filled(shape))
        return self._others[-1]

    def _filled(
        self, shape: tuple[int, ...], like: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return a tensor of normal random numbers, with layout and type of `like`."""
        if like is None:
            tensor = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        else:
            tensor = torch.empty_like(like)
        if self._device.type == "meta":
            return tensor
        # In the order of memory, whatever the layout.
        flat = torch.as_strided(tensor, (tensor.numel(),), (1,))
        generator = torch.Generator(self._device).manual_seed(len(shape))
        drawn = torch.randn(min(_DRAWN, flat.numel()), generator=generator, device=self._device)
        drawn = drawn.to(flat.dtype)
        whole = flat.numel() // len(drawn) * len(drawn)
        flat[:whole].view(-1, len(drawn)).copy_(drawn)
        flat[whole:].copy_(drawn[: flat.numel() - whole])
        return tensor


_MAKERS: dict[Operator, Callable[[PreparedCall], Run]] = {
    Operator.LINEAR: PreparedCall._linear,
    Operator.MATMUL: PreparedCall._matmul,
    Operator.CONV2D: PreparedCall._conv2d,
    Operator.BATCH_NORM: PreparedCall._batch_norm,
    Operator.FROZEN_BATCH_NORM: partial(PreparedCall._batch_norm, training=False),
    Operator.LAYER_NORM: PreparedCall._layer_norm,
    Operator.SOFTMAX: PreparedCall._softmax,
    Operator.ATTENTION: PreparedCall._attention,
    Operator.ADD_CHANNELS: PreparedCall._add_channels,
    Operator.ADD_LAYOUTS: PreparedCall._add_layouts,
    Operator.CAST: PreparedCall._cast,
    Operator.COPY: PreparedCall._copy,
    Operator.RELAYOUT: PreparedCall._relayout,
    Operator.FILL: PreparedCall._fill,
    Operator.MEAN: PreparedCall._mean,
    Operator.MAX_POOL: PreparedCall._max_pool,
    Operator.EMBEDDING: PreparedCall._embedding,
    Operator.SGD: PreparedCall._optimizer,
    Operator.MOMENTUM: PreparedCall._optimizer,
    Operator.ADAM: PreparedCall._optimizer,
    Operator.LAUNCH: PreparedCall._launch,
}
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
}
_OF_TWO = {Operator.ADD, Operator.MULTIPLY, Operator.DIVIDE, Operator.POWER}


@contextlib.contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 for products of fp32 tensors within the block."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


def _without_gradients(forward: Run) -> None:
    with torch.inference_mode():
        forward()


def _repeated(kernel: Run, count: int) -> None:
    for _ in range(count):
        kernel()


PRECISIONS = {
    DataType.FP32: Precision.FP32,
    DataType.FP16: Precision.AMP_FP16,
    DataType.BF16: Precision.AMP_BF16,
}


def kernel_profile_of(call: KernelCall) -> KernelProfile:
    """Return the kernels of a call for every batch size.

    Both phases have the kernels of the call's direction. An optimizer's step has only parameters,
    from which simulations derive its kernels.

    Raises:
        TrappmError: A size is too large for a kernel.
    """
    optimizer = call.optimizer
    if optimizer is not None:
        table, tensors = _table(KernelLog(), KernelLog()), call["tensors"]
        parameters = tensors * call["elements"]
    else:
        first, second = (_recorded(call.with_batch(size)) for size in TRACED_BATCH_SIZES)
        table, tensors, parameters = _table(first, second), 0, 0
        backward = table.passes != Pass.FORWARD
        keep = backward == (call.direction is not Direction.FORWARD)
        table = KernelTable(**{f.name: getattr(table, f.name)[keep] for f in fields(table)})
    return KernelProfile(
        train=table,
        infer=table,
        parameter_tensors=tensors,
        parameters=parameters,
        precision=PRECISIONS[call.data_type],
        memory_format=call.memory_format,
    )


def _table(first: KernelLog, second: KernelLog) -> KernelTable:
    return kernel_table(first, second, TRACED_BATCH_SIZES)


def _recorded(call: KernelCall) -> KernelLog:
    """Run the call on the meta device, with the forward pass if it needs one."""
    kernels = KernelLog()
    functions = GpuFunctions(kernels)
    prepared = PreparedCall(call, torch.device("meta"))
    with StepRecorder(AllocationLog(()), kernels, functions), functions:
        prepared.run()()
    return kernels
