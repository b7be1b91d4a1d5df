"""Traces the kernels of a training step and of an inference step without a device.

    model on the meta device --forward, loss, backward--> every operator --> its kernel

Each step runs once, at a batch size that is a prime larger than any size in a model: what divides
by it is there once for each sample, the rest is fixed. Where a GPU would take another path than the
meta device (autocast, fused attention, recurrent layers), the trace imitates the GPU. An operator
that nobody described is a kernel that reads its inputs and writes its outputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trappm.profiler.errors import UnsupportedModelError, one_line
from trappm.profiler.graphs.module_graph import on_meta
from trappm.profiler.models.model_input import Sample
from trappm.profiler.records import MemoryFormat, Phase, Precision
from trappm.profiler.simulation.gpu_functions import ALLOCATIONS
from trappm.profiler.simulation.kernel_functions import KernelFunctions
from trappm.profiler.simulation.kernel_profile import (
    KernelKind,
    KernelProfile,
    KernelTable,
    Pass,
    Size,
)
from trappm.profiler.simulation.kernel_rules import (
    Product,
    convolution,
    convolution_kind,
    kind_of,
    name_of,
    product_of,
    shape_of,
)
from trappm.profiler.simulation.step_recorder import loss_of

TRACED_BATCH_SIZE = 10_007
"""A prime: no size in a model divides by it by chance."""

_ATEN = torch.ops.aten
_HALF = {Precision.AMP_FP16: torch.float16, Precision.AMP_BF16: torch.bfloat16}
_HALVES = frozenset(_HALF.values())
_NOT_A_PRODUCT = Product(0, 0, 0, 0)


def trace_kernels(
    model: nn.Module,
    input_size: int | Sample,
    *,
    precision: Precision = Precision.FP32,
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
    fused_attention: bool = True,
    batch_size: int | None = None,
) -> KernelProfile:
    """Traces both steps of a model that lives on the meta device.

    Args:
        model: maps (B, 3, H, W) to class scores; its mode (train or eval) changes.
        input_size: height and width of the images, in pixels; or the sample of another input.
        precision: what autocast does to types.
        memory_format: of images and weights.
        fused_attention: whether the software stack has a kernel for attention.
        batch_size: the only one that the model knows; the profile then holds for that one.

    Raises:
        UnsupportedModelError: a step cannot run without data; with the reason.
    """
    sample = Sample.of(input_size)
    channels_last = memory_format is MemoryFormat.CHANNELS_LAST
    layout = torch.channels_last if channels_last else torch.preserve_format
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    tables: dict[Phase, KernelTable] = {}
    for phase in Phase:
        recorder = _Recorder(None if batch_size else TRACED_BATCH_SIZE)
        functions = KernelFunctions(recorder.add_attention, _HALF.get(precision), fused_attention)
        images = sample.batch(batch_size or TRACED_BATCH_SIZE)
        if channels_last and images.dim() == 4:
            images = images.contiguous(memory_format=layout)
        try:
            _run(model, images, recorder, functions, phase)
        except Exception as error:
            raise UnsupportedModelError(
                f"the kernels of the {phase} step cannot be traced: {one_line(error)}"
            ) from error
        tables[phase] = recorder.table()
        if phase is Phase.TRAIN:
            trained = [p for p in model.parameters() if p.grad is not None]
            model.zero_grad(set_to_none=True)
    return KernelProfile(
        train=tables[Phase.TRAIN],
        infer=tables[Phase.INFER],
        parameter_tensors=len(trained),
        parameters=sum(p.numel() for p in trained),
        precision=precision,
        memory_format=memory_format,
        fused_attention=fused_attention,
        batch_size=batch_size,
    )


def _run(
    model: nn.Module, images: Tensor, recorder: _Recorder, functions: KernelFunctions, phase: Phase
) -> None:
    training = phase is Phase.TRAIN
    model.train(training)
    model.zero_grad(set_to_none=True)
    target = torch.empty(images.shape[0], dtype=torch.long, device="meta")
    grad = torch.enable_grad() if training else torch.no_grad()
    with recorder, functions, torch.device("meta"), grad, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes read while tracing, for instance
        output = model(images)
        if training:
            loss = loss_of(output, target)
            del output
            recorder.backward = True
            loss.backward()  # type: ignore[no-untyped-call]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns every operator into its kernel, and counts equal ones."""

    def __init__(self, batch_size: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.backward = False
        self._batch_size = batch_size
        self._counts: dict[tuple[int, ...], int] = {}

    def table(self) -> KernelTable:
        rows = np.array(list(self._counts), dtype=np.int64).reshape(-1, 7 + 2 * len(Size))
        return KernelTable(
            kinds=rows[:, 0].astype(np.int8),
            passes=rows[:, 1].astype(np.int8),
            half=rows[:, 2].astype(np.bool_),
            channels_last=rows[:, 3].astype(np.bool_),
            windows=rows[:, 4].astype(np.int32),
            strides=rows[:, 5].astype(np.int32),
            pixels=rows[:, 6].astype(np.int32),
            sizes=rows[:, 7:].reshape(-1, len(Size), 2),
            counts=np.array(list(self._counts.values()), dtype=np.int32),
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN.convolution_backward.default:
            return self._convolution_backward(func, args, kwargs)
        allocations = ALLOCATIONS.get(func)
        output = NotImplemented
        if allocations is not None:
            with self:  # so that the copies which it makes are seen
                output = allocations(*args, **kwargs)
        if output is NotImplemented:
            output = func(*args, **kwargs)
        if func is _ATEN.convolution.default:
            return self._convolution(args, output)
        kind = kind_of(func)
        if kind is not None:
            self._operator(kind, func, args, kwargs, output)
        return output

    def _operator(
        self, kind: KernelKind, func: Any, args: Sequence[Any], kwargs: Any, output: Any
    ) -> None:
        name = name_of(func)
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        written = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        if not written or (name == "contiguous" and args[0].stride() == output.stride()):
            return
        which = Pass.DATA_GRADIENT if self.backward else Pass.FORWARD
        product = product_of(name, args)
        if product is not None:
            if self.backward and kind is KernelKind.LINEAR and self._scales(product.depth):
                which = Pass.WEIGHT_GRADIENT
        elif kind is KernelKind.ELEMENTWISE:
            if any(t.stride() != written[0].stride() for t in read if t.dim()):
                whole = [t for t in read if t.shape == written[0].shape and 0 not in t.stride()]
                same = all(t.stride() == written[0].stride() for t in whole)
                kind = KernelKind.BROADCAST if same else KernelKind.STRIDED
        elif kind is KernelKind.CAST and read and read[0].dtype == written[0].dtype:
            kind = KernelKind.COPY
        elif kind is KernelKind.FILL:
            read = []
        elif kind is KernelKind.BATCH_NORM and args[7 if "backward" in name else 5] is True:
            read = read + read[: 2 if "backward" in name else 1]  # statistics first
        if name == "copy":
            read = read[1:]
        self._add(kind, which, read, written, product or shape_of(kind, name, args, written[0]))

    def _convolution(self, args: Sequence[Any], output: Tensor) -> Tensor:
        images, weight, bias, stride, *_, transposed, _, groups = args[:9]
        kind, layout = convolution_kind(weight, groups), _layout(images, weight)
        output = _written(output, layout)
        if transposed:
            product = convolution(
                Pass.DATA_GRADIENT, output, weight, images, stride, groups
            )  # as PyTorch runs it
        else:
            product = convolution(Pass.FORWARD, images, weight, output, stride, groups)
        images = self._read(images, layout)
        self._add(kind, Pass.FORWARD, [images, weight], [output], product)
        if bias is not None:
            self._add(KernelKind.BROADCAST, Pass.FORWARD, [output, bias], [output])
        return output

    def _convolution_backward(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        gradients = func(*args, **kwargs)
        gradient, images, weight = args[:3]
        stride, transposed, groups, wanted = args[4], args[7], args[9], args[10]
        kind, layout = convolution_kind(weight, groups), _layout(images, weight)
        gradient = self._read(gradient, layout)
        if wanted[0]:
            gradients = (_written(gradients[0], layout), *gradients[1:])
        source, result = (gradient, images) if transposed else (images, gradient)
        data = Pass.FORWARD if transposed else Pass.DATA_GRADIENT
        if wanted[0]:
            product = convolution(data, source, weight, result, stride, groups)
            read = [gradient, weight]
            self._add(kind, Pass.DATA_GRADIENT, read, [gradients[0]], product)
        if wanted[1]:
            product = convolution(Pass.WEIGHT_GRADIENT, source, weight, result, stride, groups)
            self._add(kind, Pass.WEIGHT_GRADIENT, [gradient, images], [gradients[1]], product)
        if wanted[2]:
            self._add(KernelKind.REDUCTION, Pass.DATA_GRADIENT, [gradient], [gradients[2]])
        return gradients

    def _read(self, images: Tensor, layout: torch.memory_format) -> Tensor:
        """The images as cuDNN takes them: copied if they have another layout."""
        if images.dim() != 4 or images.is_contiguous(memory_format=layout):
            return images
        with self:
            return images.contiguous(memory_format=layout)

    def add_attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output: Tensor
    ) -> None:
        """A fused attention; its backward pass computes five products where forward has two."""
        products, length, width = query.shape[:-2].numel(), query.shape[-2], query.shape[-1]
        both = width + value.shape[-1]
        read = [query, key, value] + ([] if mask is None else [mask])
        written = [output]
        if self.backward:
            both = 3 * width + 2 * value.shape[-1]
            read, written = [*read, output, output], [query, key, value]
        which = Pass.DATA_GRADIENT if self.backward else Pass.FORWARD
        shape = Product(length, key.shape[-2], both, products)
        self._add(KernelKind.ATTENTION, which, read, written, shape)

    def _add(
        self,
        kind: KernelKind,
        which: Pass,
        read: Sequence[Tensor],
        written: Sequence[Tensor],
        product: Product = _NOT_A_PRODUCT,
    ) -> None:
        read_fixed, read_slope = self._bytes(read)
        written_fixed, written_slope = self._bytes(written)
        if not (read_fixed or read_slope or written_fixed or written_slope):
            return
        row = (
            int(kind),
            int(which),
            any(t.dtype in _HALVES for t in (read[:2] or written)),
            any(map(_channels_last, (*read[:1], *written[:1]))),
            product.window,
            product.stride,
            product.pixels,
            read_fixed,
            read_slope,
            written_fixed,
            written_slope,
            *self._affine(product.flops),
            *self._affine(product.rows),
            *self._affine(product.columns),
            *self._affine(product.depth),
            *self._affine(product.products),
        )
        self._counts[row] = self._counts.get(row, 0) + 1

    def _bytes(self, tensors: Sequence[Tensor]) -> tuple[int, int]:
        fixed = slope = 0
        for tensor in tensors:
            size = _elements(tensor) * tensor.element_size()
            if self._scales(size):
                slope += size // self._batch_size  # type: ignore[operator]
            else:
                fixed += size
        return fixed, slope

    def _scales(self, size: int) -> bool:
        return self._batch_size is not None and size > 0 and size % self._batch_size == 0

    def _affine(self, size: int) -> tuple[int, int]:
        """What is fixed, and what each sample adds."""
        if self._scales(size):
            return 0, size // self._batch_size  # type: ignore[operator]
        return size, 0


def _layout(images: Tensor, weight: Tensor) -> torch.memory_format:
    """In which a convolution runs on a GPU: channels-last if its images or its weights are."""
    last = _channels_last(images) or _channels_last(weight)
    return torch.channels_last if last else torch.contiguous_format


def _written(result: Tensor, layout: torch.memory_format) -> Tensor:
    """A convolution's result in its layout; the meta device goes by the weights alone.

    But windows of one pixel are in both layouts, and weights that are computed anew in each step
    (standardised ones) are contiguous.
    """
    if result.dim() != 4 or result.is_contiguous(memory_format=layout):
        return result
    return torch.empty_like(result, memory_format=layout)


def _elements(tensor: Tensor) -> int:
    """How many different elements it has; an expanded axis repeats the same."""
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if stride == 0:
                count //= size
    return count


def _channels_last(tensor: Tensor) -> bool:
    return (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )


def kernel_profile(
    model: str | nn.Module,
    input_size: int | Sample,
    *,
    precision: Precision = Precision.FP32,
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
    fused_attention: bool = True,
    batch_size: int | None = None,
) -> KernelProfile:
    """Traces both steps of a timm architecture, or of a copy of a module.

    Args:
        model: a timm architecture, or a module of one input, batch first.
        input_size: height and width of square images, in pixels; or the sample of a module.
        precision, memory_format: of the configuration.
        fused_attention, batch_size: as `trace_kernels`.

    Raises:
        UnknownArchitectureError, InputError: as `profiler.models.zoo.create_model`.
        UnsupportedModelError: a step cannot be traced; with the reason.
    """
    return trace_kernels(
        on_meta(model, input_size),
        input_size,
        precision=precision,
        memory_format=memory_format,
        fused_attention=fused_attention,
        batch_size=batch_size,
    )
