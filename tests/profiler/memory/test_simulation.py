"""The model of CUDA's allocator, and steps replayed through it."""

from itertools import pairwise

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

MIB_UNITS = MIB // 512
"""The allocator counts in units of 512 bytes."""


def test_segments_have_the_sizes_of_pytorchs_allocator():
    for units, mib in ((MIB_UNITS, 2), (MIB_UNITS + 1, 20), (10 * MIB_UNITS, 10)):
        allocator = Allocator()
        allocator.allocate(units)
        assert allocator.reserved == mib * MIB_UNITS


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
