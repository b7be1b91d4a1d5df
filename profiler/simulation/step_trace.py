"""The allocations of one step. Sizes are affine in the batch size; the record needs NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trappm.profiler.errors import TrappmError
from trappm.profiler.records import IntArray

MAX_EVENTS = 1_000_000
"""The longest steps of timm's models have about 40,000 events."""
MAX_BYTES = 1 << 50
"""Larger blocks are damage."""


class Event(IntEnum):
    """Event of the allocator."""

    ALLOCATE = 0
    FREE = 1
    WORKSPACE = 2
    """A convolution runs and needs scratch memory; the size is that of the bytes it touches."""
    END_OF_FORWARD = 3
    ACCUMULATE = 4
    """A gradient is complete: it becomes the parameter's, or is added to it and freed."""


class ConvolutionKind(IntEnum):
    """Classes of convolutions with different scratch memory."""

    POINTWISE = 0
    DENSE = 1
    GROUPED = 2
    DEPTHWISE = 3


class Pass(IntEnum):
    """Computation of a convolution."""

    FORWARD = 0
    DATA_GRADIENT = 1
    WEIGHT_GRADIENT = 2


class Origin(NamedTuple):
    """Origin of a tensor."""

    module: str
    """Path within the model, such as `layer1.0.conv2`; empty outside of modules."""
    operator: str
    """ATen operator, such as `convolution`."""
    line: str
    """File and line of the model's code, such as `timm/models/resnet.py:233`."""
    is_backward: bool
    """Whether the backward pass made it; module and line are those of the forward operator."""


TRACED_BATCH_SIZES = (8, 32)
"""Batch sizes of traces; the sizes at others lie on the line through these two."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTrace:
    """The allocations of a step at every batch size: E events in order.

    Raises:
        TrappmError: The arrays contradict each other, or are too large.
    """

    kinds: npt.NDArray[np.int8]
    """`Event` of each (E)."""
    blocks: npt.NDArray[np.int32]
    """Number of the block, in the order of allocation; kind * 3 + pass of workspaces (E)."""
    sizes: IntArray
    """Bytes of the block, or that the convolution touches, at both `batch_sizes` (E, 2)."""
    gradients: npt.NDArray[np.int32]
    """Blocks of parameters' gradients, which outlive the step."""
    parameter_bytes: IntArray
    """Bytes of each parameter with a gradient, for which the optimizer keeps states."""
    buffer_bytes: IntArray
    """Bytes of each buffer and other parameter."""
    batch_sizes: tuple[int, int] = TRACED_BATCH_SIZES

    def __post_init__(self) -> None:
        wrong = self._fault()
        if wrong is not None:
            raise TrappmError(f"not the trace of a training step: {wrong}")

    def _fault(self) -> str | None:
        count = len(self.kinds)
        if count > MAX_EVENTS:
            return f"{count} events, of at most {MAX_EVENTS}"
        flat = (self.kinds, self.blocks, self.gradients, self.parameter_bytes, self.buffer_bytes)
        if any(a.ndim != 1 for a in flat) or self.blocks.shape != (count,):
            return "arrays of different lengths"
        if self.sizes.shape != (count, 2):
            return f"sizes of shape {self.sizes.shape}, not {(count, 2)}"
        if not 1 <= self.batch_sizes[0] < self.batch_sizes[1] <= MAX_BYTES:
            return f"traced at batch sizes {self.batch_sizes}"
        for sizes in (self.sizes, self.parameter_bytes, self.buffer_bytes):
            if sizes.size and not 0 <= sizes.min() <= sizes.max() <= MAX_BYTES:
                return f"a block of {sizes.min()} or {sizes.max()} bytes"
        if not np.isin(self.kinds, list(Event)).all():
            return "an unknown kind of event"
        if np.count_nonzero(self.kinds == Event.END_OF_FORWARD) != 1:
            return "the forward pass does not end once"
        return self._fault_of_blocks()

    def _fault_of_blocks(self) -> str | None:
        born, died = (np.flatnonzero(self.kinds == e) for e in (Event.ALLOCATE, Event.FREE))
        if not np.array_equal(self.blocks[born], np.arange(len(born))):
            return "blocks are not numbered in the order of their allocation"
        freed = self.blocks[died]
        if len(np.unique(freed)) != len(freed):
            return "a block is freed twice"
        if len(freed) and not 0 <= freed.min() <= freed.max() < len(born):
            return "a block is freed that was never allocated"
        if np.any(died < born[freed]):
            return "a block is freed before it is allocated"
        added = self.blocks[self.kinds == Event.ACCUMULATE]
        if len(added) and not 0 <= added.min() <= added.max() < len(born):
            return "a gradient is complete that was never allocated"
        kept = self.gradients
        if len(kept) and not 0 <= kept.min() <= kept.max() < len(born):
            return "a gradient that was never allocated"
        if np.isin(kept, freed).any():
            return "a gradient is freed within the step"
        return None

    def sizes_at(self, batch_size: int) -> IntArray:
        """Return the bytes of each event at this batch size (E)."""
        first, second = self.batch_sizes
        share = (batch_size - first) / (second - first)
        below, above = self.sizes[:, 0], self.sizes[:, 1]
        return np.maximum(np.rint(below + (above - below) * share), 0).astype(np.int64)

    @property
    def additions(self) -> IntArray:
        """Index of the event at which each gradient is added to an existing one."""
        complete = self.kinds == Event.ACCUMULATE
        events = np.flatnonzero(complete & np.isin(self.blocks, self.gradients))[::-1]
        # What several parameters share is freed with the last.
        return events[np.unique(self.blocks[events], return_index=True)[1]]

    @property
    def end_of_forward(self) -> int:
        """Index of the event that ends the forward pass."""
        return int(np.flatnonzero(self.kinds == Event.END_OF_FORWARD)[0])
