"""What a training step does to memory, for every batch size: the part of the static profile that a
graph of the forward pass cannot tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import nn

from profiler.memory_simulation import SimulatedMemory, simulate_memory
from profiler.module_graph import on_meta
from profiler.records import Optimizer
from profiler.saved_bytes import SavedBytes, saved_bytes
from profiler.step_trace import StepTrace, trace_step


@dataclass(frozen=True, kw_only=True, eq=False)
class StepProfile:
    """The allocations of one training step in fp32 and what follows from them."""

    trace: StepTrace
    saved_bytes: SavedBytes
    """Bytes that autograd keeps between forward and backward pass."""
    trainable_parameters: int
    frozen_parameters: int

    def memory(self, batch_size: int, optimizer: Optimizer = Optimizer.SGD) -> SimulatedMemory:
        """GPU memory of the step at this batch size; see `simulate_memory`."""
        return simulate_memory(self.trace, batch_size, optimizer)

    def to_bytes(self) -> bytes:
        """A compressed NumPy archive without pickled objects."""
        raise NotImplementedError

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        raise NotImplementedError


def step_profile(model: str | nn.Module, input_size: int) -> StepProfile:
    """Traces a training step of a timm architecture, or of a copy of a module.

    Raises:
        UnknownArchitectureError, InputError: as `profiler.zoo.create_model`.
        UnsupportedModelError: the step cannot be traced; the reason is told.
    """
    module = on_meta(model, input_size).train()
    parameters = list(module.parameters())
    return StepProfile(
        trace=trace_step(module, input_size),
        saved_bytes=saved_bytes(module, input_size),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        frozen_parameters=sum(p.numel() for p in parameters if not p.requires_grad),
    )
