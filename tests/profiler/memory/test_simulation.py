"""The model of CUDA's allocator, and steps replayed through it."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced_steps import meta, trace_step

from trappm.profiler.memory.simulation import (
    MIB,
    Allocator,
    ExpandableAllocator,
    simulate_memory,
)
from trappm.profiler.traced_step import Allocations, Event

MIB_UNITS = MIB // 512
"""The allocator counts in units of 512 bytes."""


def test_a_step_runs_on_less_than_it_would_reserve():
    trace, _ = trace_step(meta("resnet18"), 64)
    free = simulate_memory(trace, 256)
    assert simulate_memory(trace, 256, limit_mib=free.reserved_with_workspace_mib) == free
    least = simulate_memory(trace, 256, limit_mib=1.0)
    assert least.live_mib == free.live_mib
    assert free.live_mib <= least.reserved_mib < free.reserved_mib
    assert simulate_memory(trace, 256, limit_mib=least.reserved_with_workspace_mib) == least
    between_mib = (least.reserved_with_workspace_mib + free.reserved_with_workspace_mib) / 2
    full = simulate_memory(trace, 256, limit_mib=between_mib)
    assert full.reserved_with_workspace_mib == between_mib


sizes_asked = st.one_of(st.integers(1, 4 * MIB_UNITS), st.integers(1, 40 * MIB_UNITS))


@settings(deadline=None)
@pytest.mark.parametrize("kind", [Allocator, ExpandableAllocator])
@given(st.lists(st.tuples(sizes_asked, st.integers(0, 30), st.booleans()), max_size=120))
def test_blocks_never_overlap_and_memory_is_conserved(kind, requests):
    allocator, held = kind(), []
    for size, which, release in requests:
        if release and held:
            allocator.free(held.pop(which % len(held)))
        else:
            block = allocator.allocate(size)
            assert block[1] >= size
            held.append(block)
        at = sorted(held)
        assert all(a + size <= b for (a, size), (b, _) in pairwise(at))
        assert allocator.live == sum(size for _, size in held)
        assert allocator.live <= allocator.peak_live <= allocator.reserved
    for block in held:
        allocator.free(block)
    assert allocator.live == 0
    reserved = allocator.reserved
    for _, size in held:  # every segment is whole again: what fitted fits again
        allocator.free(allocator.allocate(size))
    assert allocator.reserved == reserved


def test_an_expandable_segment_grows_by_pages_from_the_free_block_at_its_end():
    allocator = ExpandableAllocator()
    first = allocator.allocate(30 * MIB_UNITS)
    assert allocator.reserved == 40 * MIB_UNITS
    allocator.allocate(25 * MIB_UNITS)  # 10 MiB were free at the end
    assert allocator.reserved == 60 * MIB_UNITS
    allocator.free(first)
    allocator.allocate(29 * MIB_UNITS + 1)  # splits exactly, however small the rest is
    assert allocator.live == 54 * MIB_UNITS + 1
    assert allocator.reserved == 60 * MIB_UNITS
    allocator.allocate(1)  # small blocks have pages of 2 MiB
    assert allocator.reserved == 62 * MIB_UNITS


def test_a_full_device_takes_free_pages_of_expandable_segments_back():
    allocator = ExpandableAllocator(60 * MIB_UNITS)
    _, freed = (allocator.allocate(n * MIB_UNITS) for n in (25, 15))
    small = [allocator.allocate(MIB_UNITS) for _ in range(10)]
    assert allocator.reserved == 50 * MIB_UNITS
    for block in small:
        allocator.free(block)
    allocator.free(freed)
    allocator.allocate(35 * MIB_UNITS)  # 10 MiB of small blocks' pages are in the way
    assert allocator.reserved == 60 * MIB_UNITS
    assert allocator.live == (25 + 35) * MIB_UNITS


@st.composite
def traces(draw):
    """Steps that allocate and free at random; sizes grow with the batch or stay, and are below one
    MiB up to batch 200: such blocks are always split, so that live memory is what was asked."""
    kinds, blocks, sizes, alive = [], [], [], []
    count = draw(st.integers(1, 30))
    for number in range(count):
        constant, slope = draw(st.integers(0, 1 << 17)), draw(st.integers(0, 1 << 12))
        kinds.append(Event.ALLOCATE)
        blocks.append(number)
        sizes.append((constant + 8 * slope, constant + 32 * slope))
        alive.append(number)
        if draw(st.booleans()):
            freed = alive.pop(draw(st.integers(0, len(alive) - 1)))
            kinds.append(Event.FREE)
            blocks.append(freed)
            sizes.append(sizes[blocks.index(freed)])
    kinds.append(Event.END_OF_FORWARD)
    blocks.append(0)
    sizes.append((0, 0))
    gradients = alive[: draw(st.integers(0, len(alive)))]
    return Allocations(
        kinds=np.array(kinds, dtype=np.int8),
        blocks=np.array(blocks, dtype=np.int32),
        sizes=np.array(sizes, dtype=np.int64),
        gradients=np.array(gradients, dtype=np.int32),
        parameter_bytes=np.array([4096] * len(gradients), dtype=np.int64),
        parameter_places=np.arange(len(gradients)),
        element_bytes=np.array([4] * len(gradients), dtype=np.int64),
        buffer_bytes=np.array([], dtype=np.int64),
    )


@settings(deadline=None)
@given(traces(), st.integers(1, 100), st.integers(1, 100))
def test_a_larger_batch_never_needs_less_live_memory(trace, batch_size, more):
    """Of live memory; what is reserved may shrink where a larger batch happens to pack better."""
    small, large = (simulate_memory(trace, b) for b in (batch_size, batch_size + more))
    assert small.live_mib <= large.live_mib <= large.reserved_mib
