"""The record of a training step on many GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trappm.profiler.devices.capacity import USABLE_SHARE
from trappm.profiler.number_text import number_text


@dataclass(frozen=True, kw_only=True)
class ParallelPrediction:
    """A training step on many GPUs."""

    model: str
    device: str
    strategy: str
    gpus: int
    """Of each node."""
    nodes: int
    accumulation: int
    """Forward and backward passes before each optimizer step."""
    batch_size: int
    """Samples of a GPU's pass; with tensor parallelism, of the GPUs that share it."""
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

    @property
    def fits(self) -> bool | None:
        """Whether the median of the memory does; None where it is not known."""
        if self.memory_mib is None or self.capacity_mib is None:
            return None
        return self.memory_mib <= USABLE_SHARE * self.capacity_mib

    def to_dict(self) -> dict[str, Any]:
        return {
            "sentence": str(self),
            **asdict(self),
            "ranks": self.ranks,
            "fits": self.fits,
        }

    def __str__(self) -> str:
        """The answer in a sentence."""
        low, high = (number_text(bound, 3) for bound in self.intervals["step_time_ms"])
        card = f"{self.ranks} {self.device}" if self.ranks > 1 else f"one {self.device}"
        text = (
            f"A step of {card} takes {low} to {high} ms: "
            f"{number_text(self.samples_per_s, 3)} samples/s, {self.speedup:.1f} times one GPU"
        )
        if self.memory_mib is None:
            return f"{text}."
        room = "" if self.capacity_mib is None else f" of {self.capacity_mib / 1024:.1f}"
        fits = " (does not fit)" if self.fits is False else ""
        return f"{text}; {self.memory_mib / 1024:.1f}{room} GiB a GPU{fits}."
