"""Parallel strategies and numbers of GPUs and nodes.

With tensor parallelism, the GPUs of a node are one group, and the nodes are replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trappm.profiler.errors import InputError


class Strategy(StrEnum):
    """Strategy that distributes parameters, gradients and optimizer states over ranks."""

    DDP = "ddp"
    """Replicated; gradients are summed in buckets (`DistributedDataParallel`)."""
    FSDP = "fsdp"
    """Sharded; each rank gathers the parameters of a block when needed (FSDP2)."""
    TP = "tp"
    """Ranks of a node split each block's products (Megatron-LM); nodes are replicas (DDP)."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Strategy of a training step and its numbers of GPUs, nodes and passes.

    Raises:
        InputError: A number is not a positive integer.
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
                raise InputError(f"{name} is {value!r}; it must be a positive integer")

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @property
    def tensor_parallel(self) -> int:
        """Return the number of GPUs that split each product: `gpus` for `tp`, else 1."""
        return self.gpus if self.strategy is Strategy.TP else 1

    @property
    def data_parallel(self) -> int:
        """Return the number of replicas, each with its own samples."""
        return self.ranks // self.tensor_parallel
