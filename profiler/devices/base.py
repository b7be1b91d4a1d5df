"""The interface of devices.

Most devices run the step on hardware (`StepDevice`), by the protocol of `profiler.steps`:

    prepare -> watch_memory -> (create model, two steps) -> memory -> (warm up)
            -> open_window -> time_steps, time_steps, ... -> fill_window -> run_to_tick
            -> close_window -> time_parts

Others, such as a replay of labels, implement `Device.measure`. Any process can create a device.
Everything from `prepare` on runs in the measuring process, which does one measurement and ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from trappm.profiler.records import Configuration, Protocol, Provenance
from trappm.profiler.steps.meter import Findings, StepMeter


class Device(ABC):
    """A measurement target: a physical, replayed or simulated device with one software stack.

    Raises:
        DeviceError: On creation, if this machine does not have the device.
    """

    key: str
    lock_name: str | None
    """Devices with the same name never measure at once on a host; None: no lock."""
    provenance: Provenance = Provenance.MEASURED
    uses_host_memory: bool = True
    """True if a step uses the host's memory."""
    ranks: int = 1
    """Number of processes that share a step; batch, memory and power are of each."""

    def __init__(self, key: str) -> None:
        self.key = key

    @property
    def lock_names(self) -> tuple[str, ...]:
        """All locks, in an order that is the same for all devices."""
        return () if self.lock_name is None else (self.lock_name,)

    @classmethod
    def local_keys(cls) -> list[str]:
        """Return the keys of this machine's devices of this kind."""
        return []

    @classmethod
    def local_failures(cls) -> list[str]:
        """Return one line for each device of this kind that cannot be used."""
        return []

    @abstractmethod
    def environment(self) -> dict[str, Any]:
        """Return the facts of hardware and software; uses no device."""

    def prepare(self) -> dict[str, Any]:
        """Prepare this process (threads, pinning, limits, switches); return facts about it."""
        return {}

    @property
    @abstractmethod
    def capacity_mib(self) -> float:
        """Largest memory of a measurement; known after `prepare`."""

    def memory_limits_mib(self) -> dict[str, float]:
        """Return `capacity`, the memory that a step that ran out of it could have had.

        If others had a part of the memory, also the whole: `host_memory`, or `device_memory`.
        """
        return {"capacity": self.capacity_mib}

    def is_nearly_full(self) -> bool:
        """Return whether an unexplained error is probably due to missing memory."""
        return False

    @abstractmethod
    def measure(
        self, configuration: Configuration, protocol: Protocol, enter: Callable[[str], None]
    ) -> Findings:
        """Measure on this prepared device.

        Args:
            configuration: Configuration to measure.
            protocol: How to measure.
            enter: Called with each phase: `create`, `warmup`, `measure`.

        Raises:
            InputError, UnsupportedModelError: It cannot be measured here; becomes `unsupported`.
            MemoryError: Becomes `oom`.
        """


class StepDevice(Device, StepMeter):
    """A device that runs real steps, by the protocol of `profiler.steps.step`."""

    def measure(
        self, configuration: Configuration, protocol: Protocol, enter: Callable[[str], None]
    ) -> Findings:
        from trappm.profiler.steps.sampling import judge
        from trappm.profiler.steps.step import run_protocol

        return judge(run_protocol(configuration, self, protocol, enter), protocol)
