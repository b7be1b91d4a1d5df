"""Interface of a device to a step: a stopwatch, and readings of memory and energy."""

from __future__ import annotations

import itertools
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from trappm.profiler.records import Configuration, Outcome, Protocol, Provenance, StepSummary

if TYPE_CHECKING:
    import torch
    from torch import nn

Mark = Callable[[], None]
MarkedStep = Callable[[Mark], None]
"""A step that calls its argument after each of its parts."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The fields of a `Measurement` that come from the device."""

    outcome: Outcome
    failed_in: str | None = None
    message: str | None = None
    step_samples_ms: tuple[float, ...] = ()
    step: StepSummary | None = None
    memory_mib: float | None = None
    memory_detail_mib: Mapping[str, float] = field(default_factory=dict)
    power_w: float | None = None
    energy_j: float | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Facts of this run, in addition to those of the device."""
    provenance: Provenance = Provenance.MEASURED


@dataclass(frozen=True, kw_only=True)
class MemoryReading:
    """Peak memory since `watch_memory`."""

    peak_mib: float | None
    method: str
    """Counted memory and method of counting."""
    detail_mib: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why `memory_mib`, or a part of the detail, is missing."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Observations while the steps ran."""

    seconds: float
    """Time in which steps ran, without pauses."""
    energy_j: float | None
    energy_missing: str | None = None
    """Why `energy_j` is None."""
    lost_share: float | None = None
    """Share of CPU time in which others ran while the step was ready; None if unknown."""
    disturbances: tuple[str, ...] = ()
    """Reasons not to trust the samples, such as other processes or thermal throttling."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why a fact is None."""


class StepTime(NamedTuple):
    """Wall time of a step, and the part lost to other programs."""

    wall_ms: float
    lost_ms: float = 0.0

    @property
    def lost_share(self) -> float:
        """Share of the wall time; below 1, as the loss is an estimate."""
        return min(0.99, self.lost_ms / self.wall_ms)

    @property
    def net_ms(self) -> float:
        """Wall time without the lost time."""
        return self.wall_ms * (1 - self.lost_share)


class StepMeter(ABC):
    """Times whole steps and observes memory, energy and disturbances."""

    min_warmup_s: float = 0.0
    """Shortest time of untimed steps, whatever the protocol says."""

    def refusal(self, configuration: Configuration) -> str | None:
        """Return why this configuration cannot run here, whatever the model, or None."""
        return None

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Device of the model."""

    def share(self, model: nn.Module) -> nn.Module:
        """Return the model as it is trained here: by this device alone, or with others."""
        return model

    @abstractmethod
    def time_steps(self, step: Callable[[], None], count: int) -> list[float]:
        """Run whole steps, synchronize at the end, and return the milliseconds of `count` steps."""

    def thread_waits_ns(self) -> Mapping[str, int]:
        """Return how long each thread has waited for a core; empty if steps need no cores."""
        return {}

    def time_parts(self, step: MarkedStep) -> list[float]:
        """Run one step and return the milliseconds of its parts."""
        marks = [time.perf_counter_ns()]
        step(lambda: marks.append(time.perf_counter_ns()))
        return [(b - a) / 1e6 for a, b in itertools.pairwise(marks)]

    def device_time_ms(self, step: Callable[[], None]) -> tuple[float | None, str | None]:
        """Run one traced step and return the sum of its kernels in milliseconds.

        Returns:
            The sum, or None and the reason; (None, None) on a device without kernels.
        """
        del step
        return None, None

    @abstractmethod
    def watch_memory(self) -> None:
        """Start to observe the peak; memory in use now does not count."""

    @abstractmethod
    def memory(self) -> MemoryReading:
        """Return the peak since `watch_memory`, and stop to observe."""

    def power_window_s(self, protocol: Protocol) -> float:
        """Return the shortest valid window of the energy meter; 0 without a meter."""
        del protocol
        return 0.0

    @abstractmethod
    def open_window(self, step: Callable[[], None], *, is_metered: bool = True) -> None:
        """Start to observe energy and disturbances; may run steps until the meter is ready.

        Args:
            step: The step.
            is_metered: Whether energy counts; otherwise nothing waits for the meter.
        """

    def fill_window(self, step: Callable[[], None], count: int, pauses: random.Random) -> None:
        """Run `count` more untimed steps for the energy meter.

        Args:
            step: The step.
            count: Number of steps.
            pauses: Random pauses in between, for a meter that samples.
        """
        del pauses
        self.time_steps(step, count)

    def run_to_tick(self, step: Callable[[], None]) -> None:
        """Run whole steps until the energy meter has just been refreshed."""
        del step

    @abstractmethod
    def close_window(self) -> Window:
        """Return the observations since `open_window`."""
