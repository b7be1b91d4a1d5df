"""The interface of devices: measure a configuration, in whatever way.

Most devices run the step on hardware (`StepDevice`) and leave the protocol to us:

    prepare -> watch_memory -> (create model, two steps) -> memory -> (warm up)
            -> open_window -> time_steps, time_steps, ... -> fill_window -> run_to_tick
            -> close_window -> time_parts

Others answer without running anything (`Device.measure`), such as a replay of recorded labels.
Creating a device is cheap and may happen in any process. Everything from `prepare` on belongs to
the process that measures, which does one measurement and ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from trappm.profiler.errors import InputError
from trappm.profiler.records import Configuration, Protocol, Provenance
from trappm.profiler.steps.meter import Findings, StepMeter


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
    ranks: int = 1
    """How many processes take a step together; batch, memory and power are of each."""

    def __init__(self, key: str) -> None:
        self.key = key

    @property
    def lock_names(self) -> tuple[str, ...]:
        """All that is locked, in an order that is the same for everybody who locks several."""
        return () if self.lock_name is None else (self.lock_name,)

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

    def for_kernels(self) -> StepDevice:
        """Return the device whose kernels are timed.

        Raises:
            InputError: The device runs no kernels.
        """
        raise InputError(
            f"{self.key} has no kernels of its own to be timed; name one GPU, cores, or several "
            "ranks"
        )

    @abstractmethod
    def measure(
        self, configuration: Configuration, protocol: Protocol, enter: Callable[[str], None]
    ) -> Findings:
        """Measures on this prepared device; calls `enter` with `create`, `warmup`, `measure`.

        Raises:
            InputError, UnsupportedModelError: it cannot be measured here; becomes `unsupported`.
            MemoryError: becomes `oom`.
        """


class StepDevice(Device, StepMeter):
    """A device that runs real steps, by the protocol of `profiler.steps.step`."""

    def for_kernels(self) -> StepDevice:
        return self

    def measure(
        self, configuration: Configuration, protocol: Protocol, enter: Callable[[str], None]
    ) -> Findings:
        from trappm.profiler.steps.stability import judge
        from trappm.profiler.steps.step import run_protocol

        return judge(run_protocol(configuration, self, protocol, enter), protocol)
