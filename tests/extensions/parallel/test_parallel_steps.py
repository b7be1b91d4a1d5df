"""Steps on many GPUs: what a schedule cannot be, whatever the constants of its links."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from trappm.extensions.parallel.links import LinkKind, NodeLinks, link, node_of
from trappm.extensions.parallel.schedules import (
    MIB,
    SCATTER,
    Parallelism,
    ShardingStrategy,
    buckets,
    expected_most,
    schedule,
)
from trappm.extensions.parallel.step_work import blocks_of, even_work

SIZES = {"root_bytes": 1.5e8}
LAYOUTS = [(1, 2), (1, 8), (2, 1), (2, 8), (4, 4)]
A100 = node_of("a100")


def gpt2(step_ms):
    """Twelve equal blocks and a root, as those of GPT-2."""
    return replace(even_work(step_ms, 3.4e8, blocks=12), **SIZES)


def endless():
    """Links that take no time."""
    free = {"latency_us": 0.0, "hop_us": 0.0, "sharpness": 1.0}
    inner = link(LinkKind.NVLINK, 1e15, **free)
    return NodeLinks(name="endless", inner=inner, network=link(LinkKind.RDMA, 1e15, **free))


def schedules(work, node, **options):
    for nodes, gpus in LAYOUTS:
        for strategy in (ShardingStrategy.DDP, ShardingStrategy.FSDP):
            parallelism = Parallelism(strategy=strategy, gpus=gpus, nodes=nodes, **options)
            yield parallelism, schedule(work, parallelism, node)


@pytest.mark.parametrize(("nodes", "gpus"), LAYOUTS)
def test_ddp_without_communication_equals_one_gpu(nodes, gpus):
    work = even_work(100.0, 1e8)
    step = schedule(work, Parallelism(gpus=gpus, nodes=nodes), endless())
    assert step.step_ms - step.waiting_ms == pytest.approx(100.0, rel=1e-6)
    assert step.exposed_ms == pytest.approx(0.0, abs=1e-4)
    assert step.waiting_ms == pytest.approx(SCATTER * expected_most(gpus * nodes) * 100.0)


@given(
    pass_ms=st.floats(0.1, 1e4),
    accumulation=st.integers(1, 4),
    slowdown=st.floats(0.1, 100.0),
)
def test_a_step_takes_between_the_larger_of_its_parts_and_their_sum(
    pass_ms, accumulation, slowdown
):
    node = A100.slower(slowdown)
    for parallelism, step in schedules(gpt2(pass_ms), node, accumulation=accumulation):
        longest = max(step.compute_ms, step.communication_ms)
        total = step.compute_ms + step.communication_ms + step.waiting_ms
        assert longest <= step.step_ms * (1 + 1e-9), parallelism
        assert step.step_ms <= total * (1 + 1e-9), parallelism


@pytest.mark.parametrize(
    ("device", "gpus", "gbs"),
    [("gh200", 4, 450), ("h20", 8, 450), ("h800-sxm5", 8, 200), ("h800-pcie", 8, 63),
     ("b300", 8, 900), ("gb200", 72, 900)],
)  # fmt: skip
def test_nodes_have_the_links_of_their_data_sheets(device, gpus, gbs):
    node = node_of(device)
    assert (node.gpus, node.inner.gbs) == (gpus, gbs)


def test_slower_links_make_no_step_faster():
    assert A100.with_network(80.0).network.gbs == 10.0
    fast, slow = (list(schedules(gpt2(20.0), A100.slower(f))) for f in (1.0, 2.0))
    for (parallelism, before), (_, after) in zip(fast, slow, strict=True):
        assert before.step_ms <= after.step_ms, parallelism


@given(
    pass_ms=st.floats(0.1, 1e4),
    update=st.floats(0.0, 0.9),
    copy_ms=st.floats(0.0, 100.0),
    accumulation=st.integers(1, 4),
)
def test_speedup_is_at_most_linear(pass_ms, update, copy_ms, accumulation):
    """However little communication costs, and however long the optimizer, which FSDP divides."""
    work = replace(
        even_work(pass_ms, 3.4e8, update=update, blocks=12),
        **SIZES,
        copy_ms=copy_ms,
        fixed_ms=0.5,
    )
    alone = schedule(work, Parallelism(accumulation=accumulation), A100).step_ms
    for node in (endless(), A100):
        for parallelism, step in schedules(work, node, accumulation=accumulation):
            assert step.step_ms >= alone * (1 - 1e-9), parallelism


def test_sharding_costs_copies_beyond_what_it_saves():
    plain = replace(even_work(50.0, 3.4e8, update=0.0, blocks=12), copy_ms=2.0)
    fsdp = Parallelism(strategy=ShardingStrategy.FSDP, gpus=8)
    assert schedule(plain, fsdp, endless()).compute_ms == pytest.approx(50.0 + 3 * 2.0)


def test_hooks_of_sharding_lengthen_passes_that_wait_for_their_host():
    """The device hides the hooks of long passes, and none of those of short ones."""
    fsdp = Parallelism(strategy=ShardingStrategy.FSDP, gpus=8)
    hooks_ms = 60.0
    for waits, expected_ms in ((True, 10.0 + hooks_ms), (False, 1000.0)):
        step_ms = 10.0 if waits else 1000.0
        work = even_work(step_ms, 3.4e8, update=0.0, blocks=12)
        work = replace(work, host_ms=step_ms if waits else 0.0, hooks_ms=hooks_ms)
        computed = schedule(work, fsdp, endless()).compute_ms
        assert computed == pytest.approx(expected_ms, rel=1e-3)


def test_gradients_are_summed_once_per_step():
    work = even_work(10.0, 4e8)
    steps = [schedule(work, Parallelism(gpus=8, accumulation=k), A100) for k in (1, 4)]
    assert steps[0].communication_ms == steps[1].communication_ms
    assert steps[1].step_ms < 4 * steps[0].step_ms
    fsdp = Parallelism(strategy=ShardingStrategy.FSDP, gpus=8)
    steps = [schedule(work, replace(fsdp, accumulation=k), A100) for k in (1, 4)]
    assert steps[1].communication_ms < 3.9 * steps[0].communication_ms  # parameters: each pass


def test_sizes_that_do_not_divide_are_refused(refused):
    with refused("tensor 4 times pipeline 3 does not divide 8 GPUs"):
        Parallelism(gpus=8, strategy=ShardingStrategy.TP, tensor=4, pipeline=3)


@pytest.mark.parametrize("widths", [(64, 64), (1024, 2048, 4096, 1024), (3000, 5000, 10)])
def test_buckets_equal_those_of_torch(widths):
    layers = itertools.pairwise(widths)
    module = torch.nn.Sequential(*(torch.nn.Linear(*sizes) for sizes in layers))
    ready = list(module.parameters())[::-1]
    theirs, _ = distributed._compute_bucket_assignment_by_size(
        ready, [MIB, 25 * MIB], [False] * len(ready)
    )
    assert buckets([p.numel() * 4 for p in ready]) == [list(b) for b in theirs]


def test_blocks_are_repeated_sequences_of_parameters():
    block = [10, 20, 30, 40]
    assert blocks_of([7, 8, *block * 3, 9]) == ([100.0] * 3, 24.0)
    assert blocks_of([1, 2, 3]) == ([], 6.0)
