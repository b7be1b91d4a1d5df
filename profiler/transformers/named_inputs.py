"""Inputs by keyword that differ between training and inference, such as tokens with labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from trappm.profiler.records import MemoryFormat, Phase


@dataclass(frozen=True)
class Field:
    """A tensor of which each sample has so many numbers."""

    shape: tuple[int, ...]
    """Without the batch axis."""
    dtype: torch.dtype
    upper: int = 0
    """Whole numbers are drawn from 0 to below this."""

    def drawn(self, batch_size: int, generator: torch.Generator) -> torch.Tensor:
        """A batch of it, on the generator's device."""
        shape, device = (batch_size, *self.shape), generator.device
        if self.dtype.is_floating_point:
            empty = torch.empty(shape, dtype=self.dtype, device=device)
            return empty.normal_(generator=generator)
        return torch.randint(
            max(self.upper, 1), shape, generator=generator, dtype=self.dtype, device=device
        )


@dataclass(frozen=True)
class NamedInputs:
    """What a model is called with by keyword, in each phase."""

    train: Mapping[str, Field]
    infer: Mapping[str, Field]
    settings: Mapping[Phase, Mapping[str, Any]]
    """Arguments beside tensors."""
    phase: Phase = Phase.TRAIN

    def in_phase(self, phase: Phase) -> Self:
        return replace(self, phase=phase)

    def batch(
        self, batch_size: int, memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """So many samples on the meta device."""
        tensors = {
            name: torch.empty((batch_size, *field.shape), dtype=field.dtype, device="meta")
            for name, field in self._fields.items()
        }
        if memory_format is MemoryFormat.CHANNELS_LAST:
            tensors = {
                name: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
                for name, t in tensors.items()
            }
        return (), {**tensors, **self.settings.get(self.phase, {})}

    def drawn(self, batch_size: int, generator: torch.Generator) -> dict[str, Any]:
        """So many samples at random, on the generator's device."""
        tensors = {name: f.drawn(batch_size, generator) for name, f in self._fields.items()}
        return {**tensors, **self.settings.get(self.phase, {})}

    def values(self, batch_size: int) -> list[torch.Tensor | None]:
        """Nothing is known of them."""
        return [None] * len(self._fields)

    @property
    def _fields(self) -> Mapping[str, Field]:
        return self.train if self.phase is Phase.TRAIN else self.infer

    def __str__(self) -> str:
        first = next(iter(self.infer.values())).shape
        return f"{first[-1]:,} tokens" if len(first) == 1 else f"{first[-1]} px"
