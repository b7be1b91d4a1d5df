"""The GPU memory of a training step: its allocations, replayed through PyTorch's allocator.

**The allocator** follows PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp) on one
stream: sizes are rounded up to 512 bytes; requests up to 1 MiB come from segments of 2 MiB, those
under 10 MiB from segments of 20 MiB, larger ones from segments of their own rounded up to 2 MiB;
the best fitting free block is taken and split, neighbors merge when freed, and unused segments are
returned only after cuDNN's search for the fastest algorithm and on a full device. So reserved
memory includes rounding and fragmentation, and a step runs on less than it reserves. With
`expandable_segments`, each of the two kinds has one segment that grows by pages instead.

**The training loop** allocates around forward and backward pass, as PyTorch 2.13 on CUDA:

    zero_grad   frees the gradients, or keeps them
    backward    once for each micro-step; the second adds its gradients to those of the first
    step        the optimizer: states in the first step, temporaries in every one

The rules follow torch/optim; tests compare them with real allocations. What `GradScaler` and
clipping allocate is left out: numbers of 512 bytes. `adamw-8bit` follows bitsandbytes 0.50, whose
kernels need no temporaries; copies that it makes of parameters in channels-last are left out.

**The replay** has the sizes of the traced allocations, which are of one precision, layout and
execution.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import cache, partial
from weakref import WeakKeyDictionary

import numpy as np

from trappm.profiler.errors import InputError, UnsupportedModelError
from trappm.profiler.records import IntArray, Optimizer, member
from trappm.profiler.traced_step import Allocations, ConvolutionKind, Event, Pass, Trace

Block = tuple[int, int]
"""Address and size of a block, in units of 512 bytes."""

MIB = 1 << 20
UNIT = 512
"""Unit of all sizes and addresses within the allocator, in bytes."""
MIB_UNITS = MIB // UNIT
_ADDRESS_BITS = 48
_ADDRESS = (1 << _ADDRESS_BITS) - 1


class Allocator:
    """PyTorch's caching allocator on one stream; sizes and addresses in units of 512 bytes.

    Free blocks are found by size (best fit, then lowest address), and by their borders to merge
    neighbors. Gaps between segments keep their blocks from merging.
    """

    _least_rest = MIB_UNITS
    """Largest rest of a large block that is not split off."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        """Memory of the device, which grows where an allocation would fail; None for one that is
        never full."""
        self.was_full = False
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
        small = size <= MIB_UNITS
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
        if self.capacity is not None and self.reserved + size > self.capacity:
            self.was_full = True
            self.give_back()
            self.capacity = max(self.capacity, self.reserved + size)
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def free(self, block: Block) -> None:
        address, size = block
        self.live -= size
        pool = self._small if size <= MIB_UNITS else self._large
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
        which = int(size > MIB_UNITS)
        last, pages = self._growth(which, size)
        if self.capacity is not None and self.reserved + pages > self.capacity:
            self.was_full = True
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


_PAGES = 2 * MIB_UNITS, 20 * MIB_UNITS
"""Pages of expandable segments of small and of large blocks (`kSmallBuffer`, `kLargeBuffer`)."""


def _segment(size: int) -> int:
    if size <= MIB_UNITS:
        return 2 * MIB_UNITS
    if size < 10 * MIB_UNITS:
        return 20 * MIB_UNITS
    return (size + 2 * MIB_UNITS - 1) // (2 * MIB_UNITS) * (2 * MIB_UNITS)


_SCALAR = 1
"""Size of a tensor with one number, in units of 512 bytes."""


class Implementation(StrEnum):
    """Implementation of an optimizer in `torch.optim`."""

    PLAIN = "plain"
    """One parameter after the other (`foreach=False`)."""
    FOREACH = "foreach"
    """All parameters at once, operator by operator: the default on CUDA."""
    FUSED = "fused"
    """All parameters in one kernel (`fused=True`)."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters with the same options of the optimizer: a group of `torch.optim`."""

    optimizer: Optimizer
    implementation: Implementation = Implementation.FOREACH
    weight_decay: bool = False
    """True if it is above 0."""
    places: tuple[int, ...] | None = None
    """Places of the parameters among those of the module, in order; None for all."""

    def among(self, places: Sequence[int]) -> list[int]:
        """Return the indices of those of these parameters that belong to the group."""
        if self.places is None:
            return [*range(len(places))]
        own = frozenset(self.places)
        return [index for index, place in enumerate(places) if place in own]

    def state_bytes(
        self,
        parameter_bytes: Sequence[int],
        places: Sequence[int],
        element_bytes: Sequence[int],
    ) -> list[int]:
        """Return the bytes of each tensor that the optimizer keeps; see `TrainingLoop`."""
        maps = _MAPS_OF_8_BITS if self.optimizer is Optimizer.ADAMW_8BIT else ()
        return [
            *maps,
            *(
                size
                for index in self.among(places)
                for size in self.optimizer.state_bytes(parameter_bytes[index], element_bytes[index])
            ),
        ]

    def step(self, memory: Allocator, sizes: Sequence[int], *, first: bool) -> None:
        """Replay the step of an optimizer of `torch.optim` for parameters of these sizes."""
        fused = self.implementation is Implementation.FUSED
        if first and (fused or self.optimizer.is_adam):
            counts = [_SCALAR] * (fused and self.optimizer.is_adam)  # else on the host
            for size in sizes:
                _allocate(memory, [*counts, *[size] * self.optimizer.states_per_parameter])
        if self.implementation is Implementation.FOREACH:
            self._step_at_once(memory, sizes, first=first)
        elif self.implementation is Implementation.PLAIN:
            self._step_in_turn(memory, sizes, first=first)

    @property
    def _adds_decay(self) -> bool:
        """Return whether copies of gradients get the weight decay; AdamW changes the weights."""
        return self.weight_decay and self.optimizer is not Optimizer.ADAMW

    def _step_at_once(self, memory: Allocator, sizes: Sequence[int], *, first: bool) -> None:
        with _allocate_within(memory, sizes if self._adds_decay else ()):
            if first and self.optimizer is Optimizer.MOMENTUM:
                _allocate(memory, sizes)
        if self.optimizer.is_adam:
            with _allocate_within(memory, sizes):  # roots of the second moments
                pass

    def _step_in_turn(self, memory: Allocator, sizes: Sequence[int], *, first: bool) -> None:
        divisor: Block | None = None
        for size in sizes:
            with _allocate_within(memory, [size] if self._adds_decay else ()):
                if first and self.optimizer is Optimizer.MOMENTUM:
                    memory.allocate(size)
                if self.optimizer.is_adam:
                    before = divisor  # Python holds it until there is the next
                    with _allocate_within(memory, [size]):  # root of the second moment
                        divisor = memory.allocate(size)
                    if before is not None:
                        memory.free(before)
        if divisor is not None:
            memory.free(divisor)


@dataclass(frozen=True, kw_only=True)
class TrainingLoop:
    """A training loop around a step in fp32.

    Raises:
        InputError: Fewer than one accumulation step.
    """

    optimizer: Optimizer = Optimizer.SGD
    implementation: Implementation = Implementation.FOREACH
    weight_decay: bool = False
    """True if it is above 0, as by default in AdamW alone, in 32 bits and in 8."""
    groups: tuple[ParameterGroup, ...] = ()
    """Groups of an optimizer with several kinds of parameters, or without some of them; then the
    three fields above are those of most parameters."""
    accumulation_steps: int = 1
    """Forward and backward passes before each step of the optimizer."""
    set_to_none: bool = True
    """True if `zero_grad` frees the gradients, which is its default."""
    cudnn_benchmark: bool = False
    """True if cuDNN searches for the fastest algorithm of each new convolution.

    After a search PyTorch returns unused segments (`emptyCache` in
    aten/src/ATen/native/cudnn/Conv_v7.cpp).
    """

    expandable_segments: bool = False
    """True with `PYTORCH_ALLOC_CONF=expandable_segments:True`, in inference as well."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", member("optimizer", Optimizer, self.optimizer))
        passes = self.accumulation_steps
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise InputError(f"accumulation is {passes!r}; it must be a whole number of 1 or more")
        is_usual = self.implementation is Implementation.FOREACH
        if self.optimizer is Optimizer.ADAMW_8BIT and not is_usual:
            raise InputError(f"{self.optimizer} has one implementation; name no other")

    def held(self, places: Sequence[int]) -> list[int]:
        """Return the indices of the parameters that the optimizer holds, by their places."""
        return sorted({index for group in self.parameter_groups for index in group.among(places)})

    def kept_gradients(self, places: Sequence[int]) -> list[int]:
        """Return the indices of the parameters whose gradients exist during a forward pass.

        Those of earlier passes, and those of parameters that are in no group of the optimizer:
        `zero_grad` of the optimizer does not free them.
        """
        if self.accumulation_steps > 1 or not self.set_to_none:
            return [*range(len(places))]
        held = frozenset(self.held(places))
        return [index for index in range(len(places)) if index not in held]

    @property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """Return the groups; a single one of all parameters unless there are others."""
        return self.groups or (
            ParameterGroup(
                optimizer=self.optimizer,
                implementation=self.implementation,
                weight_decay=self.weight_decay,
            ),
        )

    def state_bytes(
        self,
        parameter_bytes: Sequence[int],
        places: Sequence[int],
        element_bytes: Sequence[int],
    ) -> int:
        """Return the bytes of the states that the optimizer keeps.

        Args:
            parameter_bytes, places, element_bytes: Bytes of each parameter with a gradient, its
                place among the parameters of the module, and bytes of one of its elements.
        """
        return sum(
            sum(group.state_bytes(parameter_bytes, places, element_bytes))
            for group in self.parameter_groups
        )

    def update(
        self,
        memory: Allocator,
        parameter_bytes: Sequence[int],
        places: Sequence[int],
        element_bytes: Sequence[int],
        *,
        first: bool,
    ) -> None:
        """Replay what comes between the last backward pass and the next step.

        Args:
            memory: Allocator with the gradients.
            parameter_bytes, places, element_bytes: As for `state_bytes`.
            first: Whether this is the first step, which makes the states.
        """
        for group in self.parameter_groups:
            if group.optimizer is not Optimizer.ADAMW_8BIT:
                own = [parameter_bytes[index] for index in group.among(places)]
                group.step(memory, _units_of(own), first=first)
            elif first:
                _allocate(
                    memory, _units_of(group.state_bytes(parameter_bytes, places, element_bytes))
                )


DEFAULT_LOOP = TrainingLoop()
"""SGD, and PyTorch's defaults on CUDA."""


_MAPS_OF_8_BITS = (1024, 1024)
"""Bytes of the values in fp32 that 8 bits represent, signed and unsigned (`fill_qmap`)."""


def _units_of(sizes: Sequence[int]) -> list[int]:
    """Return sizes in units of 512 bytes, without empty tensors, which take no memory."""
    return [size for size in _units(np.array(sizes, dtype=np.int64)).tolist() if size]


def _allocate(memory: Allocator, sizes: Sequence[int]) -> list[Block]:
    return [memory.allocate(size) for size in sizes]


@contextmanager
def _allocate_within(memory: Allocator, sizes: Sequence[int]) -> Iterator[None]:
    """Allocate blocks within the block of code only."""
    blocks = _allocate(memory, sizes)
    yield
    for block in reversed(blocks):
        memory.free(block)


class LoopPreset(Enum):
    """Settings of the two training loops that labels come from, for any optimizer."""

    PLAIN = "plain"
    """Our protocol (`profiler.steps.step`): PyTorch's defaults."""
    TUNED = "tuned"
    """Loop of the published A100 labels: SGD has momentum, weight decay, and cuDNN's benchmark."""

    def with_optimizer(self, optimizer: Optimizer) -> TrainingLoop:
        tuned = self is LoopPreset.TUNED
        if tuned and optimizer is Optimizer.SGD:
            optimizer = Optimizer.MOMENTUM
        decays = tuned or optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_8BIT)
        return TrainingLoop(optimizer=optimizer, weight_decay=decays, cudnn_benchmark=tuned)


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
    loop: LoopPreset = LoopPreset.PLAIN,
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

    >>> from trappm.profiler.trace import trace
    >>> allocations = trace("resnet18", 224).allocations
    >>> memory = simulate_memory(allocations, batch_size=64)
    >>> memory.live_mib < memory.reserved_mib < 3072
    True

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
    parameter_bytes = allocations.parameter_bytes.tolist()
    places = allocations.parameter_places.tolist()
    _allocate(allocator, _units_of([*parameter_bytes, *allocations.buffer_bytes.tolist()]))
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
        if any(parameter_bytes):
            loop.update(
                allocator,
                parameter_bytes,
                places,
                allocations.element_bytes.tolist(),
                first=step == 0,
            )
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
