"""What a model is given: one sample's shape and type, without values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from profiler.errors import InputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sample:
    """One sample of a batch: square images say only their size, others their shape and type."""

    shape: tuple[int, ...]
    """Without the batch axis; (3, 224, 224) for images of 224 px."""
    dtype: torch.dtype

    @classmethod
    def of(cls, input_size: int | Self) -> Self:
        """A square RGB image of this size in pixels, or the sample that is given.

        Raises:
            InputError: the size is below 1.
        """
        import torch

        if not isinstance(input_size, int):
            return input_size
        if input_size < 1:
            raise InputError(f"input size is {input_size}; it must be 1 or more pixels")
        return cls((3, input_size, input_size), torch.float32)

    def batch(self, batch_size: int) -> torch.Tensor:
        """So many samples on the meta device, batch first."""
        import torch

        return torch.empty((batch_size, *self.shape), dtype=self.dtype, device="meta")

    def __str__(self) -> str:
        square = len(self.shape) == 3 and self.shape[1] == self.shape[2] and self.shape[0] == 3
        return f"{self.shape[-1]} px" if square else "x".join(map(str, self.shape)) or "one number"
