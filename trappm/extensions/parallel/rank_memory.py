"""What one of many ranks keeps in its GPU's memory: the tensors of a step, and who has which part.

    DDP    all parameters, gradients and states; buckets in addition to the gradients
    FSDP   1/n of all three; two blocks gathered (the current and the next), their gradients whole
    TP     1/t of blocks; a block's inputs and norms whole (Korthikanti et al. 2022)

NCCL's own buffers are not counted: no label tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trappm.extensions.parallel.step_work import blocks_of
from trappm.extensions.parallel.strategy import Parallelism, Strategy
from trappm.profiler.simulation.step_trace import Event, StepTrace
from trappm.profiler.simulation.training_loop import TrainingLoop

Array = npt.NDArray[np.float64]

DIVIDED_BY_TENSOR_PARALLEL = 24 / 34
"""Of a transformer block's activations (Korthikanti et al. 2022, equation 2); the rest is its
inputs, its norms' and dropouts'."""
GATHERED_BLOCKS = 2
"""The one that is computed, and the next, which is gathered meanwhile."""
REDUCED_BLOCKS = 2
"""Whole gradients: of the block that is computed, and of the last, which is reduced meanwhile."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryNeeds:
    """What a step on one GPU keeps, in bytes; E moments of it."""

    parameters: float
    """And buffers."""
    states: float
    """Of the optimizer; main copies of parameters are among them."""
    gradients: Array
    """At each moment, where each is freed in the optimizer's step (E)."""
    activations: Array
    """And whatever else lives at each moment (E)."""
    all_gradients: float
    blocks: Sequence[float] = ()
    """Parameters of each block that FSDP gathers at once."""
    root: float = 0.0
    """Parameters outside of blocks."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What a rank keeps at its peak, in bytes."""

    parameters: float
    states: float
    gradients: float
    gathered: float
    """Parameters and gradients of blocks that FSDP has whole at the moment."""
    buckets: float
    """Of DDP, beside the gradients."""
    activations: float

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))


def rank_memory(needs: MemoryNeeds, parallelism: Parallelism) -> RankMemory:
    """Return the memory of the fullest rank."""
    replicas, tensor = parallelism.data_parallel, parallelism.tensor_parallel
    is_fsdp = parallelism.strategy is Strategy.FSDP and replicas > 1
    shards = tensor * (replicas if is_fsdp else 1)
    divided = DIVIDED_BY_TENSOR_PARALLEL
    activations = needs.activations * (1 - divided + divided / tensor)
    keeps = parallelism.accumulation > 1
    gradients = np.full_like(needs.gradients, needs.all_gradients) if keeps else needs.gradients
    gradients = gradients / shards
    peak = int((activations + gradients).argmax())
    return RankMemory(
        parameters=needs.parameters / shards,
        states=needs.states / shards,
        gradients=float(gradients[peak]),
        gathered=_gathered(needs) if is_fsdp else 0.0,
        buckets=needs.all_gradients / tensor if replicas > 1 and not is_fsdp else 0.0,
        activations=float(activations[peak]),
    )


def traced_needs(trace: StepTrace, batch_size: int, loop: TrainingLoop) -> MemoryNeeds:
    """Of a traced step, in this loop."""
    sizes = trace.sizes_at(batch_size).astype(np.float64)
    born, died = (trace.kinds == kind for kind in (Event.ALLOCATE, Event.FREE))
    block_sizes = sizes[born]
    change = np.where(born, sizes, 0.0)
    change[died] = -block_sizes[trace.blocks[died]]
    of_gradients = (born | died) & np.isin(trace.blocks, trace.gradients)
    parameters = float(trace.parameter_bytes.sum())
    blocks, root = blocks_of(trace.parameter_bytes.tolist())
    gradients = np.cumsum(np.where(of_gradients, change, 0.0))
    # The optimizer's own passing tensors come when all gradients are there and nothing else is.
    passing = parameters if loop.optimizer.is_adam else 0.0
    return MemoryNeeds(
        parameters=parameters + float(trace.buffer_bytes.sum()),
        states=parameters * loop.states_per_parameter,
        gradients=np.append(gradients, parameters + passing),
        activations=np.append(np.cumsum(np.where(of_gradients, 0.0, change)), 0.0),
        all_gradients=parameters,
        blocks=blocks,
        root=root,
    )


def _gathered(needs: MemoryNeeds) -> float:
    """What FSDP has whole at its peak: parameters of blocks and the root, gradients of blocks."""
    blocks = list(needs.blocks) or [needs.all_gradients]
    largest = max(blocks)
    held = min(GATHERED_BLOCKS * largest, sum(blocks))
    reduced = min(REDUCED_BLOCKS * largest, sum(blocks))
    return held + reduced + needs.root
