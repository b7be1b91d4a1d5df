"""The 150 to 300 kernels that characterize a device, one of each kind that traces distinguish.

    launches, copies through every level of cache, sustained peaks      the ceilings
    products, convolutions, norms, softmax, attention, ...              distance from them

Shapes are those of layers of well-known networks; the batch is small enough to show launches and
caches, or large enough to fill the device. Ceilings come first, the rest in random order, so that a
budget of time cuts off a uniform part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from trappm.profiler.kernels.ceilings import flops
from trappm.profiler.kernels.kernel_call import DataType, Direction, KernelCall, Operator
from trappm.profiler.records import MemoryFormat

_KIB, _MIB = 1 << 10, 1 << 20
_LARGEST_SHARE = 1 / 16
"""Largest share of the device's memory for one tensor; a call has a few of them."""
_LARGEST_COLLECTIVE_BYTES = 256 * _MIB
_COLLECTIVE_BYTES = tuple(_KIB << step for step in range(19))
"""Sizes of collectives: from 1 KiB to 256 MiB, by factors of two."""
_LADDER_BYTES = tuple(4 * _KIB << (2 * step) for step in range(10))
"""Sizes of copies: from 4 KiB to 1 GiB, by factors of four."""


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What a device can compute, and how much work keeps it busy."""

    memory_mib: float
    data_types: tuple[DataType, ...] = (DataType.FP32,)
    """Native types."""
    has_tf32: bool = False
    is_cpu: bool = False

    @property
    def busy_flops(self) -> float:
        """Operations in fp32 of a product that takes some milliseconds."""
        return 1e9 if self.is_cpu else 1e10

    @property
    def busy_bytes(self) -> float:
        """Bytes of a tensor that no cache holds."""
        wanted = 64 * _MIB if self.is_cpu else 512 * _MIB
        return min(wanted, self.largest_bytes)

    @property
    def largest_bytes(self) -> float:
        return self.memory_mib * _MIB * _LARGEST_SHARE


class _Convolution(NamedTuple):
    inputs: int
    outputs: int
    height: int
    window: int
    stride: int = 1
    groups: int = 1

    def bytes(self) -> int:
        """Return the larger of read and written bytes of one sample's images in fp32."""
        written = self.outputs * (self.height // self.stride) ** 2
        return 4 * max(self.inputs * self.height**2, written)


_MAIN = (
    _Convolution(64, 256, 56, 1),
    _Convolution(1024, 256, 14, 1),
    _Convolution(64, 64, 56, 3),
    _Convolution(256, 256, 14, 3),
    _Convolution(128, 128, 56, 3, 2),
    _Convolution(3, 64, 224, 7, 2),
    _Convolution(128, 128, 56, 3, 1, 32),
    _Convolution(336, 336, 14, 3, 1, 6),
    _Convolution(96, 96, 56, 3, 1, 96),
    _Convolution(240, 240, 28, 5, 1, 240),
)
"""One of each kind; their gradients are measured too."""
_FURTHER = (
    _Convolution(256, 64, 56, 1),
    _Convolution(256, 512, 56, 1, 2),
    _Convolution(512, 2048, 7, 1),
    _Convolution(24, 144, 56, 1),
    _Convolution(97, 97, 28, 1),
    _Convolution(128, 128, 28, 3),
    _Convolution(512, 512, 7, 3),
    _Convolution(3, 32, 224, 3, 2),
    _Convolution(3, 96, 224, 4, 4),
    _Convolution(3, 768, 224, 16, 16),
    _Convolution(512, 512, 14, 3, 2, 32),
    _Convolution(32, 32, 112, 3, 1, 32),
    _Convolution(96, 96, 112, 3, 2, 96),
    _Convolution(576, 576, 14, 3, 1, 576),
    _Convolution(384, 384, 14, 7, 1, 384),
)
_LINEAR = (
    (197, 768, 3072), (197, 3072, 768), (49, 384, 384), (197, 192, 576), (197, 97, 101),
)  # fmt: skip
"""Rows of a sample, inputs, outputs."""
_CLASSIFIER = (1, 2048, 1000)
_PRODUCTS = ((197, 64, 197), (197, 197, 64), (49, 32, 49), (512, 512, 512))
"""Scores, values, windows, and a product that fills a device by itself."""
_IMAGES = ((64, 56), (256, 14), (512, 7))
"""Channels and height of images for norms."""
_WIDTHS = (96, 768, 4096)
_POINTWISE = (
    Operator.ADD_SCALAR,
    Operator.ADD,
    Operator.MULTIPLY,
    Operator.RELU,
    Operator.GELU,
    Operator.TANH,
)
_BOTH = (Direction.FORWARD, Direction.BACKWARD)
_GRADIENTS = (Direction.DATA_GRADIENT, Direction.WEIGHT_GRADIENT)
_LAYOUTS = tuple(MemoryFormat)


def catalogue(abilities: Abilities) -> list[KernelCall]:
    """Return the calls that characterize a device with these abilities, in the order to measure."""
    halves = tuple(t for t in abilities.data_types if t is not DataType.FP32)
    first = [*_launches(), *_ladder(abilities), *_peaks(abilities)]
    rest = [*_streams(abilities, halves[:1]), *_normalisations(abilities, halves[:1])]
    rest += [*_optimizers(abilities)]
    rest += _products(abilities, DataType.FP32)
    convolutions = [*_convolutions(abilities, DataType.FP32, MemoryFormat.CONTIGUOUS)]
    if abilities.has_tf32:  # as PyTorch has it in steps; without it the main ones, forward
        rest += [replace(call, tf32=True) for call in convolutions]
        convolutions = [
            *_main_convolutions(abilities, DataType.FP32, MemoryFormat.CONTIGUOUS, gradients=False)
        ]
    rest += convolutions
    if abilities.is_cpu:
        rest += _main_convolutions(abilities, DataType.FP32, MemoryFormat.CHANNELS_LAST)
        rest += _small_convolutions()
    for half in halves[:1]:
        rest += _products(abilities, half)
        if abilities.is_cpu:  # whose libraries reorder images by themselves, in any layout
            rest += _main_convolutions(abilities, half, MemoryFormat.CHANNELS_LAST)
            continue
        rest += _main_convolutions(abilities, half, MemoryFormat.CONTIGUOUS, gradients=False)
        rest += _convolutions(abilities, half, MemoryFormat.CHANNELS_LAST)
    ordered = sorted(dict.fromkeys(rest), key=_by_chance)
    return [*dict.fromkeys([*first, *ordered])]


def collectives(ranks: int, memory_mib: float) -> list[KernelCall]:
    """Return the collectives that characterize the links between ranks of a node.

    The largest are as large as DDP's buckets and FSDP's blocks. They are ordered by size, so that a
    budget cuts off the largest.
    """
    largest = min(_LARGEST_COLLECTIVE_BYTES, memory_mib * _MIB * _LARGEST_SHARE)
    sizes = [size for size in _COLLECTIVE_BYTES if size <= largest]
    operators = (Operator.ALL_REDUCE, Operator.ALL_GATHER, Operator.REDUCE_SCATTER)
    return [
        KernelCall.of(operator, ranks=ranks, elements=max(size // 4 // ranks, 1) * ranks)
        for size in sizes
        for operator in operators
    ]


def metered(calls: Sequence[KernelCall]) -> set[KernelCall]:
    """Return the calls whose energy is measured, which takes longer: one of each kind and type.

    In addition all copies and fills, which give the energy of a byte by cache level. Collectives
    are not metered: several ranks share their energy.
    """
    calls = [call for call in calls if not call.form.is_collective]
    kinds = {(c.operator, c.data_type, c.tf32, c.memory_format): c for c in reversed(calls)}
    ceilings = (Operator.COPY, Operator.FILL)
    return {*kinds.values(), *(c for c in calls if c.operator in ceilings)}


def _by_chance(call: KernelCall) -> str:
    return hashlib.sha256(call.text.encode()).hexdigest()


def _launches() -> Iterator[KernelCall]:
    for kernels in (1, 100):
        yield KernelCall.of(Operator.LAUNCH, kernels=kernels)


def _ladder(abilities: Abilities) -> Iterator[KernelCall]:
    """Yield copies, fills and sums through every level of cache into memory."""
    rows = partial(_rows, width=1024, data_type=DataType.FP32)
    most = max(abilities.busy_bytes, 256 * _MIB)
    sizes = [size for size in _LADDER_BYTES if size <= min(most, abilities.largest_bytes)]
    for size in sizes:
        yield rows(Operator.COPY, size)
    for size in sizes[1::2]:
        yield rows(Operator.FILL, size)
        yield rows(Operator.ADD, size)


def _peaks(abilities: Abilities) -> Iterator[KernelCall]:
    """Yield large products, which reach the sustained peak."""
    width = 1024 if abilities.is_cpu else 4096
    for data_type in abilities.data_types:
        rows = width if data_type is DataType.FP32 else 2 * width
        product = KernelCall.of(
            Operator.MATMUL, data_type, batch=1, rows=rows, depth=width, columns=width
        )
        yield product
        if abilities.has_tf32 and data_type is DataType.FP32:
            yield replace(product, tf32=True)


def _streams(abilities: Abilities, halves: tuple[DataType, ...]) -> Iterator[KernelCall]:
    """Yield elementwise calls, calls over images, and lookups."""
    large = abilities.busy_bytes / 2
    for operator in _POINTWISE:
        for direction in KernelCall.of(operator, batch=1, width=1).form.directions:
            for size in (_MIB, large):
                yield _rows(operator, size, 1024, DataType.FP32, direction)
            for half in halves:
                yield _rows(operator, large, 1024, half, direction)
    for half in halves:
        for size in (_MIB, large):
            yield _rows(Operator.CAST, size, 1024, half)
    for layout in _LAYOUTS:
        for size in (_MIB, large):
            image = partial(_image, size=size, memory_format=layout)
            yield image(Operator.ADD_CHANNELS)
            yield image(Operator.RELAYOUT)
        image = partial(_image, size=large, memory_format=layout)
        for direction in _BOTH:
            yield image(Operator.MEAN, direction=direction)
            yield image(Operator.MAX_POOL, direction=direction, window=3, stride=2)
    yield _image(Operator.ADD_LAYOUTS, size=large)
    for entries in (1_000, 30_000):
        batch = _fitting(4 * 128 * 768, large)
        for direction in _BOTH:
            yield KernelCall.of(
                Operator.EMBEDDING, direction=direction,
                batch=batch, length=128, entries=entries, width=768,
            )  # fmt: skip


def _normalisations(abilities: Abilities, halves: tuple[DataType, ...]) -> Iterator[KernelCall]:
    large = abilities.busy_bytes / 2
    types = (DataType.FP32, *halves)
    for channels, height in _IMAGES:
        for layout in _LAYOUTS:
            for data_type in types if (channels, height) == _IMAGES[0] else types[:1]:
                for direction in _BOTH:
                    yield _image(
                        Operator.BATCH_NORM, large, layout, data_type, direction, channels, height
                    )
    for layout in _LAYOUTS:
        yield _image(Operator.FROZEN_BATCH_NORM, large, layout)
    yield _image(Operator.BATCH_NORM, _MIB)
    for operator in (Operator.LAYER_NORM, Operator.SOFTMAX):
        for width in _WIDTHS:
            for data_type in types if width == _WIDTHS[1] else types[:1]:
                for direction in _BOTH:
                    yield _rows(operator, large, width, data_type, direction)
        yield _rows(operator, _MIB, _WIDTHS[1], DataType.FP32)


def _optimizers(abilities: Abilities) -> Iterator[KernelCall]:
    elements = int(abilities.busy_bytes) // 64 // 16
    for operator in (Operator.SGD, Operator.MOMENTUM, Operator.ADAM):
        yield KernelCall.of(operator, tensors=16, elements=elements)
        yield KernelCall.of(operator, tensors=160, elements=512)


def _products(abilities: Abilities, data_type: DataType) -> Iterator[KernelCall]:
    """Yield linear layers, products of computed tensors and fused attention."""
    busy_flops = abilities.busy_flops * (1 if data_type is DataType.FP32 else 4)

    def batch_of(products: int, rows: int, depth: int, columns: int) -> int:
        """So many samples, of so many products each, that arithmetic or memory is busy."""
        largest = 4 * products * max(rows * depth, depth * columns, rows * columns)
        by_flops = _fitting(2 * products * rows * depth * columns, busy_flops)
        return min(by_flops, _fitting(largest, abilities.busy_bytes / 2))

    for index, (rows, inputs, outputs) in enumerate(_LINEAR):
        batch = batch_of(1, rows, inputs, outputs)
        linear = partial(
            KernelCall.of, Operator.LINEAR, data_type, rows=rows, inputs=inputs, outputs=outputs
        )
        yield linear(batch=batch)
        if index < 2:
            yield linear(batch=1)
            yield from (linear(batch=batch, direction=gradient) for gradient in _GRADIENTS)
    rows, inputs, outputs = _CLASSIFIER
    for batch in (1, 8, 128):
        yield KernelCall.of(
            Operator.LINEAR, data_type, batch=batch, rows=rows, inputs=inputs, outputs=outputs
        )
    for rows, depth, columns in _PRODUCTS:
        batch = batch_of(1, rows, depth, columns)
        product = partial(
            KernelCall.of, Operator.MATMUL, data_type, rows=rows, depth=depth, columns=columns
        )
        yield product(batch=batch)
        yield product(batch=1)
    for length, width in ((197, 64), (49, 32), (1024, 64)):
        attention = partial(
            KernelCall.of, Operator.ATTENTION, data_type, heads=12, length=length, width=width
        )
        batch = batch_of(2 * 12, length, width, length)
        yield from (attention(batch=batch, direction=direction) for direction in _BOTH)


def _convolutions(
    abilities: Abilities, data_type: DataType, layout: MemoryFormat
) -> Iterator[KernelCall]:
    """Yield all convolutions forward, and the gradients of the main ones."""
    yield from _main_convolutions(abilities, data_type, layout)
    for shape in _FURTHER:
        yield _convolution(shape, _batch(shape, abilities), data_type, layout)


def _main_convolutions(
    abilities: Abilities, data_type: DataType, layout: MemoryFormat, *, gradients: bool = True
) -> Iterator[KernelCall]:
    for shape in _MAIN:
        batch = _batch(shape, abilities)
        yield _convolution(shape, batch, data_type, layout)
        if gradients:
            for direction in _GRADIENTS:
                yield _convolution(shape, batch, data_type, layout, direction)


def _small_convolutions() -> Iterator[KernelCall]:
    """Yield convolutions of one image, whose tensors stay in a cache."""
    for shape in (*_MAIN, *_FURTHER):
        yield _convolution(shape, 1, DataType.FP32, MemoryFormat.CONTIGUOUS)


def _convolution(
    shape: _Convolution,
    batch: int,
    data_type: DataType,
    layout: MemoryFormat,
    direction: Direction = Direction.FORWARD,
) -> KernelCall:
    sizes = {"batch": batch, **shape._asdict()}
    return KernelCall.of(Operator.CONV2D, data_type, layout, direction, **sizes)


def _batch(shape: _Convolution, abilities: Abilities) -> int:
    """Return the smaller batch that keeps arithmetic or memory busy."""
    of_one = flops(_convolution(shape, 1, DataType.FP32, MemoryFormat.CONTIGUOUS))
    by_flops = _fitting(of_one, abilities.busy_flops)
    return min(by_flops, _fitting(shape.bytes(), abilities.busy_bytes / 2))


def _rows(
    operator: Operator,
    size: float,
    width: int,
    data_type: DataType,
    direction: Direction = Direction.FORWARD,
) -> KernelCall:
    """Return a call over rows of this width, with this number of bytes in fp32."""
    batch = max(1, int(size) // (4 * width))
    return KernelCall.of(operator, data_type, direction=direction, batch=batch, width=width)


def _image(
    operator: Operator,
    size: float,
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
    data_type: DataType = DataType.FP32,
    direction: Direction = Direction.FORWARD,
    channels: int = _IMAGES[0][0],
    height: int = _IMAGES[0][1],
    **further: int,
) -> KernelCall:
    """Return a call over images with this number of bytes in fp32."""
    return KernelCall.of(
        operator, data_type, memory_format, direction,
        batch=_fitting(4 * channels * height**2, size), channels=channels, height=height,
        tf32=False, **further,
    )  # fmt: skip


def _fitting(of_one: float, in_all: float) -> int:
    """Return the largest power of two that does not exceed the total; at least 1."""
    times = max(1, int(in_all / of_one))
    return int(1 << (times.bit_length() - 1))
