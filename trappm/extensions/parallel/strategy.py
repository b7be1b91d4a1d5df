"""How the GPUs of a training share its work.

GPUs are counted by node: `gpus` of each of `nodes`. With tensor parallelism, the GPUs of a node are
one group, and the nodes are replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trappm.profiler.errors import InputError


class Strategy(StrEnum):
    """How replicas share parameters, gradients and optimizer states."""

    DDP = "ddp"
    """Each rank has all of them; gradients are summed in buckets (`DistributedDataParallel`)."""
    FSDP = "fsdp"
    """Each has its share, and gathers the parameters of a block when it needs them (FSDP2)."""
    TP = "tp"
    """All ranks of a node share each block's products (Megatron-LM); nodes are replicas (DDP)."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How GPUs share a training step.

    Raises:
        InputError: A number is not a whole number of at least 1.
    """

    strategy: Strategy = Strategy.DDP
    gpus: int = 1
    """GPUs per node."""
    nodes: int = 1
    accumulation: int = 1
    """Forward and backward passes (micro-batches) per optimizer step."""

    def __post_init__(self) -> None:
        for name in ("gpus", "nodes", "accumulation"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}; it must be a whole number, 1 or more")

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @property
    def tensor_parallel(self) -> int:
        """GPUs that share each product: those of a node with strategy `tp`, else one."""
        return self.gpus if self.strategy is Strategy.TP else 1

    @property
    def data_parallel(self) -> int:
        """Replicas, each with its own samples."""
        return self.ranks // self.tensor_parallel
