"""What the profiler asks of a device: to measure a configuration, however it comes to its answer.

Most devices run the step on hardware (`StepDevice`) and leave the protocol to us:

    prepare -> watch_memory -> (create model, two steps) -> memory -> (warm up)
            -> open_window -> time_steps, time_steps, ... -> fill_window -> run_to_tick
            -> close_window -> time_parts

Others answer without running anything (`Device.measure`), such as a replay of recorded labels.
Creating a device is cheap and may happen in any process. Everything from `prepare` on belongs to
the process that measures, which does one measurement and ends.
"""

from __future__ import annotations

import itertools
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trappm.profiler.records import Configuration, Outcome, Protocol, Provenance, StepSummary

if TYPE_CHECKING:
    import torch

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


class Device(ABC):
    """Whatever can say what a step costs: hardware under one software stack, or a record of it.

    Raises:
        DeviceError: on creation, when the key's device is not on this machine.
    """

    key: str
    lock_name: str | None
    """Measurements whose devices share this name never run at the same time on a host; None for
    devices that nothing can disturb."""
    provenance: Provenance = Provenance.MEASURED
    uses_host_memory: bool = True
    """Whether a step takes the host's memory: then the capacity is what the host has to give."""

    def __init__(self, key: str) -> None:
        self.key = key

    @classmethod
    def local_keys(cls) -> list[str]:
        """Keys of the devices of this kind that this machine offers by itself."""
        return []

    @classmethod
    def local_failures(cls) -> list[str]:
        """Why others of this kind, which this machine has, cannot be used: one line each."""
        return []

    @abstractmethod
    def environment(self) -> dict[str, Any]:
        """Hardware and software facts that hold for every measurement here; uses no device."""

    def prepare(self) -> dict[str, Any]:
        """Gets this process ready (threads, pinning, limits, switches); says what it got."""
        return {}

    @property
    @abstractmethod
    def capacity_mib(self) -> float:
        """The most memory that a measurement can have here; known after `prepare`."""

    def memory_limits_mib(self) -> dict[str, float]:
        """`capacity`: what a step that has just run out of memory could have had.

        Where others had a part of the whole, so that it may fit another time, the whole is told
        beside it: `host_memory`, or `device_memory` of a device with memory of its own.
        """
        return {"capacity": self.capacity_mib}

    def is_nearly_full(self) -> bool:
        """Whether so little memory is left that an error without a reason is for want of it."""
        return False

    @abstractmethod
    def measure(
        self, configuration: Configuration, protocol: Protocol, enter: Callable[[str], None]
    ) -> Findings:
        """Measures on this prepared device; `enter` is told `create`, `warmup`, `measure`.

        Raises:
            InputError, UnsupportedModelError: it cannot be measured here; becomes `unsupported`.
            MemoryError: becomes `oom`.
        """


class StepDevice(Device):
    """A device that runs real steps, by the protocol of `profiler.steps.step`."""

    min_warmup_s: float = 0.0
    """How long steps run before any is timed, however few the protocol asks for."""

    def measure(
        self, configuration: Configuration, protocol: Protocol, enter: Callable[[str], None]
    ) -> Findings:
        from trappm.profiler.steps.stability import judge
        from trappm.profiler.steps.step import run_protocol

        return judge(run_protocol(configuration, self, protocol, enter), protocol)

    def refusal(self, configuration: Configuration) -> str | None:
        """Why this configuration cannot run here, whatever the model; None if it can."""
        return None

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Where torch puts the model."""

    @abstractmethod
    def time_steps(self, step: Callable[[], None], count: int) -> list[float]:
        """Runs `count` whole steps and synchronises at the end; milliseconds of each.

        It may run more than it times.
        """

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
    def open_window(self, step: Callable[[], None]) -> None:
        """Starts to watch energy and disturbances; may run steps until the meter is ready."""

    def fill_window(self, step: Callable[[], None], count: int, pauses: random.Random) -> None:
        """Runs `count` more steps, which nobody times, to give the energy meter its time.

        Args:
            pauses: draws how long to pause in between, for a meter that looks only now and then.
        """
        del pauses
        self.time_steps(step, count)

    def run_to_tick(self, step: Callable[[], None]) -> None:
        """Goes on with whole steps until the energy meter has just been refreshed."""

    @abstractmethod
    def close_window(self) -> Window:
        """What happened since `open_window`."""
