"""The record of a static profile, which is read without torch where it is kept."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from trappm.profiler.records import GraphTemplate, Optimizer
from trappm.profiler.simulation.memory_simulation import SimulatedMemory
from trappm.profiler.simulation.step_profile import StepProfile
from trappm.profiler.simulation.training_loop import Loop

_QUANTIZED = re.compile(r"QuantizeLinear$|QLinear|ConvInteger$|MatMulInteger$|^com\.microsoft\.Q")


class StepSource(enum.StrEnum):
    """Which model's training step was traced."""

    TRACED = "traced"
    """The model's own."""
    REBUILT = "rebuilt"
    """That of a module rebuilt from an ONNX file."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StaticProfile:
    """A graph template and, where a training step can be traced, the step's profile."""

    graph: GraphTemplate
    step: StepProfile | None
    step_refusal: str | None
    """Why there is no step profile; None if there is one."""
    step_source: StepSource | None
    """None if there is no step profile."""
    step_remark: str | None = None
    """What the step's source could not see; None if it saw all."""

    @property
    def quantized(self) -> str | None:
        """An operator on quantised numbers, which no training step has; None without one."""
        return next((name for name in self.graph.operators if _QUANTIZED.search(name)), None)

    def memory(
        self,
        batch_size: int,
        optimizer: Optimizer = Optimizer.SGD,
        loop: Loop = Loop.PLAIN,
    ) -> SimulatedMemory | None:
        """GPU memory of a training step in fp32, contiguous; None where no step could be traced.

        Args:
            batch_size: any; the file's own for a file that has one.
            optimizer: whose states and temporaries are added.
            loop: what happens around the steps; by default as in our protocol.

        Raises:
            InputError: the batch size is below 1, or not the only one that the graph has.
        """
        self.graph.at(batch_size)  # refuses what the graph cannot have
        return None if self.step is None else self.step.memory(batch_size, optimizer, loop)
