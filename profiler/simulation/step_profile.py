"""What a training step does to memory, for every batch size: the part of the static profile that a
graph of the forward pass cannot tell.

The record needs NumPy only, so that whoever reads one from the store predicts without PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from trappm.profiler.errors import TrappmError, one_line
from trappm.profiler.files.array_archive import pack, unpack
from trappm.profiler.records import Optimizer
from trappm.profiler.simulation.memory_simulation import Loop, SimulatedMemory, simulate_memory
from trappm.profiler.simulation.step_trace import MAX_EVENTS, StepTrace

_TRACE: dict[str, npt.DTypeLike] = {
    "kinds": np.int8,
    "blocks": np.int32,
    "sizes": np.int64,
    "gradients": np.int32,
    "parameter_bytes": np.int64,
    "buffer_bytes": np.int64,
}
"""The arrays of a trace in an archive, and their types."""
_NUMBERS = "numbers"
"""One more array: batch sizes, saved bytes, parameters."""
_NUMBER_COUNT = 6
_MAX_ARRAY_BYTES = 16 * MAX_EVENTS + 4096
_MAX_KNOWN = 4096
"""Simulations that are remembered; a server runs for long."""


@dataclass(frozen=True)
class SavedBytes:
    """Bytes kept for the backward pass in fp32, affine in the batch size."""

    constant: int
    slope: int

    def at(self, batch_size: int) -> int:
        return self.constant + self.slope * batch_size


@dataclass(frozen=True, kw_only=True, eq=False)
class StepProfile:
    """The allocations of one training step in fp32 and what follows from them."""

    trace: StepTrace
    saved_bytes: SavedBytes
    """Bytes that autograd keeps between forward and backward pass."""
    trainable_parameters: int
    frozen_parameters: int

    def memory(
        self,
        batch_size: int,
        optimizer: Optimizer = Optimizer.SGD,
        loop: Loop = Loop.PLAIN,
    ) -> SimulatedMemory:
        """GPU memory of the step at this batch size in fp32; see `simulate_memory`."""
        key = batch_size, optimizer, loop
        memory = self._known.get(key)
        if memory is None:
            memory = simulate_memory(self.trace, *key)
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = memory
        return memory

    @cached_property
    def _known(self) -> dict[tuple[int, Optimizer, Loop], SimulatedMemory]:
        """What was simulated before: an answer needs it more than once."""
        return {}

    def to_bytes(self) -> bytes:
        """A compressed NumPy archive without pickled objects; equal profiles give equal bytes."""
        numbers = (
            *self.trace.batch_sizes,
            self.saved_bytes.constant,
            self.saved_bytes.slope,
            self.trainable_parameters,
            self.frozen_parameters,
        )
        arrays: dict[str, Any] = {name: getattr(self.trace, name) for name in _TRACE}
        arrays[_NUMBERS] = np.array(numbers, dtype=np.int64)
        return pack(arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The profile that `to_bytes` wrote.

        Raises:
            TrappmError: the bytes are damaged, or ask for more memory than a step profile takes.
        """
        try:
            arrays = unpack(data, {**_TRACE, _NUMBERS: np.int64}, _MAX_ARRAY_BYTES)
            numbers = arrays.pop(_NUMBERS).tolist()
            if len(numbers) != _NUMBER_COUNT or min(numbers[2:]) < 0:
                raise ValueError(f"the numbers {numbers}")
            first, second, constant, slope, trainable, frozen = numbers
            return cls(
                trace=StepTrace(batch_sizes=(first, second), **arrays),
                saved_bytes=SavedBytes(constant, slope),
                trainable_parameters=trainable,
                frozen_parameters=frozen,
            )
        except Exception as error:  # zipfile, zlib and NumPy have many ways to find damage
            raise TrappmError(
                f"a stored step profile is damaged ({one_line(error)}); profile the model again"
            ) from error
