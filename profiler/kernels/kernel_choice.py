"""The 150 to 300 kernels that characterize a device, one of each kind that traces distinguish.

    launches, copies through every level of cache, sustained peaks      the ceilings
    products, convolutions, norms, softmax, attention, ...              distance from them

Shapes are those of layers of well-known networks (`catalogue.csv`); the batch is small enough to
show launches and caches, or large enough to fill the device. Ceilings come first, the rest in
random order, so that a budget of time cuts off a uniform part.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trappm.profiler.kernels.ceilings import flops
from trappm.profiler.kernels.kernel_call import DataType, Direction, KernelCall, Operator
from trappm.profiler.records import MemoryFormat

_KIB, _MIB = 1 << 10, 1 << 20
_LARGEST_SHARE = 1 / 16
"""Largest share of the device's memory for one tensor; a call has a few of them."""


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """Data types that a device can compute, and the work that keeps it busy."""

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

    @property
    def half(self) -> DataType | None:
        """The first native type of 16 bits, which stands for the others."""
        return next((kind for kind in self.data_types if kind is not DataType.FP32), None)


@dataclass(frozen=True)
class _Row:
    """A row of `catalogue.csv`."""

    call: KernelCall
    """The call for one sample, in fp32."""
    batch: str
    types: tuple[str, ...]
    layouts: tuple[MemoryFormat, ...]
    directions: tuple[Direction, ...]


def _rows() -> Iterator[_Row]:
    with Path(__file__).with_name("catalogue.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            pairs = (size.split("=") for size in row["sizes"].split())
            sizes: dict[str, Any] = {name: int(size) for name, size in pairs}
            operator = Operator(row["operator"])
            kind = DataType.BF16 if operator is Operator.CAST else DataType.FP32
            yield _Row(
                KernelCall.of(operator, kind, batch=1, **sizes),
                row["batch"],
                tuple(row["types"].split()),
                tuple(map(MemoryFormat, row["layouts"].split())),
                tuple(map(Direction, row["directions"].split())),
            )


def catalogue(abilities: Abilities) -> list[KernelCall]:
    """Return the calls that characterize a device with these abilities, in the order to measure."""
    first = [*_launches(), *_ladder(abilities), *_peaks(abilities)]
    rows = list(_rows())
    rest = [*_optimizers(abilities)]
    for row in rows:
        for name in row.types:
            data_type = abilities.half if name == "half" else DataType.FP32
            if data_type is not None:
                call = replace(row.call, data_type=data_type)
                call = call.with_batch(_batch(call, row.batch, abilities))
                rest += [
                    replace(call, memory_format=layout, direction=direction)
                    for layout in row.layouts
                    for direction in row.directions
                ]
    rest += _convolutions([r for r in rows if r.call.operator is Operator.CONV2D], abilities)
    ordered = sorted(dict.fromkeys(rest), key=_by_chance)
    return [*dict.fromkeys([*first, *ordered])]


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
    """Yield copies, fills and sums through every level of cache into memory.

    Copies are from 4 KiB to 1 GiB, by factors of four.
    """
    most = min(max(abilities.busy_bytes, 256 * _MIB), abilities.largest_bytes)
    sizes = [size for step in range(10) if (size := 4 * _KIB << (2 * step)) <= most]
    for place, size in enumerate(sizes):
        operators = (Operator.COPY, Operator.FILL, Operator.ADD)
        for operator in operators if place % 2 else operators[:1]:
            yield KernelCall.of(operator, batch=size // 4096, width=1024)


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


def _optimizers(abilities: Abilities) -> Iterator[KernelCall]:
    elements = int(abilities.busy_bytes) // 64 // 16
    for operator in (Operator.SGD, Operator.MOMENTUM, Operator.ADAM):
        yield KernelCall.of(operator, tensors=16, elements=elements)
        yield KernelCall.of(operator, tensors=160, elements=512)


def _convolutions(rows: Sequence[_Row], abilities: Abilities) -> Iterator[KernelCall]:
    """Yield convolutions in the types and layouts that the device distinguishes.

    The main ones, with gradients in the table, are in more types and layouts than the others.
    """

    def calls(
        data_type: DataType, layout: MemoryFormat, *, main: bool = False, forward: bool = False
    ) -> Iterator[KernelCall]:
        for row in rows:
            if not main or len(row.directions) > 1:
                # Not larger in 16 bits: a convolution's time depends on its images.
                call = row.call.with_batch(_batch(row.call, row.batch, abilities))
                for direction in row.directions[:1] if forward else row.directions:
                    yield replace(
                        call, data_type=data_type, memory_format=layout, direction=direction
                    )

    fp32, half = DataType.FP32, abilities.half
    contiguous, channels_last = MemoryFormat.CONTIGUOUS, MemoryFormat.CHANNELS_LAST
    if abilities.has_tf32:  # as PyTorch has it in steps; without it the main ones, forward
        yield from (replace(call, tf32=True) for call in calls(fp32, contiguous))
        yield from calls(fp32, contiguous, main=True, forward=True)
    else:
        yield from calls(fp32, contiguous)
    if abilities.is_cpu:
        yield from calls(fp32, channels_last, main=True)
        # Of one image, whose tensors stay in a cache.
        yield from (call.with_batch(1) for call in calls(fp32, contiguous, forward=True))
        if half is not None:  # its libraries reorder images by themselves, in any layout
            yield from calls(half, channels_last, main=True)
    elif half is not None:
        yield from calls(half, contiguous, main=True, forward=True)
        yield from calls(half, channels_last)


def _batch(call: KernelCall, rule: str, abilities: Abilities) -> int:
    """Return the batch size of a call by the rule in the table."""
    if rule.isdecimal():
        return int(rule)
    size = _MIB if rule == "small" else abilities.busy_bytes / 2
    batch = _fitting(_largest_bytes(call), size)
    if rule == "busy":
        is_half_product = call.operator is not Operator.CONV2D and call.data_type != DataType.FP32
        busy_flops = abilities.busy_flops * (4 if is_half_product else 1)
        batch = min(batch, _fitting(flops(call), busy_flops))
    return batch


def _largest_bytes(call: KernelCall) -> int:
    """Return the bytes in fp32 of the largest tensor of one sample, apart from weights."""
    size = dict(zip(call.form.sizes, call.sizes, strict=True))
    if call.operator is Operator.CONV2D:
        written = size["outputs"] * (size["height"] // size["stride"]) ** 2
        return 4 * max(size["inputs"] * size["height"] ** 2, written)
    if "channels" in size:
        return 4 * size["channels"] * size["height"] ** 2
    if call.operator is Operator.EMBEDDING:
        return 4 * size["length"] * size["width"]
    if call.operator is Operator.ATTENTION:
        length, width = size["length"], size["width"]
        return 8 * size["heads"] * length * max(length, width)
    sides = call.sizes[1:]  # of a product (rows, depth, columns), or the width of a row
    return 4 * max(math.prod(sides) // side for side in sides) if len(sides) > 1 else 4 * sides[0]


def _fitting(of_one: float, in_all: float) -> int:
    """Return the largest power of two that does not exceed the total; at least 1."""
    times = max(1, int(in_all / of_one))
    return int(1 << (times.bit_length() - 1))
