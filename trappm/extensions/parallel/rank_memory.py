"""Memory of the tensors of a training step on one of several ranks, by strategy.

    DDP    all parameters, gradients and states; buckets in addition to the gradients
    FSDP   1/n of all three; two gathered blocks (current and next) with unsharded gradients
    TP     1/(t p) of all three; unsharded block inputs and norms (Korthikanti et al. 2022), which
           sequence parallelism shards. The first of p stages keeps 1/p of the layers for p
           micro-batches

A sharded optimizer (ZeRO-1, Megatron's distributed optimizer) keeps 1/n of the states with DDP and
TP. With 16-bit parameters it has main copies in fp32, and one buffer for all gradients.

NCCL's own buffers are not counted, because no label measures them separately.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trappm.extensions.parallel.schedules import Parallelism, ShardingStrategy
from trappm.extensions.parallel.step_work import blocks_of, gathered_blocks
from trappm.profiler.memory.simulation import TrainingLoop
from trappm.profiler.traced_step import Allocations, Event

Array = npt.NDArray[np.float64]

DIVIDED_BY_TENSOR_PARALLEL = 24 / 34
"""Share of a transformer block's activations that tensor parallelism divides (Korthikanti et al.
2022, equation 2); inputs, norms and dropouts are not divided."""
GATHERED_BLOCKS = 2
"""Number of gathered blocks: the one being computed, and the next one."""
REDUCED_BLOCKS = 2
"""Number of blocks with unsharded gradients: the one being computed, and the one being reduced."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryNeeds:
    """Memory of a step on one GPU in bytes, over its E memory events."""

    parameters: float
    """Parameters and buffers."""
    states: float
    """Optimizer states, including main copies of parameters."""
    gradients: Array
    """Live gradients at each event, freed in the optimizer's step, shape (E,)."""
    activations: Array
    """Activations and all other live tensors at each event, shape (E,)."""
    all_gradients: float
    gathered: float = 0.0
    """Unsharded parameters and gradients of FSDP during the passes."""
    root: float = 0.0
    """Parameters outside of blocks."""
    head: float = 0.0
    """Parameters of a head as large as the embeddings, which is part of the root."""
    head_ends: int = 0
    """Event from which the backward pass is past the head."""
    checkpoints: bool = False
    """True if blocks keep their inputs only."""
    buffers_gradients: bool = False
    """True if one buffer holds all gradients during the step; it is summed in place."""

    @property
    def kept(self) -> float:
        """Return the activations of all blocks that are kept for the backward pass."""
        return float(self.activations[self.head_ends])


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of a rank at its peak, in bytes."""

    parameters: float
    states: float
    gradients: float
    gathered: float
    """Unsharded parameters and gradients of FSDP blocks."""
    buckets: float
    """DDP buckets, in addition to the gradients."""
    activations: float

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))


def rank_memory(needs: MemoryNeeds, parallelism: Parallelism) -> RankMemory:
    """Return the memory of the rank with the highest peak."""
    replicas, tensor = parallelism.data_parallel, parallelism.tensor_parallel
    is_fsdp = parallelism.strategy is ShardingStrategy.FSDP and replicas > 1
    stages = parallelism.pipeline
    shards = tensor * stages * (replicas if is_fsdp else 1)
    share = _of_first_stage(needs, stages) * stages / shards
    activations = _activations(needs, parallelism)
    keeps = parallelism.accumulation > 1 or needs.buffers_gradients
    gradients = np.maximum(needs.gradients, needs.all_gradients) if keeps else needs.gradients
    gradients = share * gradients
    gathered = np.full_like(gradients, needs.gathered if is_fsdp else 0.0)
    gathered[-1] = 0.0  # the optimizer's step
    peak = int((activations + gradients + gathered).argmax())
    sums_apart = replicas > 1 and not is_fsdp and not needs.buffers_gradients
    return RankMemory(
        parameters=share * needs.parameters,
        states=share * needs.states / (replicas if parallelism.sharded_optimizer else 1),
        gradients=float(gradients[peak]),
        gathered=float(gathered[peak]),
        buckets=share * needs.all_gradients if sums_apart else 0.0,
        activations=float(activations[peak]),
    )


def _of_first_stage(needs: MemoryNeeds, stages: int) -> float:
    """Return the share of the parameters on the first of the stages, which has the embeddings."""
    if stages == 1 or not needs.all_gradients:
        return 1.0
    in_blocks = needs.all_gradients - needs.root
    return (in_blocks / stages + needs.root - needs.head) / needs.all_gradients


def _activations(needs: MemoryNeeds, parallelism: Parallelism) -> Array:
    """Return the activations of a rank at each event, of the stage that needs most, shape (E,).

    The first stage keeps its blocks for several micro-batches, and the last one has the head.
    Checkpoints are divided by sequence parallelism only (Korthikanti et al. 2022).
    """
    stages = parallelism.pipeline
    divided = 1.0 if parallelism.sequence_parallel else DIVIDED_BY_TENSOR_PARALLEL
    share = 1 - divided + divided / parallelism.tensor_parallel
    kept = np.minimum(needs.activations, needs.kept)
    if parallelism.sequence_parallel or not needs.checkpoints:
        kept *= share
    working = np.maximum(needs.activations - needs.kept, 0.0) * share
    if stages == 1:
        return np.asarray(kept + working)
    in_blocks = np.arange(len(working)) >= needs.head_ends
    first = kept * min(parallelism.accumulation, stages) / stages + working * in_blocks
    return np.asarray(np.maximum(first, kept / stages + working))


def traced_needs(
    trace: Allocations, batch_size: int, loop: TrainingLoop, *, checkpoints: bool = False
) -> MemoryNeeds:
    """Return the memory needs of a traced step in a training loop.

    Args:
        trace: Allocations of the step.
        batch_size: Samples per step.
        loop: Training loop around it.
        checkpoints: Whether blocks keep their inputs only.
    """
    sizes = trace.sizes_at(batch_size).astype(np.float64)
    born, died = (trace.kinds == kind for kind in (Event.ALLOCATE, Event.FREE))
    block_sizes = sizes[born]
    change = np.where(born, sizes, 0.0)
    change[died] = -block_sizes[trace.blocks[died]]
    of_gradients = (born | died) & np.isin(trace.blocks, trace.gradients)
    parameters = float(trace.parameter_bytes.sum())
    _, root = blocks_of(trace.parameter_bytes.tolist())
    most = sorted(trace.parameter_bytes.tolist())[-2:]
    has_head = len(most) == 2 and most[0] == most[1] and root >= sum(most)
    gradients = np.cumsum(np.where(of_gradients, change, 0.0))
    # The optimizer allocates temporary tensors when only the gradients are alive.
    passing = parameters if loop.optimizer.is_adam else 0.0
    return MemoryNeeds(
        parameters=parameters + float(trace.buffer_bytes.sum()),
        states=float(
            loop.state_bytes(
                trace.parameter_bytes.tolist(),
                trace.parameter_places.tolist(),
                trace.element_bytes.tolist(),
            )
        ),
        gradients=np.append(gradients, parameters + passing),
        activations=np.append(np.cumsum(np.where(of_gradients, 0.0, change)), 0.0),
        all_gradients=parameters,
        gathered=_unsharded_bytes(trace),
        root=root,
        head=float(most[0]) if has_head else 0.0,
        head_ends=int(np.flatnonzero(born & of_gradients)[HEAD_GRADIENTS - 1 :][:1].sum()),
        checkpoints=checkpoints,
    )


HEAD_GRADIENTS = 2
"""Number of gradients after which the head's logits are freed: its weight's and the norm's."""


@dataclass(frozen=True)
class MixedPrecision:
    """Bytes per parameter of training with 16-bit parameters and main copies in fp32."""

    gradients: float
    """Gradients, and their sums in fp32 if they are separate."""
    states: float
    """Main copy, Adam's two moments, and the optimizer's own gradient, all in fp32."""

    def needs(self, needs: MemoryNeeds) -> MemoryNeeds:
        """Return the needs of a step whose needs with everything in 16 bits are given."""
        parameters = needs.all_gradients / 2
        gradients = self.gradients * parameters
        return replace(
            needs,
            states=self.states * parameters,
            all_gradients=gradients,
            gradients=np.full_like(needs.gradients, gradients),
            root=needs.root * self.gradients / 2,
            head=needs.head * self.gradients / 2,
            buffers_gradients=True,
        )


MEGATRON_LM = MixedPrecision(gradients=4, states=12)
"""Megatron-LM with its distributed optimizer: gradients are summed in fp32 in place."""
DEEPSPEED_BF16, DEEPSPEED_FP16 = MixedPrecision(2 + 4, 16), MixedPrecision(2, 16)
"""Megatron-DeepSpeed of 2021 and 2022, by bigscience's published runs."""


def _unsharded_bytes(trace: Allocations) -> float:
    """Return the bytes of unsharded FSDP tensors: parameters, and gradients of blocks."""
    blocks, root, trained_share = gathered_blocks(trace)
    blocks = blocks or [float(trace.parameter_bytes.sum())]
    largest = max(blocks)
    held = min(GATHERED_BLOCKS * largest, sum(blocks))
    reduced = trained_share * min(REDUCED_BLOCKS * largest, sum(blocks))
    return held + reduced + root
