"""The kernels of one step, for every batch size.

A kernel is one launch on a GPU, or one loop over tensors on a CPU. Sizes are affine in the batch
size, and equal kernels are one row with a count. The record needs NumPy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from trappm.profiler.errors import TrappmError
from trappm.profiler.records import IntArray, MemoryFormat, Precision
from trappm.profiler.records.allocations import ConvolutionKind, Pass

__all__ = ["ConvolutionKind", "KernelKind", "KernelTable", "Kernels", "Pass", "StepKernels"]


class KernelKind(IntEnum):
    """Classes of kernels that reach different shares of a device's peaks.

    The first four are `ConvolutionKind`.
    """

    POINTWISE = 0
    """Convolution of one pixel."""
    DENSE = 1
    GROUPED = 2
    DEPTHWISE = 3
    LINEAR = 4
    """Product with a weight matrix."""
    MATMUL = 5
    """Product of two computed tensors, many small ones at once."""
    ATTENTION = 6
    """Fused: products, softmax and dropout without a matrix of scores in memory."""
    BATCH_NORM = 7
    LAYER_NORM = 8
    """Also group, instance and RMS normalization."""
    SOFTMAX = 9
    ELEMENTWISE = 10
    """Reads and writes dense tensors of one layout, in order."""
    STRIDED = 11
    """Elementwise over tensors of different layouts."""
    CAST = 12
    COPY = 13
    """Copy into another layout or place: contiguous, cat, roll, pad."""
    REDUCTION = 14
    POOLING = 15
    INDEX = 16
    """Gather, scatter, embeddings, interpolation."""
    FILL = 17
    """Writes without reading."""
    BROADCAST = 18
    """Elementwise with a tensor that repeats along an axis."""
    OTHER = 19
    """Unknown: assumed to be limited by memory."""


class Size(IntEnum):
    """Sizes of a kernel."""

    READ_BYTES = 0
    WRITTEN_BYTES = 1
    FLOPS = 2
    """Two for each multiply-accumulate."""
    ROWS = 3
    """Rows of the result of a matrix product, or of a convolution as a product."""
    COLUMNS = 4
    """Columns of that; channels of a norm, axis of a softmax, results of a reduction."""
    DEPTH = 5
    """Length of each dot product, or number of values in each result of a reduction."""
    PRODUCTS = 6
    """Number of products at once: groups of a convolution, heads of an attention."""


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelTable:
    """The different kernels of one step, n of them, in the order in which they first run."""

    kinds: npt.NDArray[np.int8]
    """`KernelKind` of each (n)."""
    passes: npt.NDArray[np.int8]
    """`Pass` of each (n); DATA_GRADIENT for all of backward except weight gradients."""
    counts: npt.NDArray[np.int32]
    """Number of runs in the step (n)."""
    half: npt.NDArray[np.bool_]
    """True if it computes in 16 bits (n)."""
    channels_last: npt.NDArray[np.bool_]
    """True if it works on channels-last images (n)."""
    sizes: IntArray
    """Constant part and part per sample of each `Size` (n, 7, 2)."""
    windows: npt.NDArray[np.int32]
    """Height times width of a convolution's or pool's kernel (n); 1 for others."""
    strides: npt.NDArray[np.int32]
    """Stride of a convolution (n); 1 for others."""
    pixels: npt.NDArray[np.int32]
    """Height times width of a convolution's result (n); 1 for others."""

    def __len__(self) -> int:
        return len(self.kinds)

    def sizes_at(self, batch_size: int) -> npt.NDArray[np.float64]:
        """Return the sizes at this batch size, by `Size` (n, 7)."""
        fixed, slope = self.sizes[..., 0], self.sizes[..., 1]
        return fixed.astype(np.float64) + slope.astype(np.float64) * batch_size


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernels:
    """The kernels of one step at one batch size."""

    table: KernelTable
    sizes: npt.NDArray[np.float64]
    """Sizes of each kernel by `Size` (n, 7)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepKernels:
    """The kernels of one step of a model at one input size, and its trained parameters."""

    table: KernelTable
    parameter_tensors: int
    """Number of tensors that the optimizer updates; 0 in inference."""
    parameters: int
    """Number of their elements."""
    precision: Precision
    memory_format: MemoryFormat
    """Layout of images and weights; later tensors may have another."""
    fused_attention: bool = True
    """True if the software stack has a kernel for attention, as PyTorch from 2.0."""
    batch_size: int | None = None
    """The only batch size of a model that has one."""

    @property
    def needs_two_samples(self) -> bool:
        """True if a batch norm has one value per channel at batch 1, which PyTorch does not train.

        A batch norm in training mode reads its input twice; in evaluation mode it takes any batch.
        """
        table = self.table
        slopes = table.sizes[..., 1]
        written = slopes[:, Size.WRITTEN_BYTES]
        trains = (written > 0) & (slopes[:, Size.READ_BYTES] >= 2 * written)
        norms = (table.kinds == KernelKind.BATCH_NORM) & (table.passes == Pass.FORWARD) & trains
        return bool((norms & (table.sizes_at(1)[:, Size.DEPTH] <= 1)).any())

    def at(self, batch_size: int) -> Kernels:
        """Return the kernels at this batch size.

        Raises:
            TrappmError: The batch size is below 1, or not the only one of the model.
        """
        if batch_size < 1 or self.batch_size not in (None, batch_size):
            only = "1 or more" if self.batch_size is None else f"{self.batch_size}"
            raise TrappmError(f"kernels at batch size {batch_size} of a model for {only}")
        return Kernels(table=self.table, sizes=self.table.sizes_at(batch_size))
