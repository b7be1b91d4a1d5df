"""The GPU memory of a training step: its trace, replayed through a model of CUDA's allocator.

The rules are those of PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp): sizes are
rounded up to 512 bytes; requests up to 1 MiB come from segments of 2 MiB, those under 10 MiB from
segments of 20 MiB, larger ones from segments of their own rounded up to 2 MiB; the best fitting
free block is taken and split, neighbours merge when freed, and no segment is given back. So the
reserved memory, which is what the device loses, includes rounding and fragmentation.

What is simulated is a step in fp32 on contiguous tensors, without AMP or compilation: where a
configuration asks for another precision or memory format, the answer is still that of fp32 and
contiguous, and whoever passes it on has to say so.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from profiler.errors import InputError
from profiler.records import IntArray, Optimizer
from profiler.simulation.step_trace import ConvolutionKind, Event, Pass, StepTrace

MIB = 1 << 20
_UNIT = 512
"""All sizes and addresses within the allocator are counted in units of so many bytes."""
_MIB_UNITS = MIB // _UNIT
_ADDRESS_BITS = 48
_ADDRESS = (1 << _ADDRESS_BITS) - 1

STATES_PER_PARAMETER = {Optimizer.SGD: 0, Optimizer.MOMENTUM: 1, Optimizer.ADAM: 2}
"""Tensors of a parameter's size that each optimizer keeps."""

TEMPORARIES_PER_PARAMETER = {Optimizer.SGD: 0, Optimizer.MOMENTUM: 0, Optimizer.ADAM: 1}
"""Tensors of a parameter's size that each optimizer makes for all parameters at once in its step
and then frees: Adam the roots of its second moments (`_foreach_sqrt` in torch/optim/adam.py; for
all parameters at once is CUDA's default)."""

STEPS = 2
"""The second step differs from the first: gradients and optimizer states are there before it."""

WORKSPACE_SHARE: Mapping[int, float] = {
    ConvolutionKind.DENSE * 3 + Pass.FORWARD: 0.5,
    ConvolutionKind.DENSE * 3 + Pass.DATA_GRADIENT: 1.0,
    ConvolutionKind.DENSE * 3 + Pass.WEIGHT_GRADIENT: 1.0,
    ConvolutionKind.GROUPED * 3 + Pass.DATA_GRADIENT: 0.5,
}
"""Scratch bytes per byte touched, by `ConvolutionKind` * 3 + `Pass`; what is absent needs none.

Fitted on published A100 labels by `benchmarks/memory_simulation.py --fit`; how well it does is in
docs/static_profile.md."""


@dataclass(frozen=True, kw_only=True)
class SimulatedMemory:
    """What the allocator holds at its peak, in MiB, without the CUDA context and libraries."""

    live_mib: float
    """Peak of the tensors alive at once."""
    reserved_mib: float
    """Peak of the segments taken from the device."""
    reserved_with_workspace_mib: float
    """The same, with scratch memory of convolutions."""


def simulate_memory(
    trace: StepTrace,
    batch_size: int,
    optimizer: Optimizer = Optimizer.SGD,
    gradients_kept: bool = False,
    workspace_share: Mapping[int, float] = WORKSPACE_SHARE,
) -> SimulatedMemory:
    """Replays two training steps at this batch size.

    Args:
        trace: of a step in fp32.
        batch_size: any, not only the traced ones.
        optimizer: its states are allocated in its first step.
        gradients_kept: whether gradients live on until the next backward pass adds to them, as in
            the published A100 measurements; by default `zero_grad` frees them at the start of each
            step, as in our protocol (`profiler.measuring.step`).
        workspace_share: see `WORKSPACE_SHARE`; others are for fitting it.

    Raises:
        InputError: the batch size is below 1.
    """
    if batch_size < 1:
        raise InputError(f"batch size is {batch_size}; it must be 1 or more")
    plain = _replay(trace, batch_size, optimizer, gradients_kept, {})
    scratch = (
        _replay(trace, batch_size, optimizer, gradients_kept, workspace_share)
        if workspace_share
        else plain
    )
    return SimulatedMemory(
        live_mib=plain.peak_live / _MIB_UNITS,
        reserved_mib=plain.reserved / _MIB_UNITS,
        reserved_with_workspace_mib=scratch.reserved / _MIB_UNITS,
    )


def _replay(
    trace: StepTrace,
    batch_size: int,
    optimizer: Optimizer,
    gradients_kept: bool,
    shares: Mapping[int, float],
) -> Allocator:
    allocator = Allocator()
    parameters, buffers = (
        [size for size in _units(sizes).tolist() if size]  # an empty tensor takes no memory
        for sizes in (trace.parameter_bytes, trace.buffer_bytes)
    )
    for size in (*parameters, *buffers):
        allocator.allocate(size)
    events = _events(trace, batch_size, shares)
    kept = frozenset(trace.gradients.tolist())
    gradients: dict[int, Block] = {}
    for step in range(STEPS):
        if not gradients_kept:
            for block in gradients.values():
                allocator.free(block)
            gradients = {}
        gradients = _replay_step(allocator, events, kept, gradients)
        if step == 0:
            for size in parameters:
                for _ in range(STATES_PER_PARAMETER[optimizer]):
                    allocator.allocate(size)
        passing = parameters * TEMPORARIES_PER_PARAMETER[optimizer]
        for block in [allocator.allocate(size) for size in passing]:
            allocator.free(block)
    return allocator


def _units(sizes: IntArray) -> IntArray:
    return (sizes + (_UNIT - 1)) // _UNIT


def _events(
    trace: StepTrace, batch_size: int, shares: Mapping[int, float]
) -> list[tuple[int, int]]:
    """What the allocator is asked for, in order: a block and its size; 0 frees the block.

    Block -1 is scratch memory, which is given back at once.
    """
    sizes, blocks = trace.sizes_at(batch_size), trace.blocks
    scratch = trace.kinds == Event.WORKSPACE
    if shares:
        share = np.zeros(blocks[scratch].max(initial=0) + 1)
        for which, value in shares.items():
            share[which : which + 1] = value
        sizes[scratch] = sizes[scratch] * share[blocks[scratch]]
    else:
        sizes[scratch] = 0
    units = _units(sizes)
    asked = units > 0
    units[trace.kinds == Event.FREE] = 0
    blocks = np.where(scratch, -1, blocks)
    return list(zip(blocks[asked].tolist(), units[asked].tolist(), strict=True))


def _replay_step(
    allocator: Allocator,
    events: Sequence[tuple[int, int]],
    kept: frozenset[int],
    old: dict[int, Block],
) -> dict[int, Block]:
    """Replays one step over the gradients of the one before; returns the blocks of the new ones."""
    allocate, free = allocator.allocate, allocator.free
    held: dict[int, Block] = {}
    for block, size in events:
        if not size:
            free(held.pop(block))
        elif block < 0:
            free(allocate(size))
        else:
            held[block] = allocate(size)
            if block in old:  # the new gradient has been added to the old one
                free(old.pop(block))
    for block in sorted(held.keys() - kept):
        free(held.pop(block))
    return held


Block = tuple[int, int]
"""Address and size of a block, in units of 512 bytes."""


class Allocator:
    """PyTorch's caching allocator on one stream; sizes and addresses in units of 512 bytes.

    Free blocks are found by size (best fit, then lowest address), and by their borders, to merge
    neighbours. Segments lie apart, so that blocks of two never merge.
    """

    def __init__(self) -> None:
        self.live = 0
        self.peak_live = 0
        self.reserved = 0
        self._small: list[int] = []
        self._large: list[int] = []
        """Size and address of each free block as one number, in order."""
        self._borders: dict[int, int] = {}
        """Size of each free block at its beginning, and the negative size at its end. Two never
        meet at one address, as they would have been merged."""
        self._next = 0

    def allocate(self, size: int) -> Block:
        """Takes a block of at least this size, which must not be 0."""
        small = size <= _MIB_UNITS
        pool = self._small if small else self._large
        at = bisect_left(pool, size << _ADDRESS_BITS)
        if at < len(pool):
            found = pool.pop(at)
            address, have = found & _ADDRESS, found >> _ADDRESS_BITS
            del self._borders[address], self._borders[address + have]
        else:
            have = _segment(size)
            address = self._next
            self._next += have + 1
            self.reserved += have
        rest = have - size
        if rest > (0 if small else _MIB_UNITS):
            tail = address + size
            self._borders[tail] = rest
            self._borders[tail + rest] = -rest
            insort(pool, rest << _ADDRESS_BITS | tail)
            have = size
        self.live += have
        if self.live > self.peak_live:  # noqa: PLR1730  (called 10,000 times a step)
            self.peak_live = self.live
        return address, have

    def free(self, block: Block) -> None:
        """Gives a block back."""
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


def _segment(size: int) -> int:
    """Units that are taken from the device for a request of this size."""
    if size <= _MIB_UNITS:
        return 2 * _MIB_UNITS
    if size < 10 * _MIB_UNITS:
        return 20 * _MIB_UNITS
    return (size + 2 * _MIB_UNITS - 1) // (2 * _MIB_UNITS) * (2 * _MIB_UNITS)
