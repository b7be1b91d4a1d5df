"""The GPU memory of a training step: its allocations, replayed through a model of CUDA's allocator.

The sizes are those of the allocations, which is of one precision, layout and execution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from weakref import WeakKeyDictionary

import numpy as np

from trappm.profiler.errors import InputError, UnsupportedModelError
from trappm.profiler.memory.allocator import (
    MIB_UNITS,
    UNIT,
    Allocator,
    Block,
    ExpandableAllocator,
)
from trappm.profiler.memory.training_loop import DEFAULT_LOOP, Loop, TrainingLoop
from trappm.profiler.records import IntArray, Optimizer
from trappm.profiler.traced_step import Allocations, ConvolutionKind, Event, Pass, Trace

STEPS = 2
"""The second step differs from the first: optimizer states exist before it."""
MICRO_STEPS = 2
"""The second micro-step differs from the first: gradients exist before it."""

WORKSPACE_SHARE: Mapping[int, float] = {
    ConvolutionKind.DENSE * 3 + Pass.FORWARD: 0.6,
    ConvolutionKind.DENSE * 3 + Pass.DATA_GRADIENT: 1.25,
    ConvolutionKind.GROUPED * 3 + Pass.DATA_GRADIENT: 0.85,
}
"""Scratch bytes per byte touched, by `ConvolutionKind` * 3 + `Pass`; 0 where absent.

Fitted on published A100 labels (docs/research/memory.md).
"""


@dataclass(frozen=True, kw_only=True)
class SimulatedMemory:
    """Peaks of the allocator in MiB, without the CUDA context and libraries."""

    live_mib: float
    """Tensors alive at once."""
    reserved_mib: float
    """Segments taken from the device."""
    reserved_with_workspace_mib: float
    """The same, with scratch memory of convolutions."""


_KNOWN: WeakKeyDictionary[
    Allocations, dict[tuple[TrainingLoop, int, float | None], SimulatedMemory]
] = WeakKeyDictionary()
_MAX_KNOWN = 4096
"""Largest number of cached simulations of a step: a server runs for long."""


def memory_of(
    trace: Trace,
    batch_size: int,
    optimizer: Optimizer = Optimizer.SGD,
    loop: Loop = Loop.PLAIN,
) -> SimulatedMemory:
    """Return the GPU memory of a traced step in a usual loop; see `memory_in`."""
    return memory_in(trace, loop.with_optimizer(optimizer), batch_size)


def memory_in(
    trace: Trace, loop: TrainingLoop, batch_size: int, limit_mib: float | None = None
) -> SimulatedMemory:
    """Return the GPU memory of a traced step in this loop; see `simulate_memory`.

    Raises:
        InputError: The batch size is below 1.
        UnsupportedModelError: The trace has no allocations.
    """
    allocations = _allocations_of(trace)
    known = _KNOWN.setdefault(allocations, {})
    key = loop, batch_size, limit_mib
    memory = known.get(key)
    if memory is None:
        memory = simulate_memory(allocations, batch_size, loop, limit_mib=limit_mib)
        if len(known) >= _MAX_KNOWN:
            known.clear()
        known[key] = memory
    return memory


def reserved_mib(trace: Trace, loop: TrainingLoop, batch_size: int) -> float:
    """Return the reserved memory of `memory_in` with scratch memory; it takes half of the time."""
    allocations = _allocations_of(trace)
    known = _KNOWN.get(allocations, {}).get((loop, batch_size, None))
    if known is not None:
        return known.reserved_with_workspace_mib
    return _replay(allocations, batch_size, loop, WORKSPACE_SHARE).peak_reserved / MIB_UNITS


def _allocations_of(trace: Trace) -> Allocations:
    """Return the allocations of a trace; raises UnsupportedModelError if it has none."""
    if trace.allocations is None:
        raise UnsupportedModelError(trace.refusal or "the step has no allocations")
    return trace.allocations


def simulate_memory(
    allocations: Allocations,
    batch_size: int,
    loop: TrainingLoop = DEFAULT_LOOP,
    workspace_share: Mapping[int, float] = WORKSPACE_SHARE,
    limit_mib: float | None = None,
) -> SimulatedMemory:
    """Replay two training steps at this batch size.

    On a device that is full, the allocator returns unused segments and tries again. So a step that
    would reserve more than the limit may run within it. Then its reserved memory is the limit, and
    otherwise that of a device that grew until the step ran on it.

    Args:
        allocations, batch_size, loop: Step, any batch size, and the training loop around the steps.
        workspace_share: See `WORKSPACE_SHARE`; other values are for fitting.
        limit_mib: Memory of the device that the step can use; None for one that is never full.

    Raises:
        InputError: The batch size is below 1.
    """
    if batch_size < 1:
        raise InputError(f"batch size is {batch_size}; it must be 1 or more")
    plain = _replay(allocations, batch_size, loop, {})
    shares = workspace_share if (allocations.kinds == Event.WORKSPACE).any() else {}
    scratch, capacity = plain, None if limit_mib is None else int(limit_mib * MIB_UNITS)
    if shares or (capacity is not None and plain.peak_reserved > capacity):
        capacity = None if capacity is None else max(capacity, plain.peak_live)
        scratch = _replay_within(allocations, batch_size, loop, shares, capacity)
    reserved, reserved_with_workspace = plain.peak_reserved, scratch.peak_reserved
    if scratch.was_full and scratch.capacity is not None:
        reserved_with_workspace = scratch.capacity
        reserved = min(reserved, reserved_with_workspace)
    return SimulatedMemory(
        live_mib=plain.peak_live / MIB_UNITS,
        reserved_mib=reserved / MIB_UNITS,
        reserved_with_workspace_mib=reserved_with_workspace / MIB_UNITS,
    )


def _replay_within(
    allocations: Allocations,
    batch_size: int,
    loop: TrainingLoop,
    shares: Mapping[int, float],
    capacity: int | None,
) -> Allocator:
    """Replay on a device of this capacity, or on one that is large enough from the beginning.

    A device that grows returns unused segments at other times than one that has its final size.
    """
    while True:
        allocator = _replay(allocations, batch_size, loop, shares, capacity)
        if allocator.capacity == capacity:
            return allocator
        capacity = allocator.capacity


def _replay(
    allocations: Allocations,
    batch_size: int,
    loop: TrainingLoop,
    shares: Mapping[int, float],
    capacity: int | None = None,
) -> Allocator:
    allocator = (ExpandableAllocator if loop.expandable_segments else Allocator)(capacity)
    parameters, buffers = (
        _units(sizes).tolist() for sizes in (allocations.parameter_bytes, allocations.buffer_bytes)
    )
    places = allocations.parameter_places.tolist()
    for size in (*parameters, *buffers):
        if size:  # an empty tensor takes no memory
            allocator.allocate(size)
    numbers = allocations.gradients.tolist()
    freed = frozenset(numbers[index] for index in loop.held(places))
    events_of = cache(partial(_events, allocations, batch_size, shares))
    gradients: dict[int, Block] = {}
    for step in range(STEPS):
        for number in freed & gradients.keys() if loop.set_to_none else ():
            allocator.free(gradients.pop(number))
        for micro_step in range(min(loop.accumulation_steps, MICRO_STEPS)):
            present = frozenset(gradients)
            searching = loop.cudnn_benchmark and step == micro_step == 0
            made = frozenset(numbers) - present
            gradients |= _replay_step(allocator, events_of(present), made, searching=searching)
        if any(parameters):
            loop.update(allocator, parameters, places, first=step == 0)
    return allocator


def _units(sizes: IntArray) -> IntArray:
    return (sizes + (UNIT - 1)) // UNIT


def _events(
    allocations: Allocations, batch_size: int, shares: Mapping[int, float], present: frozenset[int]
) -> list[tuple[int, int]]:
    """Return the requests to the allocator in order: a block and its size; 0 frees the block.

    The blocks `_SCRATCH` and `_SEARCHED` are scratch memory, which is freed at once; the second is
    that of a new kind of convolution, and may be 0. Gradients that are present from an earlier
    backward pass are freed as they are added to those.
    """
    sizes, blocks = allocations.sizes_at(batch_size), allocations.blocks.copy()
    scratch = np.flatnonzero(allocations.kinds == Event.WORKSPACE)
    which, touched = blocks[scratch], sizes[scratch]
    met = np.unique(np.stack([which, touched]), axis=1, return_index=True)[1]
    share = np.zeros(which.max(initial=0) + 1)
    for kind, value in shares.items():
        share[kind : kind + 1] = value
    sizes[scratch] = touched * share[which]
    units = _units(sizes)
    blocks[scratch] = _SCRATCH
    blocks[scratch[met]] = _SEARCHED
    requested = (units > 0) | (blocks == _SEARCHED)
    complete = allocations.kinds == Event.ACCUMULATE
    added = allocations.additions
    complete[added[np.isin(allocations.blocks[added], list(present))]] = False
    requested &= ~complete
    units[(allocations.kinds == Event.FREE) | (allocations.kinds == Event.ACCUMULATE)] = 0
    return list(zip(blocks[requested].tolist(), units[requested].tolist(), strict=True))


def _replay_step(
    allocator: Allocator,
    events: Sequence[tuple[int, int]],
    kept: frozenset[int],
    *,
    searching: bool,
) -> dict[int, Block]:
    """Replay one step and return its gradients that are kept, by number."""
    allocate, free = allocator.allocate, allocator.free
    held: dict[int, Block] = {}
    for block, size in events:
        if block < 0:
            if searching and block == _SEARCHED:
                allocator.give_back()
            if size:
                free(allocate(size))
        elif size:
            held[block] = allocate(size)
        else:
            free(held.pop(block))
    for block in sorted(held.keys() - kept):
        free(held.pop(block))
    return held


_SCRATCH, _SEARCHED = -1, -2
