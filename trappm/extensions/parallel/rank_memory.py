"""Memory of the tensors of a training step on one of several ranks, by strategy.

    DDP    all parameters, gradients and states; buckets in addition to the gradients
    FSDP   1/n of all three; two gathered blocks (current and next) with unsharded gradients
    TP     1/(t p) of all three; unsharded block inputs and norms (Korthikanti et al. 2022). The
           first of p stages keeps 1/p of the layers for p micro-batches

NCCL's own buffers are not counted, because no label measures them separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trappm.extensions.parallel.schedules import Parallelism, Strategy
from trappm.extensions.parallel.step_work import blocks_of
from trappm.profiler.simulation.step_trace import Event, StepTrace
from trappm.profiler.simulation.training_loop import TrainingLoop

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
    blocks: Sequence[float] = ()
    """Parameters of each block that FSDP gathers at once."""
    root: float = 0.0
    """Parameters outside of blocks."""


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
    is_fsdp = parallelism.strategy is Strategy.FSDP and replicas > 1
    shards = tensor * parallelism.pipeline * (replicas if is_fsdp else 1)
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
        buckets=needs.all_gradients / shards if replicas > 1 and not is_fsdp else 0.0,
        activations=float(activations[peak]),
    )


def traced_needs(trace: StepTrace, batch_size: int, loop: TrainingLoop) -> MemoryNeeds:
    """Return the memory needs of a traced step in a training loop."""
    sizes = trace.sizes_at(batch_size).astype(np.float64)
    born, died = (trace.kinds == kind for kind in (Event.ALLOCATE, Event.FREE))
    block_sizes = sizes[born]
    change = np.where(born, sizes, 0.0)
    change[died] = -block_sizes[trace.blocks[died]]
    of_gradients = (born | died) & np.isin(trace.blocks, trace.gradients)
    parameters = float(trace.parameter_bytes.sum())
    blocks, root = blocks_of(trace.parameter_bytes.tolist())
    gradients = np.cumsum(np.where(of_gradients, change, 0.0))
    # The optimizer allocates temporary tensors when only the gradients are alive.
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
    """Return the bytes of unsharded FSDP tensors at the peak: parameters and block gradients."""
    blocks = list(needs.blocks) or [needs.all_gradients]
    largest = max(blocks)
    held = min(GATHERED_BLOCKS * largest, sum(blocks))
    reduced = min(REDUCED_BLOCKS * largest, sum(blocks))
    return held + reduced + needs.root
