"""The traced step, and the model of CUDA's allocator that replays it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from profiler.errors import InputError
from profiler.memory_simulation import MIB, _Allocator, simulate_memory
from profiler.records import Optimizer
from profiler.step_recorder import trace_step
from profiler.zoo import create_model

DATA = Path(__file__).parents[3] / "shared" / "data"


def meta(architecture, input_size=64):
    with torch.device("meta"):
        return create_model(architecture, input_size)


class Tiny(nn.Module):
    """One convolution and one classifier: its allocations can be counted by hand."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, x):
        return self.head(self.convolution(x).mean((2, 3)))


def tiny():
    with torch.device("meta"):
        return Tiny()


def test_small_requests_share_segments_of_two_mib():
    allocator = _Allocator()
    allocator.allocate(1)
    assert (allocator.live, allocator.reserved) == (512, 2 * MIB)
    for _ in range(4095):
        allocator.allocate(512)
    assert allocator.reserved == 2 * MIB
    allocator.allocate(1)
    assert allocator.reserved == 4 * MIB


@pytest.mark.parametrize(
    ("size", "reserved"),
    [(MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB, 12)],
)
def test_segments_have_the_sizes_of_pytorchs_allocator(size, reserved):
    allocator = _Allocator()
    allocator.allocate(size)
    assert allocator.reserved == reserved * MIB


def test_freed_neighbours_merge_and_are_used_again():
    allocator = _Allocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    assert allocator.reserved == 20 * MIB
    for block in (blocks[1], blocks[3], blocks[2]):
        allocator.free(block)
    allocator.allocate(12 * MIB)
    assert allocator.reserved == 20 * MIB


def test_the_rest_of_a_large_block_is_only_split_off_if_it_is_worth_it():
    allocator = _Allocator()
    allocator.free(allocator.allocate(12 * MIB))
    allocator.allocate(11 * MIB)  # the rest is one MiB: not split
    assert allocator.live == 12 * MIB


@given(
    st.lists(st.tuples(st.integers(0, 40 * MIB), st.integers(0, 30), st.booleans()), max_size=120)
)
def test_whatever_is_done_memory_is_conserved(requests):
    allocator, held = _Allocator(), []
    for size, which, release in requests:
        if release and held:
            allocator.free(held.pop(which % len(held)))
        else:
            held.append(allocator.allocate(size))
        free = sum(size for pool in allocator._pools.values() for size, _, _ in pool)
        assert allocator.live == sum(block.size for block in held)
        assert allocator.live + free == allocator.reserved
        assert allocator.live <= allocator.peak_live <= allocator.reserved
    for block in held:
        allocator.free(block)
    assert allocator.live == 0


def test_memory_grows_with_the_batch_and_with_the_optimizers_states():
    trace = trace_step(meta("resnet10t"), 64)[0]
    by_batch = [simulate_memory(trace, b).reserved_mib for b in (1, 8, 64)]
    assert by_batch == sorted(by_batch)
    assert by_batch[0] < by_batch[-1]
    live = [simulate_memory(trace, 8, o).live_mib for o in ("sgd", "momentum", "adam")]
    weights = trace.parameter_bytes.sum() / MIB
    assert live[1] - live[0] == pytest.approx(weights, rel=0.05)
    assert live[2] - live[0] == pytest.approx(2 * weights, rel=0.05)


def test_reserved_memory_holds_what_is_live_and_scratch_memory_adds_to_it():
    memory = simulate_memory(trace_step(meta("resnet10t"), 64)[0], 32, Optimizer.ADAM)
    assert 0 < memory.live_mib <= memory.reserved_mib <= memory.reserved_with_workspace_mib


def test_batch_zero_is_refused():
    with pytest.raises(InputError, match="batch size is 0"):
        simulate_memory(trace_step(tiny(), 16)[0], 0)


@pytest.mark.skipif(not DATA.is_dir(), reason="the published labels are not beside the repository")
@pytest.mark.parametrize("architecture", ["resnet50", "vit_small_patch16_224", "densenet121"])
def test_measured_a100_memory_is_predicted_with_two_coefficients(architecture):
    """MEMORY.md's coefficients, from other labels; rows with spikes of cuDNN are left out."""
    with (DATA / "a100_40gb_train_memory.csv").open() as file:
        measured = {
            int(row["batch_size"]): float(row["max_gpu_memory_mib"])
            for row in csv.DictReader(file)
            if row["architecture"] == architecture
        }
    with (DATA / "a100_40gb_train_memory_quality.csv").open() as file:
        usable = {
            int(row["batch_size"])
            for row in csv.DictReader(file)
            if row["architecture"] == architecture
            and (row["class"], row["spike"]) == ("usable", "0")
        }
    if not usable:
        pytest.skip(f"no usable row of {architecture}")
    trace = trace_step(meta(architecture, 224), 224)[0]
    for batch_size in usable:
        predicted = 1750 + 1.05 * simulate_memory(trace, batch_size).reserved_mib
        assert predicted == pytest.approx(measured[batch_size], rel=0.15)
