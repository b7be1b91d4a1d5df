"""Ceilings of a device from its kernels: sustained peaks, bandwidth by cache level, launches.

These are the measured ceilings of a roofline (Williams, Waterman and Patterson, CACM 2009).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trappm.profiler.kernels.kernel_call import DataType, KernelCall, KernelMeasurement, Operator
from trappm.profiler.records import Outcome
from trappm.profiler.text import number_text

_ELEMENT_BYTES = {DataType.FP32: 4, DataType.FP16: 2, DataType.BF16: 2}
_STREAMS = {Operator.COPY: 2, Operator.ADD: 3, Operator.ADD_SCALAR: 2, Operator.FILL: 1}
"""Tensors that each reads and writes."""
_MEMORY = "memory"
_BEYOND = 4
"""A working set this many times as large as the last cache is in memory."""


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Highest bandwidth from one level of memory."""

    level: str
    """`L1` to `L3`, or `memory`."""
    gb_s: float
    working_set_bytes: int
    """Bytes of all tensors of that call."""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Best results of a device."""

    tflops: Mapping[str, float]
    """Sustained, by type: `fp32`, `tf32`, `fp16`, `bf16`."""
    bandwidths: tuple[Bandwidth, ...]
    """Levels from the smallest to memory; without known caches only the largest tensors."""
    launch_us: float | None
    """Time of a single kernel."""
    dispatch_us: float | None
    """Time per kernel of many in a row."""


def flops(call: KernelCall) -> float:
    """Return the floating-point operations of a product's forward pass; 0 for others.

    Two for each multiply-accumulate; a gradient has as many for each tensor.
    """
    if call.operator in (Operator.LINEAR, Operator.MATMUL):
        return 2.0 * math.prod(call.sizes)
    if call.operator is Operator.ATTENTION:
        return 4.0 * math.prod(call.sizes) * call["length"]
    if call.operator is Operator.CONV2D:
        room = call["height"] + 2 * call.padding - call["window"]
        pixels = (room // call["stride"] + 1) ** 2
        depth = call["inputs"] // call["groups"] * call["window"] ** 2
        return 2.0 * call["batch"] * pixels * call["outputs"] * depth
    return 0.0


def ceilings(measurements: Iterable[KernelMeasurement]) -> Ceilings:
    """Return the ceilings of one device; only outcomes `ok` count.

    Peaks are of matrix products: fast convolution algorithms seem to multiply more than they do.
    """
    timed = [(m, m.time_ms) for m in measurements if m.outcome is Outcome.OK and m.time_ms]
    tflops: dict[str, float] = {}
    launches: dict[int, float] = {}
    streams: list[tuple[int, float]] = []
    caches: Mapping[str, int] = {}
    for measurement, time_ms in timed:
        call = measurement.call
        caches = _caches(measurement.environment.get("cache_bytes")) or caches
        if call.operator in (Operator.LINEAR, Operator.MATMUL):
            kind = "tf32" if call.tf32 else call.data_type.value
            tflops[kind] = max(tflops.get(kind, 0.0), flops(call) / time_ms / 1e9)
        elif call.operator in _STREAMS:
            size = math.prod(call.sizes) * _ELEMENT_BYTES[call.data_type]
            moved = size * _STREAMS[call.operator]
            streams.append((moved, moved / time_ms / 1e6))
        elif call.operator is Operator.LAUNCH:
            launches[call["kernels"]] = 1000 * time_ms / call["kernels"]
    return Ceilings(
        tflops={kind: tflops[kind] for kind in ("fp32", "tf32", "fp16", "bf16") if kind in tflops},
        bandwidths=tuple(_by_level(sorted(streams), caches)),
        launch_us=launches.get(1),
        dispatch_us=launches[max(launches)] if launches else None,
    )


def _caches(sizes: object) -> dict[str, int]:
    """Return the caches of an environment, which may be an untrusted file."""
    if not isinstance(sizes, Mapping):
        return {}
    return {str(name): size for name, size in sizes.items() if type(size) is int and size > 0}


def _by_level(streams: Sequence[tuple[int, float]], caches: Mapping[str, int]) -> list[Bandwidth]:
    """Return the fastest call of each level: of those that fit into it, but not the one before."""
    levels = sorted(caches.items(), key=lambda item: item[1])
    if not levels:
        largest = streams[-1][0] if streams else 0
        return _fastest(_size(largest), [s for s in streams if s[0] == largest])
    bandwidths = []
    smallest = 0
    for name, largest in levels:
        bandwidths += _fastest(name, [s for s in streams if smallest < s[0] <= largest])
        smallest = largest
    return bandwidths + _fastest(_MEMORY, [s for s in streams if s[0] >= _BEYOND * smallest])


def _fastest(level: str, streams: Sequence[tuple[int, float]]) -> list[Bandwidth]:
    if not streams:
        return []
    size, gb_s = max(streams, key=lambda stream: stream[1])
    return [Bandwidth(level=level, gb_s=gb_s, working_set_bytes=size)]


def _size(number: int) -> str:
    for unit, width in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if number >= 1 << width:
            return f"{number_text(number / (1 << width), 3)} {unit}"
    return f"{number} B"


def sentence(known: Ceilings) -> str:
    """Return the ceilings in one line, such as `sustained TFLOP/s: 0.12 in fp32; ...`."""
    parts = []
    if known.tflops:
        peaks = ", ".join(
            f"{number_text(value, 3)} in {kind}" for kind, value in known.tflops.items()
        )
        parts.append(f"sustained TFLOP/s: {peaks}")
    if known.bandwidths:
        speeds = ", ".join(f"{number_text(b.gb_s, 3)} in {b.level}" for b in known.bandwidths)
        parts.append(f"GB/s: {speeds}")
    if known.launch_us is not None:
        parts.append(f"a launch: {number_text(known.launch_us, 3)} us")
    return "; ".join(parts) or "no ceiling is known"
