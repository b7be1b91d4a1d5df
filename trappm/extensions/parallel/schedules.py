"""Schedules of a training step on several GPUs, with overlapping compute and communication.

    DDP    forward | backward             | update
                        bucket | bucket | bucket
    FSDP   forward: gather the next block | backward: gather the next, reduce the last
    TP     in `model_parallel`

Ranks are not equally fast in each step: data, clocks and hosts differ, and all ranks wait for the
slowest one. A link runs one collective at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import NormalDist

import numpy as np

from trappm.extensions.parallel.links import NodeLinks, RankGroup
from trappm.extensions.parallel.step_work import StepWork
from trappm.profiler.errors import InputError
from trappm.profiler.records import member


class ShardingStrategy(StrEnum):
    """Strategy that distributes parameters, gradients and optimizer states over ranks."""

    DDP = "ddp"
    """Replicated; gradients are summed in buckets (`DistributedDataParallel`)."""
    FSDP = "fsdp"
    """Sharded; each rank gathers the parameters of a block when needed (FSDP2)."""
    TP = "tp"
    """Ranks split each block's products and the sequence of blocks (Megatron-LM)."""


_ELSEWHERE = {
    "zero1": "ZeRO-1 is ddp with a sharded optimizer",
    "zero2": "ZeRO-2 is not covered, and nearest to fsdp",
    "zero3": "ZeRO-3 is nearest to fsdp",
    "hsdp": "hybrid sharding is not covered, and nearest to fsdp",
    "ep": "expert parallelism is not covered",
    "cp": "context parallelism is not covered",
    "offload": "offloading is not covered",
}
"""Remarks on strategies of other libraries."""


def strategy_of(text: str) -> ShardingStrategy:
    """Return the strategy by its name; raises InputError for another one."""
    return member("strategy", ShardingStrategy, text, _ELSEWHERE)


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Strategy of a training step and its numbers of GPUs, nodes and passes.

    Raises:
        InputError: A number is not a positive integer.
    """

    strategy: ShardingStrategy = ShardingStrategy.DDP
    gpus: int = 1
    """GPUs per node."""
    nodes: int = 1
    accumulation: int = 1
    """Forward and backward passes (micro-batches) per optimizer step."""
    tensor: int | None = None
    """GPUs that split each product with `tp` (default: all of a node)."""
    pipeline: int = 1
    """Stages that split the blocks of the model with `tp`."""
    sharded_optimizer: bool = False
    """True if replicas divide the optimizer states: ZeRO-1, Megatron's distributed optimizer."""
    sequence_parallel: bool = False
    """True if the GPUs that split a product also split the tokens of all hidden states."""

    def __post_init__(self) -> None:
        for name in ("gpus", "nodes", "accumulation", "tensor", "pipeline"):
            value = getattr(self, name)
            if name == "tensor" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}; it must be a positive integer")
        if self.strategy is not ShardingStrategy.TP and (self.tensor or 1) * self.pipeline > 1:
            raise InputError(f"{self.strategy} has no tensor and pipeline; use strategy tp")
        if self.sharded_optimizer and self.strategy is ShardingStrategy.FSDP:
            raise InputError("fsdp shards the optimizer anyway; leave sharded_optimizer out")
        if self.sequence_parallel and self.strategy is not ShardingStrategy.TP:
            raise InputError(f"{self.strategy} has no sequence_parallel; use strategy tp")
        if self.gpus % self.tensor_parallel:
            raise InputError(
                f"tensor is {self.tensor}; it must divide the {self.gpus} GPUs of a node"
            )
        if self.ranks % (self.tensor_parallel * self.pipeline):
            raise InputError(
                f"tensor {self.tensor_parallel} times pipeline {self.pipeline} does not divide "
                f"{self.ranks} GPUs"
            )

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @property
    def tensor_parallel(self) -> int:
        """Return the number of GPUs that split each product; 1 except for `tp`."""
        return (self.tensor or self.gpus) if self.strategy is ShardingStrategy.TP else 1

    @property
    def data_parallel(self) -> int:
        """Return the number of replicas, each with its own samples."""
        return self.ranks // (self.tensor_parallel * self.pipeline)


MIB = 1 << 20
BUCKETS_MIB = (1.0, 25.0)
"""Sizes of the first bucket of `DistributedDataParallel` and of the others."""
SCATTER = 0.05
"""Relative standard deviation of a rank's step time, estimated as 0.05 in nodes of A100s and 0.08
in nodes of V100s (docs/research/step_time.md)."""


@dataclass(frozen=True, kw_only=True)
class StepSchedule:
    """Times of a step on several GPUs, in ms."""

    step_ms: float
    compute_ms: float
    """Compute time of a rank; it waits for the rest of the step."""
    communication_ms: float
    """Time of all collectives of a rank, including overlapped ones."""
    waiting_ms: float = 0.0
    """Additional wait for the slowest rank, beyond the exposed communication."""

    @property
    def exposed_ms(self) -> float:
        """Return the communication time that does not overlap with compute."""
        return max(self.step_ms - (self.compute_ms + self.waiting_ms), 0.0)


def schedule(work: StepWork, parallelism: Parallelism, node: NodeLinks) -> StepSchedule:
    """Return the schedule of a DDP or FSDP step with `accumulation` passes."""
    own = _of_a_rank(work, parallelism)
    passes = parallelism.accumulation
    compute_ms = passes * (own.forward_ms + own.backward_ms) + own.update_ms + own.fixed_ms
    group = RankGroup(node=node, gpus=parallelism.gpus, nodes=parallelism.nodes)
    if parallelism.data_parallel == 1:
        synced = _Timeline(compute_ms, 0.0)
    elif parallelism.strategy is ShardingStrategy.FSDP:
        synced = _fsdp(own, group, passes)
    else:
        synced = _ddp(own, group, parallelism)
    end_ms = synced.end_ms
    # Exposed communication hides differences between ranks. If the overhead of sharding was
    # measured (`contention`), it includes waiting.
    known = parallelism.strategy is ShardingStrategy.FSDP and work.contention
    scatter = 0.0 if known else SCATTER / passes**0.5
    slowest_ms = scatter * expected_most(parallelism.data_parallel) * compute_ms
    waiting_ms = max(slowest_ms - (end_ms - compute_ms), 0.0)
    return StepSchedule(
        step_ms=end_ms + waiting_ms,
        compute_ms=compute_ms,
        communication_ms=synced.communication_ms,
        waiting_ms=waiting_ms,
    )


def expected_most(ranks: int) -> float:
    """Return the expected maximum of n standard normal variables, for the slowest of n ranks.

    Blom's approximation (1958) has an error below 0.03.
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def buckets(sizes: Sequence[float]) -> list[list[int]]:
    """Return the indices of the gradients in each bucket of `DistributedDataParallel`, in order.

    The gradient that exceeds the limit closes its bucket, so most buckets exceed their limit.
    """
    groups, place, limit, filled = [list[int]()], 0, BUCKETS_MIB[0] * MIB, 0.0
    for place, size in enumerate(sizes):
        groups[-1].append(place)
        filled += size
        if filled >= limit:
            groups.append([])
            filled, limit = 0.0, BUCKETS_MIB[1] * MIB
    return [group for group in groups if group]


@dataclass(frozen=True)
class _Timeline:
    end_ms: float
    communication_ms: float


def _of_a_rank(work: StepWork, parallelism: Parallelism) -> StepWork:
    """Return the work of one rank."""
    saved_ms = work.update_ms * (1 - 1 / parallelism.data_parallel)
    if parallelism.sharded_optimizer:
        return replace(work, update_ms=work.update_ms - saved_ms)
    if parallelism.strategy is not ShardingStrategy.FSDP or parallelism.data_parallel == 1:
        return work
    copies_ms = 0.0
    if not work.contention:  # else the measured overhead of sharding includes copies
        # FSDP2 copies each block out of the gathered buffer twice per pass, and into the buffer
        # for the reduction. No label shows that the sharded update saves more time than these
        # copies take, so the compute of a rank is never below that of one GPU.
        copies_ms = max((2 * parallelism.accumulation + 1) * work.copy_ms, saved_ms)
    work = work.with_host_ms(work.hooks_ms)
    return replace(work, update_ms=work.update_ms - saved_ms, fixed_ms=work.fixed_ms + copies_ms)


def _ddp(work: StepWork, group: RankGroup, parallelism: Parallelism) -> _Timeline:
    """Return the timeline of DDP, which sums buckets only in the last backward pass.

    With a sharded optimizer, ranks gather the parameters after its update.
    """
    passes, is_sharded = parallelism.accumulation, parallelism.sharded_optimizer
    sum_ms = group.reduce_scatter_ms if is_sharded else group.all_reduce_ms
    start = (passes - 1) * (work.forward_ms + work.backward_ms) + work.forward_ms
    gradients = sorted(work.gradients, key=lambda gradient: gradient.ready)
    end, total = start, 0.0
    for places in buckets([gradient.size_bytes for gradient in gradients]):
        lasts = sum_ms(sum(gradients[place].size_bytes for place in places))
        ready = start + work.backward_ms * gradients[places[-1]].ready
        end = max(end, ready) + lasts
        total += lasts
    gather_ms = group.all_gather_ms(work.gradient_bytes) if is_sharded else 0.0
    once_ms = work.update_ms + gather_ms + work.fixed_ms
    return _Timeline(max(end, start + work.backward_ms) + once_ms, total + gather_ms)


def _fsdp(work: StepWork, group: RankGroup, passes: int) -> _Timeline:
    """Return the timeline of FSDP, which gathers a block while the previous one is computed."""
    blocks = work.blocks_bytes or (work.gradient_bytes,)
    shares = _block_shares(work, blocks)
    gathers = [group.all_gather_ms(size) for size in blocks]
    reductions = [group.reduce_scatter_ms(work.trained_share * size) for size in blocks]
    root_ms = group.all_gather_ms(work.root_bytes)
    line = _Streams()
    for number in range(passes):
        line.gather(root_ms)
        line.passes(gathers, work.forward_ms * shares, [0.0] * len(blocks))
        reduced = reductions[::-1] if number == passes - 1 else [0.0] * len(blocks)
        # The last block is not given back between the passes.
        line.passes([0.0, *gathers[-2::-1]], work.backward_ms * shares[::-1], reduced)
    line.reduce(group.reduce_scatter_ms(work.trained_share * work.root_bytes))
    end = max(line.computed_ms, line.link_ms)
    exposed_ms = end - passes * (work.forward_ms + work.backward_ms)
    slowed_ms = work.contention * max(line.communication_ms - exposed_ms, 0.0)
    return _Timeline(end + slowed_ms + work.update_ms + work.fixed_ms, line.communication_ms)


class _Streams:
    """Compute and communication streams of a rank, in ms from the start."""

    def __init__(self) -> None:
        self.computed_ms = 0.0
        self.link_ms = 0.0
        """Time from which the link is free."""
        self.communication_ms = 0.0

    def gather(self, lasts_ms: float) -> None:
        """Gather parameters, and wait for them before the next compute."""
        self._communicate(self.computed_ms, lasts_ms)
        self.computed_ms = max(self.computed_ms, self.link_ms)

    def reduce(self, lasts_ms: float) -> None:
        """Reduce gradients, without a wait before the next compute."""
        self._communicate(self.computed_ms, lasts_ms)

    def passes(
        self,
        gathers_ms: Iterable[float],
        computing_ms: Iterable[float],
        reductions_ms: Iterable[float],
    ) -> None:
        """Run a pass over the blocks; each is gathered as soon as the previous one begins."""
        begun, reduction_ms = self.computed_ms, 0.0
        for gather_ms, compute_ms, next_reduction_ms in zip(
            gathers_ms, computing_ms, reductions_ms, strict=True
        ):
            there = self._communicate(begun, gather_ms) if gather_ms else 0.0
            self._communicate(self.computed_ms, reduction_ms)
            begun = max(self.computed_ms, there)
            self.computed_ms = begun + float(compute_ms)
            reduction_ms = next_reduction_ms
        self._communicate(self.computed_ms, reduction_ms)

    def _communicate(self, earliest_ms: float, lasts_ms: float) -> float:
        """Run a collective that can start at `earliest_ms`, and return its end."""
        if lasts_ms:
            self.link_ms = max(self.link_ms, earliest_ms) + lasts_ms
            self.communication_ms += lasts_ms
        return self.link_ms


def _block_shares(work: StepWork, blocks: Sequence[float]) -> np.ndarray:
    """Return each block's share of the time of a pass, in forward order, shape (b,).

    The share of a block is the part of the backward pass in which its gradients are completed.
    """
    gradients = sorted(work.gradients, key=lambda gradient: gradient.ready)
    done = np.cumsum([0.0, *(gradient.size_bytes for gradient in gradients)])
    ready = [0.0, *(gradient.ready for gradient in gradients[:-1]), 1.0]
    ends = np.cumsum([0.0, *blocks[::-1]])
    at = np.interp(ends / max(ends[-1], 1.0), done / max(done[-1], 1.0), ready)
    shares: np.ndarray = np.diff(at)[::-1]
    return shares
