"""What a measurement asks of a device: to get ready, to time steps, and to read its meters.

    prepare -> watch_memory -> (create model, two steps) -> memory -> (warm up)
            -> open_window -> time_steps, time_steps, ... -> close_window

Creating one is cheap and may happen in any process. Everything from `prepare` on belongs to the
process that measures, which does one measurement and ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class MemoryReading:
    """Peak memory since `watch_memory`."""

    peak_mib: float | None
    method: str
    """What was counted, and how."""
    detail_mib: Mapping[str, float] = field(default_factory=dict)
    missing: str | None = None
    """Why `peak_mib` is None."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """What happened on the device while the steps ran."""

    seconds: float
    energy_j: float | None
    energy_missing: str | None = None
    """Why `energy_j` is None."""
    lost_share: float | None = None
    """Share of its CPU time in which the measurement was ready but others ran; None if unknown."""
    disturbances: tuple[str, ...] = ()
    """Reasons not to trust the samples, such as a foreign process or a thermal slowdown."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """For the environment record."""


class Device(ABC):
    """A kind of hardware under one software stack, on this machine.

    Raises:
        DeviceError: on creation, when the key's device is not on this machine.
    """

    key: str
    lock_name: str
    """Measurements whose devices share this name never run at the same time on a host."""
    min_power_window_s: float
    """The shortest window over which the energy meter can be believed; 0 where there is none."""

    @abstractmethod
    def environment(self) -> dict[str, Any]:
        """Hardware and software facts that hold for every measurement here; uses no device."""

    @abstractmethod
    def prepare(self) -> dict[str, Any]:
        """Gets this process ready (threads, pinning, limits, switches); says what it got."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Where torch puts the model."""

    @property
    @abstractmethod
    def capacity_mib(self) -> float:
        """The most memory that a measurement can have here; known after `prepare`."""

    @abstractmethod
    def time_steps(self, step: Callable[[], None], count: int) -> list[float]:
        """Runs `count` whole steps and synchronises at the end; milliseconds of each."""

    @abstractmethod
    def watch_memory(self) -> None:
        """Starts to watch the peak; what is in use now is not the measurement's."""

    @abstractmethod
    def memory(self) -> MemoryReading:
        """The peak since `watch_memory`; ends the watch."""

    @abstractmethod
    def open_window(self) -> None:
        """Starts to watch energy and disturbances."""

    @abstractmethod
    def close_window(self) -> Window:
        """What happened since `open_window`."""
