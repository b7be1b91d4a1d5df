"""Readings of a GPU's sensors while steps run, ten times a second in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trappm.profiler.devices.gpu.nvml import Answer, Gpu

PERIOD_S = 0.1
"""NVML refreshes its energy counter about as often, and its utilization less often."""

# Numbers of NVML's interface (nvml.h).
_CLOCK_SM, _CLOCK_MEMORY, _TEMPERATURE_GPU = 1, 2, 0

_REASONS = {
    0x001: "idle",
    0x002: "clocks set by a user",
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
    0x100: "display clocks",
}
_SPOILING = 0x008 | 0x020 | 0x040 | 0x080
"""Reasons that spoil a sample; a software power cap is normal under load."""


def _asked(function: str, *arguments: int) -> Callable[[Gpu], Answer]:
    return lambda gpu: gpu.ask(function, *arguments)


_SENSORS: Mapping[str, tuple[Callable[[Gpu], Answer], Callable[[Any], Any]]] = {
    "sm_clock_mhz": (_asked("nvmlDeviceGetClockInfo", _CLOCK_SM), int),
    "memory_clock_mhz": (_asked("nvmlDeviceGetClockInfo", _CLOCK_MEMORY), int),
    "temperature_c": (_asked("nvmlDeviceGetTemperature", _TEMPERATURE_GPU), int),
    "power_w": (_asked("nvmlDeviceGetPowerUsage"), lambda milliwatts: milliwatts / 1000),
    "utilization": (
        _asked("nvmlDeviceGetUtilizationRates"),
        lambda rates: (rates.gpu / 100, rates.memory / 100),
    ),
    "clock_event_reasons": (_asked("nvmlDeviceGetCurrentClocksEventReasons"), int),
    "processes": (
        _asked("nvmlDeviceGetComputeRunningProcesses"),
        lambda processes: {process.pid for process in processes},
    ),
}
"""Query and conversion of each sensor."""

_RANGES = ("sm_clock_mhz", "memory_clock_mhz", "temperature_c")


class GpuWatch:
    """Reads a GPU's sensors in a thread, from creation until `stop`.

    A sensor without a result is not read again. If it had results before, the GPU or its driver
    failed during the window: `failure` has the reason.
    """

    def __init__(self, gpu: Gpu, period_s: float = PERIOD_S) -> None:
        self._gpu = gpu
        self._period_s = period_s
        self._sensors = dict(_SENSORS)
        self.power_is_instant = gpu.power_instant_mw().value is not None
        """Whether the polled power is instantaneous, not a mean."""
        if self.power_is_instant:
            self._sensors["power_w"] = Gpu.power_instant_mw, _SENSORS["power_w"][1]
        self._seen: dict[str, list[Any]] = {name: [] for name in _SENSORS}
        self._missing: dict[str, str] = {}
        self.failure: str | None = None
        self._end = threading.Event()
        self._ask()  # so that even the shortest window has one sample
        self._thread = threading.Thread(target=self._run, name="gpu-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread with a last reading."""
        self._end.set()
        self._thread.join()
        self._ask()

    @property
    def mean_power_w(self) -> float | None:
        """Mean of the polled power; None if unavailable."""
        looks_w = self._seen["power_w"]
        # At the first and the last look the GPU may wait for us.
        return float(np.mean(looks_w[1:-1] or looks_w)) if looks_w else None

    @property
    def missing(self) -> dict[str, str]:
        """Why a sensor has no value."""
        reasons = {name: why for name, why in self._missing.items() if not self._seen[name]}
        why = reasons.pop("utilization", None)
        return (
            reasons
            if why is None
            else {**reasons, "gpu_utilization": why, "memory_utilization": why}
        )

    def slowdowns(self) -> list[str]:
        """Return the unusual reasons for lower clocks in any reading."""
        return [what for bit, what in _REASONS.items() if self._reasons() & bit & _SPOILING]

    def processes(self) -> set[int] | None:
        """Return the ids of all processes seen on the GPU; None if unavailable."""
        seen = self._seen["processes"]
        return set().union(*seen) if seen else None

    def facts(self) -> dict[str, Any]:
        """Return facts for the environment; None for missing ones."""
        facts: dict[str, Any] = {name: _range(self._seen[name]) for name in _RANGES}
        gpu, memory = np.mean(self._seen["utilization"] or [(np.nan, np.nan)], axis=0).tolist()
        has_utilization = bool(self._seen["utilization"])
        reasons = [what for bit, what in _REASONS.items() if self._reasons() & bit]
        return facts | {
            "polled_power_w": self.mean_power_w,
            "gpu_utilization": gpu if has_utilization else None,
            "memory_utilization": memory if has_utilization else None,
            "clock_event_reasons": reasons if self._seen["clock_event_reasons"] else None,
        }

    def _run(self) -> None:
        while not self._end.wait(self._period_s) and self.failure is None:
            self._ask()

    def _ask(self) -> None:
        for name, (ask, convert) in self._sensors.items():
            if name in self._missing:
                continue
            value, why = ask(self._gpu)
            if why is None:
                self._seen[name].append(convert(value))
                continue
            self._missing[name] = why
            if self._seen[name] and self.failure is None:
                self.failure = why

    def _reasons(self) -> int:
        return int(np.bitwise_or.reduce(self._seen["clock_event_reasons"] or [0]))


def _range(values: list[int]) -> dict[str, float] | None:
    if not values:
        return None
    return {"min": min(values), "median": float(np.median(values)), "max": max(values)}
