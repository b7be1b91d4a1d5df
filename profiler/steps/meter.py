"""What a step needs of the device that it runs on: a stopwatch, and readings of memory and energy.

`profiler.devices` has the meters of real devices; `step` runs a step with any of them.
"""

from __future__ import annotations

import itertools
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from trappm.profiler.errors import TrappmError
from trappm.profiler.records import Configuration, Outcome, Protocol, Provenance, StepSummary

if TYPE_CHECKING:
    import torch
    from torch import nn

Mark = Callable[[], None]
MarkedStep = Callable[[Mark], None]
"""A step that calls the mark after each of its parts."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a device found: the fields of a `Measurement` that come from the device."""

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
    """Facts of this run, added to those of the device."""
    provenance: Provenance = Provenance.MEASURED


class ExplainedError(TrappmError):
    """A failure that is explained already, by the process that it happened in."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings.message or f"it ended as {findings.outcome}")
        self.findings = findings


@dataclass(frozen=True, kw_only=True)
class MemoryReading:
    """Peak memory since `watch_memory`."""

    peak_mib: float | None
    method: str
    """What was counted, and how."""
    detail_mib: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why `memory_mib`, or a part of the detail, is missing."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """What happened on the device while the steps ran."""

    seconds: float
    """In which steps ran; pauses between them do not count."""
    energy_j: float | None
    energy_missing: str | None = None
    """Why `energy_j` is None."""
    lost_share: float | None = None
    """Share of its CPU time in which the measurement was ready but others ran; None if unknown."""
    disturbances: tuple[str, ...] = ()
    """Reasons not to trust the samples, such as a foreign process or a thermal slowdown."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """For the environment record."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why a fact is None."""


class StepTime(NamedTuple):
    """Wall time of a step, and how much of it the step lost to other programs."""

    wall_ms: float
    lost_ms: float = 0.0

    @property
    def lost_share(self) -> float:
        """Share of the wall time; below 1, as the loss is an estimate."""
        return min(0.99, self.lost_ms / self.wall_ms)

    @property
    def net_ms(self) -> float:
        """Wall time without the time lost."""
        return self.wall_ms * (1 - self.lost_share)


class StepMeter(ABC):
    """Times whole steps and watches memory, energy and disturbances while they run."""

    min_warmup_s: float = 0.0
    """How long steps run before any is timed, however few the protocol asks for."""

    def refusal(self, configuration: Configuration) -> str | None:
        """Why this configuration cannot run here, whatever the model; None if it can."""
        return None

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Where torch puts the model."""

    def share(self, model: nn.Module) -> nn.Module:
        """The model as it is trained here: by this device alone, or with others."""
        return model

    @abstractmethod
    def time_steps(self, step: Callable[[], None], count: int) -> list[float]:
        """Runs `count` whole steps and synchronises at the end; milliseconds of each.

        It may run more than it times.
        """

    def thread_waits_ns(self) -> Mapping[str, int]:
        """Return how long each thread has waited for a core; empty if steps need no cores."""
        return {}

    def time_parts(self, step: MarkedStep) -> list[float]:
        """Runs one step; milliseconds of each of its parts."""
        marks = [time.perf_counter_ns()]
        step(lambda: marks.append(time.perf_counter_ns()))
        return [(b - a) / 1e6 for a, b in itertools.pairwise(marks)]

    @abstractmethod
    def watch_memory(self) -> None:
        """Starts to watch the peak; what is in use now is not the measurement's."""

    @abstractmethod
    def memory(self) -> MemoryReading:
        """The peak since `watch_memory`; ends the watch."""

    def power_window_s(self, protocol: Protocol) -> float:
        """The shortest window over which the energy meter can be believed; 0 without a meter."""
        del protocol
        return 0.0

    @abstractmethod
    def open_window(self, step: Callable[[], None], *, is_metered: bool = True) -> None:
        """Starts to watch energy and disturbances; may run steps until the meter is ready.

        Args:
            is_metered: whether the energy counts; nobody waits for the meter otherwise.
        """

    def fill_window(self, step: Callable[[], None], count: int, pauses: random.Random) -> None:
        """Runs `count` more steps, which are not timed, to give the energy meter its time.

        Args:
            pauses: draws how long to pause in between, for a meter that looks only now and then.
        """
        del pauses
        self.time_steps(step, count)

    def run_to_tick(self, step: Callable[[], None]) -> None:
        """Goes on with whole steps until the energy meter has just been refreshed."""
        del step

    @abstractmethod
    def close_window(self) -> Window:
        """What happened since `open_window`."""
