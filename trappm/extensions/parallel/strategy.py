"""How the GPUs of a training share its work.

GPUs are counted by node: `gpus` of each of `nodes`. Ranks of one tensor-parallel group lie side by
side within a node, then come data-parallel groups, as Megatron-LM and PyTorch's device meshes place
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trappm.profiler.errors import InputError

BUCKET_MIB = 25.0
"""Of `DistributedDataParallel`, by default."""
FIRST_BUCKET_MIB = 1.0
"""So that the first all-reduce begins early."""


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
        InputError: sizes that are no sizes, or that do not divide each other.
    """

    strategy: Strategy = Strategy.DDP
    gpus: int = 1
    """Of each node."""
    nodes: int = 1
    tensor_parallel: int = 1
    """GPUs that share each product; with strategy `tp` by default those of a node."""
    accumulation: int = 1
    """Forward and backward passes (micro-batches) before each optimizer step."""
    reshard: bool = True
    """With FSDP: whether parameters are given back after the forward pass."""
    bucket_mib: float = BUCKET_MIB

    def __post_init__(self) -> None:
        for name in ("gpus", "nodes", "tensor_parallel", "accumulation"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}; it must be a whole number, 1 or more")
        if not self.bucket_mib > 0:
            raise InputError(f"buckets of {self.bucket_mib} MiB; they must be larger than 0")
        if self.strategy is Strategy.TP and self.tensor_parallel == 1:
            object.__setattr__(self, "tensor_parallel", self.gpus)
        if self.gpus % self.tensor_parallel:
            raise InputError(
                f"tensor parallel over {self.tensor_parallel} GPUs does not divide the {self.gpus} "
                "GPUs of a node; take a divisor of them"
            )

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @property
    def data_parallel(self) -> int:
        """Replicas, each with samples of its own."""
        return self.ranks // self.tensor_parallel

    @property
    def data_group(self) -> tuple[int, int]:
        """GPUs of a node and nodes that hold the same part of the model in different replicas."""
        within = self.gpus // self.tensor_parallel
        if self.data_parallel <= within:
            return self.data_parallel, 1
        return within, -(-self.data_parallel // within)
