"""The allocations of one step. Sizes are affine in the batch size; the record needs NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trappm.profiler.records import IntArray


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
    """True if the backward pass made it; module and line are those of the forward operator."""


TRACED_BATCH_SIZES = (8, 32)
"""Batch sizes of traces; the sizes at others lie on the line through these two."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Allocations:
    """The allocations of a step at every batch size: E events in order."""

    kinds: npt.NDArray[np.int8]
    """`Event` of each (E)."""
    blocks: npt.NDArray[np.int32]
    """Number of the block, in the order of allocation; kind * 3 + pass of workspaces (E)."""
    sizes: IntArray
    """Bytes of the block, or that the convolution touches, at both `batch_sizes` (E, 2)."""
    gradients: npt.NDArray[np.int32]
    """Block of the gradient of each parameter that gets one, which outlives the step (P)."""
    parameter_bytes: IntArray
    """Bytes of each of these parameters (P)."""
    parameter_places: IntArray
    """Place of each of these among all parameters of the module (P)."""
    buffer_bytes: IntArray
    """Bytes of each buffer and other parameter."""
    batch_sizes: tuple[int, int] = TRACED_BATCH_SIZES

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
