"""The GPU memory of a training step: its trace, replayed through a model of CUDA's allocator.

The rules are those of PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp): sizes are
rounded up to 512 bytes; requests up to 1 MiB come from segments of 2 MiB, those under 10 MiB from
segments of 20 MiB, larger ones from segments of their own rounded up to 2 MiB; the best fitting
free block is taken and split, neighbors merge when freed, and unused segments are returned only
after cuDNN's search for the fastest algorithm and before an allocation fails. So reserved memory
includes rounding and fragmentation, and a step runs on less than it reserves. With
`expandable_segments`, each of the two kinds has one segment that grows by pages instead.

The sizes are those of the trace, which is of one precision, layout and execution.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from trappm.profiler.errors import InputError
from trappm.profiler.records import IntArray
from trappm.profiler.simulation.step_trace import ConvolutionKind, Event, Pass, StepTrace
from trappm.profiler.simulation.training_loop import DEFAULT_LOOP, Block, TrainingLoop

MIB = 1 << 20
_UNIT = 512
"""Unit of all sizes and addresses within the allocator, in bytes."""
_MIB_UNITS = MIB // _UNIT
_ADDRESS_BITS = 48
_ADDRESS = (1 << _ADDRESS_BITS) - 1

STEPS = 2
"""The second step differs from the first: optimizer states exist before it."""
CAPACITY_TOLERANCE = 0.001
"""Relative tolerance of the smallest device on which a step runs."""
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


def simulate_memory(
    trace: StepTrace,
    batch_size: int,
    loop: TrainingLoop = DEFAULT_LOOP,
    workspace_share: Mapping[int, float] = WORKSPACE_SHARE,
    limit_mib: float | None = None,
) -> SimulatedMemory:
    """Replay two training steps at this batch size.

    On a device that is full, the allocator returns unused segments and tries again. So a step that
    would reserve more than the limit may run within it. Then its reserved memory is the limit, and
    otherwise the least memory that it needs.

    Args:
        trace, batch_size, loop: Step, any batch size, and the training loop around the steps.
        workspace_share: See `WORKSPACE_SHARE`; other values are for fitting.
        limit_mib: Memory of the device that the step can use; None for one that is never full.

    Raises:
        InputError: The batch size is below 1.
    """
    if batch_size < 1:
        raise InputError(f"batch size is {batch_size}; it must be 1 or more")
    plain = _replay(trace, batch_size, loop, {})
    scratch = plain
    if workspace_share:
        scratch = _replay(trace, batch_size, loop, workspace_share)
    reserved, reserved_with_workspace = plain.peak_reserved, scratch.peak_reserved
    limit = None if limit_mib is None else int(limit_mib * _MIB_UNITS)
    if limit is not None and reserved_with_workspace > limit:
        smallest_capacity = _smallest_capacity(trace, batch_size, loop, workspace_share, scratch)
        reserved_with_workspace = max(smallest_capacity, limit)
        reserved = min(reserved, reserved_with_workspace)
    return SimulatedMemory(
        live_mib=plain.peak_live / _MIB_UNITS,
        reserved_mib=reserved / _MIB_UNITS,
        reserved_with_workspace_mib=reserved_with_workspace / _MIB_UNITS,
    )


def _smallest_capacity(
    trace: StepTrace,
    batch_size: int,
    loop: TrainingLoop,
    shares: Mapping[int, float],
    unlimited: Allocator,
) -> int:
    """Return the smallest device, in units, on which the replay runs (to `CAPACITY_TOLERANCE`).

    Args:
        trace, batch_size, loop, shares: See `_replay`.
        unlimited: Result of a replay on a device that is never full.
    """
    too_little, enough = unlimited.peak_live - 1, unlimited.peak_reserved
    while enough > (1 + CAPACITY_TOLERANCE) * too_little:
        middle = (too_little + enough) // 2
        try:
            enough = _replay(trace, batch_size, loop, shares, middle).peak_reserved
        except _DeviceIsFullError:
            too_little = middle
    return enough


def _replay(
    trace: StepTrace,
    batch_size: int,
    loop: TrainingLoop,
    shares: Mapping[int, float],
    capacity: int | None = None,
) -> Allocator:
    allocator = (ExpandableAllocator if loop.expandable_segments else Allocator)(capacity)
    parameters, buffers = (
        _units(sizes).tolist() for sizes in (trace.parameter_bytes, trace.buffer_bytes)
    )
    places = trace.parameter_places.tolist()
    for size in (*parameters, *buffers):
        if size:  # an empty tensor takes no memory
            allocator.allocate(size)
    numbers = trace.gradients.tolist()
    freed = frozenset(numbers[index] for index in loop.held(places))
    events_of = cache(partial(_events, trace, batch_size, shares))
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
    return (sizes + (_UNIT - 1)) // _UNIT


def _events(
    trace: StepTrace, batch_size: int, shares: Mapping[int, float], present: frozenset[int]
) -> list[tuple[int, int]]:
    """Return the requests to the allocator in order: a block and its size; 0 frees the block.

    The blocks `_SCRATCH` and `_SEARCHED` are scratch memory, which is freed at once; the second is
    that of a new kind of convolution, and may be 0. Gradients that are present from an earlier
    backward pass are freed as they are added to those.
    """
    sizes, blocks = trace.sizes_at(batch_size), trace.blocks.copy()
    scratch = np.flatnonzero(trace.kinds == Event.WORKSPACE)
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
    complete = trace.kinds == Event.ACCUMULATE
    added = trace.additions
    complete[added[np.isin(trace.blocks[added], list(present))]] = False
    requested &= ~complete
    units[(trace.kinds == Event.FREE) | (trace.kinds == Event.ACCUMULATE)] = 0
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


class _DeviceIsFullError(Exception):
    """An allocation failed although all unused segments had been returned."""


class Allocator:
    """PyTorch's caching allocator on one stream; sizes and addresses in units of 512 bytes.

    Free blocks are found by size (best fit, then lowest address), and by their borders to merge
    neighbors. Gaps between segments keep their blocks from merging.
    """

    _least_rest = _MIB_UNITS
    """Largest rest of a large block that is not split off."""

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        """Memory of the device; None for one that is never full."""
        self.live = 0
        self.peak_live = 0
        self.reserved = 0
        self.peak_reserved = 0
        self._segments: dict[int, int] = {}
        """Size of each segment by its address."""
        self._small: list[int] = []
        self._large: list[int] = []
        """Sorted free blocks, with size and address in one number."""
        self._borders: dict[int, int] = {}
        """Size of each free block by its start, and the negative size by its end."""
        self._next = 0

    def allocate(self, size: int) -> Block:
        """Return a block of at least this size, which must not be 0."""
        small = size <= _MIB_UNITS
        pool = self._small if small else self._large
        at = bisect_left(pool, size << _ADDRESS_BITS)
        if at < len(pool):
            block = pool.pop(at)
            address, have = block & _ADDRESS, block >> _ADDRESS_BITS
            del self._borders[address], self._borders[address + have]
        else:
            address, have = self._extend(size)
        rest = have - size
        if rest > (0 if small else self._least_rest):
            tail = address + size
            self._borders[tail] = rest
            self._borders[tail + rest] = -rest
            insort(pool, rest << _ADDRESS_BITS | tail)
            have = size
        self.live += have
        if self.live > self.peak_live:  # noqa: PLR1730  (called 10,000 times a step)
            self.peak_live = self.live
        return address, have

    def _extend(self, size: int) -> Block:
        """Return a free block of at least this size in memory taken from the device."""
        have = _segment(size)
        self._reserve(have)
        address = self._next
        self._next += have + 1
        self._segments[address] = have
        return address, have

    def _reserve(self, size: int) -> None:
        """Take memory from the device, after unused memory is returned if it is full."""
        if self._capacity is not None and self.reserved + size > self._capacity:
            self.give_back()
            if self.reserved + size > self._capacity:
                raise _DeviceIsFullError
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def free(self, block: Block) -> None:
        address, size = block
        self.live -= size
        pool = self._small if size <= _MIB_UNITS else self._large
        borders = self._borders
        end = address + size
        after = borders.pop(end, 0)
        if after:
            pool.pop(bisect_left(pool, after << _ADDRESS_BITS | end))
            end += after
        before = -borders.pop(address, 0)
        if before:
            address -= before
            pool.pop(bisect_left(pool, before << _ADDRESS_BITS | address))
        size = end - address
        borders[address] = size
        borders[end] = -size
        insort(pool, size << _ADDRESS_BITS | address)

    def give_back(self) -> None:
        """Return unused segments to the device (`empty_cache`)."""
        for pool in (self._small, self._large):
            for block in pool.copy():
                address, size = block & _ADDRESS, block >> _ADDRESS_BITS
                if self._segments.get(address) == size:
                    pool.remove(block)
                    del self._borders[address], self._borders[address + size]
                    del self._segments[address]
                    self.reserved -= size


class ExpandableAllocator(Allocator):
    """The allocator with `expandable_segments:True`: one segment for small blocks, one for large.

    A segment grows at its end by pages of 2 or 20 MiB, which the free block before the end joins.
    All blocks are split exactly. A full device takes back the free pages at the segments' ends;
    PyTorch also takes free pages between blocks.
    """

    _least_rest = 0

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self._ends = [0, 1 << (_ADDRESS_BITS - 1)]
        """End of each segment: that of small blocks, and that of large ones."""

    def _extend(self, size: int) -> Block:
        which = int(size > _MIB_UNITS)
        last, pages = self._growth(which, size)
        if self._capacity is not None and self.reserved + pages > self._capacity:
            self.give_back()  # which may shorten this segment
            last, pages = self._growth(which, size)
        self._reserve(pages)
        end = self._ends[which]
        self._ends[which] += pages
        if last:
            self._remove(which, end - last, last)
        return end - last, last + pages

    def _growth(self, which: int, size: int) -> tuple[int, int]:
        """Return the size of the free block at the end, and that of the pages that it lacks."""
        last = -self._borders.get(self._ends[which], 0)
        page = _PAGES[which]
        return last, -(-(size - last) // page) * page

    def give_back(self) -> None:
        for which, page in enumerate(_PAGES):
            end = self._ends[which]
            last = -self._borders.get(end, 0)
            pages = last // page * page
            if pages:
                self._ends[which] -= pages
                self.reserved -= pages
                self._remove(which, end - last, last)
                if last > pages:
                    self._insert(which, end - last, last - pages)

    def _remove(self, which: int, address: int, size: int) -> None:
        pool = self._large if which else self._small
        pool.pop(bisect_left(pool, size << _ADDRESS_BITS | address))
        del self._borders[address], self._borders[address + size]

    def _insert(self, which: int, address: int, size: int) -> None:
        insort(self._large if which else self._small, size << _ADDRESS_BITS | address)
        self._borders[address], self._borders[address + size] = size, -size


_PAGES = 2 * _MIB_UNITS, 20 * _MIB_UNITS
"""Pages of expandable segments of small and of large blocks (`kSmallBuffer`, `kLargeBuffer`)."""


def _segment(size: int) -> int:
    if size <= _MIB_UNITS:
        return 2 * _MIB_UNITS
    if size < 10 * _MIB_UNITS:
        return 20 * _MIB_UNITS
    return (size + 2 * _MIB_UNITS - 1) // (2 * _MIB_UNITS) * (2 * _MIB_UNITS)
