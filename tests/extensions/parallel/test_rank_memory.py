"""Memory of ranks, which decreases with sharding."""

import pytest

from trappm.extensions.parallel.rank_memory import rank_memory, traced_needs
from trappm.extensions.parallel.schedules import Parallelism, Strategy
from trappm.profiler.records import Optimizer
from trappm.profiler.simulation.training_loop import TrainingLoop
from trappm.profiler.static_profile import step_profile

BATCH = 8
ADAM = TrainingLoop(optimizer=Optimizer.ADAM)


@pytest.fixture(scope="module")
def trace():
    return step_profile("vit_tiny_patch16_224", 224).trace


def test_single_rank_needs_the_memory_of_the_step(trace):
    needs = traced_needs(trace, BATCH, ADAM)
    whole = float((needs.gradients + needs.activations).max()) + needs.parameters + needs.states
    for strategy in Strategy:
        alone = rank_memory(needs, Parallelism(strategy=strategy))
        assert alone.total == pytest.approx(whole)
        assert (alone.gathered, alone.buckets) == (0.0, 0.0)


def test_fsdp_memory_decreases_with_ranks_and_ddp_memory_does_not(trace):
    needs = traced_needs(trace, BATCH, ADAM)
    sizes = [
        rank_memory(needs, Parallelism(strategy=Strategy.FSDP, gpus=n)).total for n in (2, 4, 8, 16)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
    ddp = [rank_memory(needs, Parallelism(gpus=n)) for n in (2, 16)]
    assert ddp[0] == ddp[1]
    assert ddp[0].buckets == trace.parameter_bytes.sum()


def test_tensor_parallelism_divides_a_transformer(trace):
    needs = traced_needs(trace, BATCH, ADAM)
    sizes = [rank_memory(needs, Parallelism(strategy=Strategy.TP, gpus=gpus)) for gpus in (1, 2, 4)]
    assert sizes[0].parameters == pytest.approx(4 * sizes[2].parameters)
    assert sizes[0].total > sizes[1].total > sizes[2].total
