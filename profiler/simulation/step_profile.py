"""Allocations and kernels of both steps of a model, for every batch size. Needs NumPy only."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from trappm.profiler.files.untrusted import pack, reading_profile, unpack
from trappm.profiler.records import GraphTemplate, MemoryFormat, Optimizer, Phase, Precision
from trappm.profiler.simulation.kernel_profile import KernelProfile
from trappm.profiler.simulation.memory_simulation import SimulatedMemory, simulate_memory
from trappm.profiler.simulation.step_trace import StepTrace
from trappm.profiler.simulation.training_loop import Loop, TrainingLoop

_TRACE = (
    "kinds", "blocks", "sizes", "gradients", "parameter_bytes", "parameter_places", "buffer_bytes",
)  # fmt: skip
"""Arrays of a trace in an archive."""
TRACE_VERSION = 3
"""Increased when the recorder changes; profiles of earlier versions are traced again."""
_KERNELS = "kernels"
"""Array with the archive of a kernel profile."""
_NUMBERS = "numbers"
"""Array with batch sizes, saved bytes and parameters."""
_MAX_KNOWN = 4096
"""Largest number of cached simulations."""


@dataclass(frozen=True)
class SavedBytes:
    """Bytes kept for the backward pass in fp32, affine in the batch size."""

    constant: int
    slope: int

    def at(self, batch_size: int) -> int:
        return self.constant + self.slope * batch_size


@dataclass(frozen=True, kw_only=True, eq=False)
class StepProfile:
    """Both steps of a model, run in one way."""

    trace: StepTrace
    """Allocations of a training step."""
    saved_bytes: SavedBytes
    """Bytes that autograd keeps between forward and backward pass."""
    trainable_parameters: int
    frozen_parameters: int
    infer_trace: StepTrace
    """Allocations of an inference step."""
    kernels: KernelProfile
    """Kernels of both steps."""

    def memory(
        self,
        batch_size: int,
        optimizer: Optimizer = Optimizer.SGD,
        loop: Loop = Loop.PLAIN,
        phase: Phase = Phase.TRAIN,
    ) -> SimulatedMemory:
        """Return the GPU memory of a step at this batch size; see `memory_in`."""
        return self.memory_in(loop.with_optimizer(optimizer), batch_size, phase)

    def memory_in(
        self,
        loop: TrainingLoop,
        batch_size: int,
        phase: Phase = Phase.TRAIN,
        limit_mib: float | None = None,
    ) -> SimulatedMemory:
        """Return the GPU memory of a step in this loop; see `simulate_memory`.

        Raises:
            InputError: The batch size is below 1.
        """
        key = loop, batch_size, phase, limit_mib
        memory = self._known.get(key)
        if memory is None:
            memory = simulate_memory(self.trace_of(phase), batch_size, loop, limit_mib=limit_mib)
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = memory
        return memory

    def trace_of(self, phase: Phase) -> StepTrace:
        return self.trace if phase is Phase.TRAIN else self.infer_trace

    def kernels_in(self, precision: Precision, memory_format: MemoryFormat) -> KernelProfile | None:
        """Return the kernels, if they were traced in these settings."""
        kernels = self.kernels
        traced = kernels.precision, kernels.memory_format
        return kernels if traced == (precision, memory_format) else None

    @property
    def precision(self) -> Precision:
        return self.kernels.precision

    @cached_property
    def _known(self) -> dict[tuple[TrainingLoop, int, Phase, float | None], SimulatedMemory]:
        return {}

    def to_bytes(self) -> bytes:
        """Return a compressed NumPy archive; equal profiles give equal bytes."""
        numbers = (
            *self.trace.batch_sizes,
            self.saved_bytes.constant,
            self.saved_bytes.slope,
            self.trainable_parameters,
            self.frozen_parameters,
        )
        arrays: dict[str, Any] = {name: getattr(self.trace, name) for name in _TRACE}
        arrays[_NUMBERS] = np.array(numbers, dtype=np.int64)
        arrays |= {f"infer.{name}": getattr(self.infer_trace, name) for name in _TRACE}
        arrays[_KERNELS] = np.frombuffer(self.kernels.to_bytes(), dtype=np.uint8)
        return pack(arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the profile of `to_bytes`.

        Raises:
            TrappmError: The bytes are damaged.
        """
        with reading_profile("step profile"):
            arrays = unpack(data)
            first, second, constant, slope, trainable, frozen = arrays[_NUMBERS].tolist()
            train, infer = (
                StepTrace(
                    batch_sizes=(first, second), **{name: arrays[prefix + name] for name in _TRACE}
                )
                for prefix in ("", "infer.")
            )
            return cls(
                trace=train,
                infer_trace=infer,
                kernels=KernelProfile.from_bytes(arrays[_KERNELS].tobytes()),
                saved_bytes=SavedBytes(constant, slope),
                trainable_parameters=trainable,
                frozen_parameters=frozen,
            )


_QUANTIZED = re.compile(r"QuantizeLinear$|QLinear|ConvInteger$|MatMulInteger$|^com\.microsoft\.Q")


class StepSource(enum.StrEnum):
    """Model whose training step was traced."""

    TRACED = "traced"
    """The model itself."""
    REBUILT = "rebuilt"
    """A module rebuilt from an ONNX file."""
    RUN = "run on the example"
    """The model itself, run on the values of its example, which its operators depend on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StaticProfile:
    """A graph template and, if a training step can be traced, the step's profile."""

    graph: GraphTemplate
    step: StepProfile | None
    step_refusal: str | None
    """Why there is no step profile."""
    step_source: StepSource | None
    """None without a step profile."""
    step_remark: str | None = None
    """Parts that the step's source does not contain, or None."""

    @property
    def quantized(self) -> str | None:
        """An operator on quantized numbers, which no training step has, or None."""
        return next((name for name in self.graph.operators if _QUANTIZED.search(name)), None)
