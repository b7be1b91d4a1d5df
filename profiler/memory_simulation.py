"""The GPU memory of a training step: its trace, replayed through a model of CUDA's allocator.

The rules are those of PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp): sizes are
rounded up to 512 bytes; requests up to 1 MiB come from segments of 2 MiB, those under 10 MiB from
segments of 20 MiB, larger ones from segments of their own rounded up to 2 MiB; the best fitting
free block is taken and split, neighbours merge when freed, and no segment is given back. So the
reserved memory, which is what the device loses, includes rounding and fragmentation.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from profiler.errors import InputError
from profiler.records import Optimizer
from profiler.step_trace import Event, StepTrace

MIB = 1 << 20
_ROUND = 512
_SMALL_LIMIT = 1 * MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_LIMIT = 10 * MIB
_LARGE_SEGMENT = 20 * MIB
_HUGE_ROUND = 2 * MIB

STATES_PER_PARAMETER = {Optimizer.SGD: 0, Optimizer.MOMENTUM: 1, Optimizer.ADAM: 2}
"""Tensors of a parameter's size that each optimizer keeps."""


@dataclass(frozen=True, kw_only=True)
class SimulatedMemory:
    """What the allocator holds at its peak, in MiB, without the CUDA context and libraries."""

    live_mib: float
    """Peak of the tensors alive at once."""
    reserved_mib: float
    """Peak of the segments taken from the device."""
    reserved_with_workspace_mib: float
    """The same, with scratch memory of convolutions."""


STEPS = 2
"""The second step differs from the first: gradients and optimizer states are there before it."""

WORKSPACE_SHARE: Mapping[int, float] = {}
"""Scratch bytes per byte touched, by `ConvolutionKind` * 3 + `Pass`; what is absent needs none."""


def simulate_memory(
    trace: StepTrace, batch_size: int, optimizer: Optimizer = Optimizer.SGD
) -> SimulatedMemory:
    """Replays two training steps at this batch size; gradients are kept between steps.

    Raises:
        InputError: the batch size is below 1.
    """
    if batch_size < 1:
        raise InputError(f"batch size is {batch_size}; it must be 1 or more")
    plain = _replay(trace, batch_size, optimizer, {})
    scratch = _replay(trace, batch_size, optimizer, WORKSPACE_SHARE)
    return SimulatedMemory(
        live_mib=plain.peak_live / MIB,
        reserved_mib=plain.reserved / MIB,
        reserved_with_workspace_mib=scratch.reserved / MIB,
    )


def _replay(
    trace: StepTrace, batch_size: int, optimizer: Optimizer, shares: Mapping[int, float]
) -> _Allocator:
    allocator = _Allocator()
    for size in (*trace.parameter_bytes.tolist(), *trace.buffer_bytes.tolist()):
        allocator.allocate(size)
    events = list(
        zip(trace.kinds.tolist(), trace.blocks.tolist(), trace.sizes_at(batch_size).tolist(),
            strict=True)
    )  # fmt: skip
    kept = set(trace.gradients.tolist())
    gradients: dict[int, _Block] = {}
    for step in range(STEPS):
        gradients = _replay_step(allocator, events, kept, gradients, shares)
        if step == 0:
            for _ in range(STATES_PER_PARAMETER[optimizer]):
                for size in trace.parameter_bytes.tolist():
                    allocator.allocate(size)
    return allocator


def _replay_step(
    allocator: _Allocator,
    events: Sequence[tuple[int, int, int]],
    kept: Set[int],
    old: dict[int, _Block],
    shares: Mapping[int, float],
) -> dict[int, _Block]:
    """Replays one step over the gradients of the one before; returns the blocks of the new ones."""
    held: dict[int, _Block] = {}
    for kind, block, size in events:
        if kind == Event.ALLOCATE:
            held[block] = allocator.allocate(size)
            if block in old:  # the new gradient has been added to the old one
                allocator.free(old.pop(block))
        elif kind == Event.FREE and block in held:
            allocator.free(held.pop(block))
        elif kind == Event.WORKSPACE and shares.get(block):
            allocator.free(allocator.allocate(int(size * shares[block])))
    for block in sorted(held.keys() - kept):
        allocator.free(held[block])
    return {block: held[block] for block in sorted(held.keys() & kept)}


@dataclass(slots=True, eq=False)
class _Block:
    """A piece of a segment; `before` and `after` are its neighbours."""

    size: int
    number: int
    small: bool
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None


@dataclass(slots=True)
class _Allocator:
    live: int = 0
    peak_live: int = 0
    reserved: int = 0
    _count: int = 0
    _pools: dict[bool, list[tuple[int, int, _Block]]] = field(
        default_factory=lambda: {True: [], False: []}
    )

    def allocate(self, size: int) -> _Block:
        size = max(_ROUND, (size + _ROUND - 1) // _ROUND * _ROUND)
        small = size <= _SMALL_LIMIT
        pool = self._pools[small]
        at = bisect.bisect_left(pool, (size, -1))
        if at < len(pool):
            block = pool.pop(at)[2]
            block.free = False
        else:
            block = self._segment(size, small)
        rest = block.size - size
        if rest >= _ROUND if small else rest > _SMALL_LIMIT:
            remaining = self._new(rest, small)
            remaining.before, remaining.after = block, block.after
            if block.after is not None:
                block.after.before = remaining
            block.after = remaining
            block.size = size
            self._give(remaining)
        self.live += block.size
        self.peak_live = max(self.peak_live, self.live)
        return block

    def free(self, block: _Block) -> None:
        self.live -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._take(neighbour)
                self._merge(block, neighbour)
        self._give(block)

    def _segment(self, size: int, small: bool) -> _Block:
        if small:
            segment = _SMALL_SEGMENT
        elif size < _LARGE_LIMIT:
            segment = _LARGE_SEGMENT
        else:
            segment = (size + _HUGE_ROUND - 1) // _HUGE_ROUND * _HUGE_ROUND
        self.reserved += segment
        return self._new(segment, small)

    def _new(self, size: int, small: bool) -> _Block:
        self._count += 1
        return _Block(size, self._count, small)

    def _give(self, block: _Block) -> None:
        block.free = True
        bisect.insort(self._pools[block.small], (block.size, block.number, block))

    def _take(self, block: _Block) -> None:
        pool = self._pools[block.small]
        pool.pop(bisect.bisect_left(pool, (block.size, block.number)))
        block.free = False

    @staticmethod
    def _merge(block: _Block, neighbour: _Block) -> None:
        block.size += neighbour.size
        if neighbour is block.before:
            block.before = neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
