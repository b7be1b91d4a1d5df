"""The record of a training step on many GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trappm.prediction.fitting import MemoryAnswer, Verdict, room_text
from trappm.profiler.text import number_text


@dataclass(frozen=True, kw_only=True)
class ParallelPrediction(MemoryAnswer):
    """A training step on many GPUs; the memory is that of the fullest one."""

    model: str
    device: str
    device_name: str
    """Name of the device as people write it."""
    device_is_default: bool
    strategy: str
    gpus: int
    """Of each node."""
    nodes: int
    accumulation: int
    """Forward and backward passes before each optimizer step."""
    batch_size: int
    """Samples of a GPU's pass; with tensor parallelism, of the GPUs that share it."""
    sequence_length: int | None
    """Number of tokens, of text models."""
    precision: str
    optimizer: str
    links: str
    """Of the node that is assumed, within it and to others."""
    step_time_ms: float
    compute_ms: float
    exposed_ms: float
    """Waiting for collectives that nothing hides."""
    waiting_ms: float
    """For the slowest GPU, beyond that."""
    communication_ms: float
    """All collectives, hidden ones as well."""
    samples_per_s: float
    """Of all GPUs together."""
    speedup: float
    """Samples a second against one GPU with the same batch and accumulation."""
    memory_mib: float | None
    """Of the fullest GPU."""
    memory_parts_mib: Mapping[str, float] = field(default_factory=dict)
    capacity_mib: float | None
    usd_per_million: float | None
    """The cheapest known offer, for a million samples."""
    intervals: Mapping[str, tuple[float, float]]
    """For step time and samples a second, the bounds that 90 % lie in."""
    snapshot: str
    remarks: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    def to_dict(self) -> dict[str, Any]:
        return {
            "sentence": str(self),
            **asdict(self),
            "ranks": self.ranks,
            "fits": self.fits,
            "verdict": self.verdict,
        }

    def __str__(self) -> str:
        """The answer in one or two sentences."""
        low, high = (number_text(bound, 3) for bound in self.intervals["step_time_ms"])
        device = f"{self.device_name} (default)" if self.device_is_default else self.device_name
        memory, verdict, room = self.memory, self.verdict, ""
        if memory is not None and verdict is not None and self.capacity_mib is not None:
            room = f"{room_text(verdict, device, memory, self.capacity_mib)} per GPU. "
        takes = "would take" if verdict is Verdict.DOES_NOT_FIT else "takes"
        tokens = "" if self.sequence_length is None else f" and {self.sequence_length:,} tokens"
        count = f"{self.ranks} GPUs" if self.ranks > 1 else "one GPU"
        return (
            f"{room}A step on {count if room else f'{count} ({device})'} {takes} "
            f"{number_text(self.step_time_ms, 3)} ms ({low} to {high}) in {self.precision} at "
            f"batch {self.batch_size:,}{tokens} per GPU: {number_text(self.samples_per_s, 3)} "
            f"samples/s, {self.speedup:.1f} times one GPU."
        )
