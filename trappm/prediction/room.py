"""The answers of `trappm fits`: whether a batch fits, or the largest that does, on each device.

They are those of `trappm.predict`, at the batch size in question or at the largest that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trappm.prediction.device_names import DEFAULT_DEVICE
from trappm.prediction.fitting import MemoryInterval, Verdict, capacity_of, room_text
from trappm.prediction.predict import predict
from trappm.prediction.prediction import Prediction
from trappm.profiler.errors import UnsupportedModelError


@dataclass(frozen=True, kw_only=True)
class Room:
    """Whether a batch fits a device."""

    prediction: Prediction
    memory: MemoryInterval
    capacity_mib: float
    verdict: Verdict
    is_largest: bool
    """Whether the batch is the largest that fits, because the question named none."""

    @property
    def remarks(self) -> list[str]:
        """Remarks that concern the memory."""
        remarks = self.prediction.remarks
        return [text for text in remarks if "memory" in text or "tep time" not in text]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        names = (
            "model", "device", "phase", "precision", "memory_format", "optimizer", "batch_size",
            "sequence_length", "fits", "verdict", "memory_mib", "capacity_mib", "largest_batch",
        )  # fmt: skip
        return {
            "sentence": str(self),
            **{name: getattr(self.prediction, name) for name in names},
            "memory_interval_mib": [self.memory.low_mib, self.memory.high_mib],
            "remarks": self.remarks,
        }

    def __str__(self) -> str:
        """The answer in one or two sentences."""
        p = self.prediction
        device = f"{p.device_name} (default)" if p.device_is_default else p.device_name
        training = p.phase == "train"
        how = f"in {p.precision}" + (f" with {p.optimizer}" if training else "")
        tokens = "" if p.sequence_length is None else f" of {p.sequence_length:,} tokens"
        if self.is_largest and self.verdict is Verdict.FITS:
            return (
                f"{p.model} {'trains' if training else 'runs inference'} on {device} with up to "
                f"{p.batch_size:,} samples{tokens} per step {how}: "
                f"{self.memory.of(self.capacity_mib)}."
            )
        room = room_text(self.verdict, device, self.memory, self.capacity_mib)
        largest = (
            "" if p.largest_batch is None else f" Largest batch that fits: {p.largest_batch:,}."
        )
        batch = f"batch {p.batch_size:,}{tokens}"
        return f"{room} for {p.model} at {batch} {how}.{largest}"


def rooms(
    model: str,
    devices: Sequence[str] | None = None,
    *,
    batch_size: int | None = None,
    **options: Any,
) -> list[Room]:
    """Answer for each device whether a batch fits, or which is the largest that does.

    Args:
        model: timm name, transformer, or path of an ONNX file.
        devices: Cards by any of their names; `DEFAULT_DEVICE` by default.
        batch_size: By default the largest that fits.
        **options: Further arguments of `trappm.predict`.

    Raises:
        InputError: There is no such card, or its memory is unknown.
        TrappmError: As `trappm.predict`.
    """
    for device in devices or [DEFAULT_DEVICE]:
        capacity_of(device)

    def ask(device: str | None, size: int | None) -> Prediction:
        return predict(model, device=device, batch_size=size, **options)

    rows = []
    named: Sequence[str | None] = devices or [None]
    for name in named:
        first = ask(name, batch_size)
        largest = first.largest_batch if batch_size is None else None
        answer = first if largest is None else ask(name, max(largest, 1))
        if answer.memory is None or answer.capacity_mib is None or answer.verdict is None:
            raise UnsupportedModelError("; ".join(answer.gaps()))
        rows.append(
            Room(
                prediction=answer,
                memory=answer.memory,
                capacity_mib=answer.capacity_mib,
                verdict=answer.verdict,
                is_largest=largest is not None,
            )
        )
    return rows
