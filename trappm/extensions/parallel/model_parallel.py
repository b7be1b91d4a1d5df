"""Tensor and pipeline parallel steps, as Megatron-LM runs them.

    tensor     qkv, up: columns / t;  out, down: depth / t;  attention: heads / t;  loss: words / t
    pipeline   each stage has layers / p; micro-batches follow each other (1F1B):
               whole pass + (micro-batches - 1) x slowest stage

Norms, residuals and dropouts of hidden states run on every rank, and block results are summed over
the tensor-parallel ranks (Shoeybi et al. 2019, section 3). With sequence parallelism, ranks divide
hidden states by their tokens, and sums become a reduce-scatter and an all-gather (Korthikanti et
al. 2022, section 4.2). Every rank launches all kernels of its layers, so its host takes as long as
on one GPU, and it waits for the slowest host at each sum. Gradients are summed after the last pass.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np

from trappm.extensions.parallel.links import NodeLinks, RankGroup
from trappm.extensions.parallel.schedules import (
    Parallelism,
    StepSchedule,
    expected_most,
)
from trappm.extensions.parallel.step_work import blocks_of
from trappm.learner.interface import Workload
from trappm.learner.physics.step_time import (
    PRODUCT_KINDS,
    SHARPNESS,
    Lookup,
    StepTimePrior,
    Times,
    terms_of,
    times_of,
)
from trappm.profiler.errors import InputError
from trappm.profiler.records.step_scope import StepScope
from trappm.profiler.traced_step import KernelKind, KernelTable, Pass, Size

WIDE = 2.5
"""Least size of a divided tensor in hidden states of 16 bits; residuals in fp32 have 2."""
SUMS_PER_PASS = 2
"""Sums of a block's result per pass: after attention and after the MLP."""
LAUNCH_US = 65.0
"""Host time per kernel of Megatron-DeepSpeed, fitted to A100 nodes (docs/research/step_time.md)."""
HOST_SCATTER = 0.2
"""Relative standard deviation of hosts between two sums, for which ranks wait. Hosts of two ranks
are in `LAUNCH_US` (docs/research/step_time.md)."""
FUSED_HEADS = 4
"""Divisor of heads times samples of a rank without which Megatron-LM's softmax is not fused."""
UNFUSED_KERNELS = 5
"""Kernels of a softmax that is not fused: cast, scale, mask, softmax, cast."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DividedStep:
    """A training step of identical blocks, which ranks can divide."""

    workload: Workload
    prior: StepTimePrior
    blocks: int
    parameter_bytes: float
    hidden_bytes: float
    """Hidden states between two blocks."""
    heads: int
    """Attention heads per block; 0 if unknown."""
    slower: float = 1.0
    """Predicted time relative to the prior."""
    launch_us: float | None = None
    """Host time per kernel of Megatron-LM's code; None for other code, which has the prior's."""

    @classmethod
    def of(cls, workload: Workload, prior: StepTimePrior) -> Self | None:
        """Return the step of a traced workload; None without identical blocks."""
        if workload.trace is None or workload.kernels is None:
            return None
        allocations = workload.trace.allocations
        if allocations is None:
            return None
        blocks, _ = blocks_of(allocations.parameter_bytes.tolist())
        table = workload.kernels.table
        sizes = table.sizes_at(workload.batch_size)
        forward = table.passes == Pass.FORWARD
        often = (table.kinds == KernelKind.LINEAR) & forward & (table.counts >= len(blocks))
        if len(set(blocks)) != 1 or not often.any():
            return None
        attention = np.isin(table.kinds, (KernelKind.ATTENTION, KernelKind.MATMUL)) & forward
        heads = set(table.sizes[attention, Size.PRODUCTS, 1].tolist())
        # Most linear layers of a block read the hidden state; only the MLP's last layer is wider.
        width = np.median(np.repeat(sizes[often, Size.DEPTH], table.counts[often]))
        tokens = np.median(sizes[often, Size.ROWS])
        return cls(
            workload=workload,
            prior=prior,
            blocks=len(blocks),
            parameter_bytes=float(allocations.parameter_bytes.sum()),
            hidden_bytes=float(width * tokens) * (2 if table.half[often].all() else 4),
            heads=int(heads.pop()) if len(heads) == 1 else 0,
        )

    @property
    def sums(self) -> int:
        """Return the sums of a block's result per micro-batch; checkpoints repeat a pass."""
        table = self._table
        runs = [
            int(table.counts[(table.kinds == KernelKind.LINEAR) & (table.passes == kind)].sum())
            for kind in (Pass.FORWARD, Pass.DATA_GRADIENT)
        ]
        return SUMS_PER_PASS * (1 + round(runs[1] / runs[0]))

    def pass_ms(
        self, tensor: int, sum_ms: float, *, sequence_parallel: bool = False
    ) -> tuple[float, float]:
        """Return the times of all blocks and of the head of the model for a micro-batch.

        Args:
            tensor: Number of ranks per product.
            sum_ms: Time to sum the result of a block.
            sequence_parallel: Whether the ranks divide hidden states, too.
        """
        table = self._table
        sizes = self._divided_sizes(tensor, sequence_parallel=sequence_parallel)
        counts = table.counts // self.blocks * self.blocks
        head = table.counts - counts
        products = sizes[table.kinds == KernelKind.MATMUL, Size.PRODUCTS]
        if self.launch_us is not None and (products % FUSED_HEADS).any():
            counts[table.kinds == KernelKind.SOFTMAX] *= UNFUSED_KERNELS
        sums = self.sums * self.blocks * (tensor > 1)
        collectives = sums * (1 + sequence_parallel)
        # The host launches the sums, too, and all ranks wait for the slowest host. It waits for
        # the loss, so the head's kernels do not overlap with launches of blocks.
        blocks, last = self._times(sizes, counts), self._times(sizes, head)
        host_ms = self._host_ms(blocks, float(counts.sum()), collectives, tensor)
        device_ms = self.slower * float(blocks.device) + sums * sum_ms
        blocks_ms = (device_ms**SHARPNESS + host_ms**SHARPNESS) ** (1 / SHARPNESS)
        return blocks_ms, self.slower * float(last.device)

    def _host_ms(self, blocks: Times, kernels: float, collectives: int, tensor: int) -> float:
        """Return the time in which the slowest rank's host launches all kernels of the blocks."""
        one_host_ms, included = float(blocks.host), 0.0
        if self.launch_us is not None:  # which includes the wait of two ranks
            one_host_ms, included = kernels * self.launch_us / 1e3, expected_most(2)
        waiting = HOST_SCATTER * max(expected_most(tensor) - included, 0.0)
        return one_host_ms * (1 + collectives / kernels) * (1 + waiting)

    def update_ms(self, shards: int) -> float:
        """Return the time of the optimizer for a shard: one kernel that reads and writes all."""
        terms = terms_of([self.workload], self.prior.spec)
        return float(terms.optimizer_bytes) / (shards * self.prior.spec.bandwidth_gbs * 1e6)

    @property
    def gradient_bytes(self) -> float:
        return self.parameter_bytes

    @property
    def _table(self) -> KernelTable:
        assert self.workload.kernels is not None  # noqa: S101  (checked by `of`)
        return self.workload.kernels.table

    def _divided_sizes(self, tensor: int, *, sequence_parallel: bool) -> np.ndarray:
        """Return the sizes of a tensor-parallel rank's kernels by `Size`, shape (n, 7)."""
        table, blocks, hidden_bytes = self._table, self.blocks, self.hidden_bytes
        sizes = table.sizes_at(self.workload.batch_size)
        read, written = sizes[:, Size.READ_BYTES].copy(), sizes[:, Size.WRITTEN_BYTES].copy()
        linear = table.kinds == KernelKind.LINEAR
        heads = np.isin(table.kinds, (KernelKind.MATMUL, KernelKind.ATTENTION))
        # Other kernels are divided if they write more than hidden states (activations of the MLP,
        # scores, the loss), or weights. Within blocks, only attention copies hidden states.
        # Sequence parallel ranks divide all of them.
        wide = (written > WIDE * hidden_bytes) | (table.sizes[:, Size.WRITTEN_BYTES, 1] == 0)
        wide |= (table.kinds == KernelKind.REDUCTION) & (read > (1 + WIDE) * hidden_bytes)
        wide |= (table.kinds == KernelKind.COPY) | sequence_parallel
        shared = heads | ((table.kinds >= PRODUCT_KINDS) & wide)
        sizes[shared, : Size.FLOPS + 1] /= tensor
        sizes[heads, Size.PRODUCTS] /= tensor
        loss = (table.kinds == KernelKind.SOFTMAX) & (table.counts < blocks)
        sizes[loss, Size.COLUMNS] /= tensor
        # A linear layer reads or writes one whole hidden state; all its other tensors are divided.
        of_weights = table.passes == Pass.WEIGHT_GRADIENT
        writes = (written <= 1.01 * hidden_bytes) & ~of_weights
        whole = np.where(writes, 0.0, np.minimum(hidden_bytes, read))
        sizes[linear, Size.FLOPS] /= tensor
        sizes[linear, Size.READ_BYTES] = (whole + (read - whole) / tensor)[linear]
        sizes[linear & ~writes, Size.WRITTEN_BYTES] /= tensor
        other = np.where(of_weights, Size.ROWS, Size.DEPTH)
        rows = np.flatnonzero(linear)
        wider = sizes[rows, Size.COLUMNS] > sizes[rows, other[rows]]
        sizes[rows, np.where(wider, Size.COLUMNS, other[rows])] /= tensor
        return sizes

    def _times(self, sizes: np.ndarray, counts: np.ndarray) -> Times:
        """Return the times of passes with other sizes (k, 7) and counts (k) of the kernels."""
        assert self.workload.kernels is not None  # noqa: S101  (checked by `of`)
        fixed = np.stack([np.rint(sizes).astype(np.int64), np.zeros(sizes.shape, np.int64)], -1)
        ran = counts > 0
        rows = {field.name: getattr(self._table, field.name)[ran] for field in fields(self._table)}
        table = KernelTable(**{**rows, "counts": counts[ran], "sizes": fixed[ran]})
        rank = replace(
            self.workload,
            kernels=replace(self.workload.kernels, table=table),
            scope=StepScope(updates=False),
        )
        terms = terms_of([rank], self.prior.spec)
        return times_of(terms, Lookup(self.prior.constants), self.prior.spec)


def schedule_divided(step: DividedStep, parallelism: Parallelism, node: NodeLinks) -> StepSchedule:
    """Return the schedule of a step whose blocks are divided over ranks and stages.

    Raises:
        InputError: The attention heads or layers cannot be divided.
    """
    tensor, stages = parallelism.tensor_parallel, parallelism.pipeline
    if step.heads % tensor:
        raise InputError(
            f"{step.heads} attention heads cannot be divided over {tensor} GPUs; use a divisor of "
            f"{step.heads}"
        )
    if stages > step.blocks:
        raise InputError(f"{step.blocks} layers cannot be divided into {stages} pipeline stages")
    ranks, hidden_bytes = RankGroup(node=node, gpus=tensor), step.hidden_bytes
    sum_ms = ranks.all_reduce_ms(hidden_bytes)
    if parallelism.sequence_parallel:
        sum_ms = ranks.reduce_scatter_ms(hidden_bytes) + ranks.all_gather_ms(hidden_bytes)
    replicas, slots = parallelism.data_parallel, parallelism.gpus // tensor
    within = min(replicas, slots)
    group = RankGroup(node=node, gpus=within, nodes=-(-replicas // within), sharing=tensor)
    own_bytes = step.gradient_bytes / (tensor * stages)
    reduce_ms, shards = group.all_reduce_ms(own_bytes), tensor * stages
    if parallelism.sharded_optimizer:
        reduce_ms = group.reduce_scatter_ms(own_bytes) + group.all_gather_ms(own_bytes)
        shards *= replicas
    pair = RankGroup(node=node, gpus=2)
    if replicas >= slots:
        pair = RankGroup(node=node, gpus=1, nodes=2, sharing=parallelism.gpus)
    # Ranks of a stage each send their share. A gather of two halves moves one of them.
    turns = parallelism.accumulation + stages - 2 if stages > 1 else 0
    messages_ms = 2 * turns * pair.all_gather_ms(2 * step.hidden_bytes / tensor)
    update_ms = step.update_ms(shards)

    def passes_ms(sum_ms: float) -> float:
        blocks_ms, head_ms = step.pass_ms(
            tensor, sum_ms, sequence_parallel=parallelism.sequence_parallel
        )
        # If layers cannot be divided, the stage with the head has one less.
        most, fewer = -(-step.blocks // stages), step.blocks % stages > 0
        layer_ms = blocks_ms / step.blocks
        slowest_ms = max(most * layer_ms, (most - fewer) * layer_ms + head_ms)
        return blocks_ms + head_ms + (parallelism.accumulation - 1) * slowest_ms

    compute_ms = passes_ms(0.0) + update_ms
    passes = 1 + (parallelism.accumulation - 1) / stages
    summing_ms = step.sums * step.blocks * passes * sum_ms
    return StepSchedule(
        step_ms=passes_ms(sum_ms) + messages_ms + reduce_ms + update_ms,
        compute_ms=compute_ms,
        communication_ms=summing_ms + messages_ms + reduce_ms,
    )
