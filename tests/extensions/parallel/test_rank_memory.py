"""Memory of ranks, which decreases with sharding."""

import numpy as np
import pytest

from trappm.extensions.parallel.rank_memory import (
    DEEPSPEED_BF16,
    MEGATRON_LM,
    MemoryNeeds,
    rank_memory,
    traced_needs,
)
from trappm.extensions.parallel.schedules import Parallelism, ShardingStrategy
from trappm.extensions.parallel.shared_step import PROCESS, SharedStep, predict_parallel
from trappm.profiler.errors import InputError
from trappm.profiler.memory.simulation import TrainingLoop
from trappm.profiler.records import Optimizer
from trappm.profiler.trace import trace

BATCH = 8
ADAM = TrainingLoop(optimizer=Optimizer.ADAM)


@pytest.fixture(scope="module")
def allocations():
    return trace("vit_tiny_patch16_224", 224).allocations


@pytest.fixture(scope="module")
def needs(allocations):
    return traced_needs(allocations, BATCH, ADAM)


GPT = {"sequence_length": 128, "batch_size": 1, "optimizer": "adamw", "device": "a100"}


def test_single_rank_needs_the_memory_of_the_step(needs):
    whole = float((needs.gradients + needs.activations).max()) + needs.parameters + needs.states
    for strategy in ShardingStrategy:
        alone = rank_memory(needs, Parallelism(strategy=strategy))
        assert alone.total == pytest.approx(whole)
        assert (alone.gathered, alone.buckets) == (0.0, 0.0)


def test_fsdp_memory_decreases_with_ranks_and_ddp_memory_does_not(needs, allocations):
    sizes = [
        rank_memory(needs, Parallelism(strategy=ShardingStrategy.FSDP, gpus=n)).total
        for n in (2, 4, 8, 16)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
    ddp = [rank_memory(needs, Parallelism(gpus=n)) for n in (2, 16)]
    assert ddp[0] == ddp[1]
    assert ddp[0].buckets == allocations.parameter_bytes.sum()


def test_a_sharded_optimizer_divides_states_over_replicas_only(needs):
    plain, sharded = (
        rank_memory(
            needs,
            Parallelism(strategy=ShardingStrategy.TP, gpus=8, tensor=2, sharded_optimizer=choice),
        )
        for choice in (False, True)
    )
    assert plain.parameters == pytest.approx(needs.parameters / 2)
    assert sharded.states == pytest.approx(plain.states / 4)
    assert sharded.parameters == plain.parameters
    assert sharded.gradients == plain.gradients
    with pytest.raises(InputError, match="fsdp shards the optimizer anyway"):
        Parallelism(strategy=ShardingStrategy.FSDP, gpus=2, sharded_optimizer=True)


def test_mixed_precision_has_main_copies_and_one_buffer_of_gradients(needs):
    parameters = needs.all_gradients / 2  # as if they had 16 bits
    for kind, of_gradients, of_states in ((MEGATRON_LM, 4, 12), (DEEPSPEED_BF16, 6, 16)):
        rank = rank_memory(kind.needs(needs), Parallelism(gpus=4, sharded_optimizer=True))
        assert rank.gradients == pytest.approx(of_gradients * parameters)
        assert rank.states == pytest.approx(of_states * parameters / 4)
        assert rank.buckets == 0.0


def test_the_first_stage_keeps_several_micro_batches_and_the_last_one_the_head(needs):
    one, two, four = (
        rank_memory(
            needs,
            Parallelism(strategy=ShardingStrategy.TP, tensor=1, gpus=4, pipeline=4, accumulation=n),
        ).activations
        for n in (1, 2, 4)
    )
    assert one < two < four
    alone = rank_memory(needs, Parallelism(accumulation=4)).activations
    assert four <= alone


def test_megatron_keeps_16_bit_parameters_with_main_copies():
    ranks = {
        sharded: predict_parallel(
            "hf:gpt2,megatron", gpus=8, precision="bf16", sharded_optimizer=sharded, **GPT
        )
        for sharded in (False, True)
    }
    parts = ranks[True].memory_parts_mib
    assert parts["states"] == pytest.approx(ranks[False].memory_parts_mib["states"] / 8)
    assert parts["states"] * 8 == pytest.approx(8 * parts["parameters"], rel=0.01)
    assert parts["gradients"] == pytest.approx(3 * parts["parameters"], rel=0.01)
    low, high = ranks[True].intervals["memory_mib"]
    assert low < ranks[True].memory_mib < high


def test_one_gpu_and_fsdp_have_the_memory_of_the_step():
    step = SharedStep.of("hf:gpt2,megatron", precision="bf16", **GPT)
    for parallelism in (
        Parallelism(sharded_optimizer=True),
        Parallelism(strategy=ShardingStrategy.FSDP, gpus=8),
    ):
        of_rank, whole = step.on(parallelism), rank_memory(step.needs, parallelism)
        tensors = {k: v for k, v in of_rank.memory_parts_mib.items() if k != PROCESS}
        assert sum(tensors.values()) == pytest.approx(whole.total / 2**20)
    alone = step.on(Parallelism(sharded_optimizer=True)).memory_mib
    assert alone == pytest.approx(step.single.memory_mib, rel=0.01)


def test_fsdp_gathers_frozen_parameters():
    fsdp = Parallelism(strategy=ShardingStrategy.FSDP, gpus=4)
    whole, embeddings, lora = (
        SharedStep.of(f"hf:gpt2{option}", **GPT | {"batch_size": 8}).on(fsdp)
        for option in ("", ",frozen=embeddings", ",lora=4")
    )
    gathered = [step.memory_parts_mib["gathered"] for step in (whole, embeddings, lora)]
    assert gathered[0] > gathered[1] > 0.8 * gathered[0]
    assert gathered[1] > gathered[2] > 100
    times = [step.communication_ms for step in (whole, embeddings, lora)]
    assert times[0] > times[1] > times[2] > 0.3 * times[0]


@pytest.mark.parametrize(("gathered", "peak"), [(30.0, 0.0), (60.0, 60.0)])
def test_fsdp_gathers_nothing_in_the_optimizer_step(gathered, peak):
    needs = MemoryNeeds(
        parameters=100.0, states=200.0, gradients=np.array([50.0, 100.0, 200.0]),
        activations=np.array([10.0, 0.0, 0.0]), all_gradients=100.0, gathered=gathered,
    )  # fmt: skip
    rank = rank_memory(needs, Parallelism(strategy=ShardingStrategy.FSDP, gpus=2))
    assert rank.gathered == peak
    assert rank.total == max(250.0, 150.0 + 50.0 + gathered)
