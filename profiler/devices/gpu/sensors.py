"""NVML sensors of a GPU and other processes on it, watched during a measurement.

Sensors are read ten times a second in a thread. NVML may list every process, only those of a
container, or none, and may hide their memory. Processes are listed before our own CUDA context
exists, and memory that is in use then reveals unlisted ones.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np

from trappm.profiler.devices.gpu.nvml import Gpu, NvmlReply

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


def _query(function: str, *arguments: int) -> Callable[[Gpu], NvmlReply]:
    return lambda gpu: gpu.ask(function, *arguments)


_SENSORS: Mapping[str, tuple[Callable[[Gpu], NvmlReply], Callable[[Any], Any]]] = {
    "sm_clock_mhz": (_query("nvmlDeviceGetClockInfo", _CLOCK_SM), int),
    "memory_clock_mhz": (_query("nvmlDeviceGetClockInfo", _CLOCK_MEMORY), int),
    "temperature_c": (_query("nvmlDeviceGetTemperature", _TEMPERATURE_GPU), int),
    "power_w": (_query("nvmlDeviceGetPowerUsage"), lambda milliwatts: milliwatts / 1000),
    "utilization": (
        _query("nvmlDeviceGetUtilizationRates"),
        lambda rates: (rates.gpu / 100, rates.memory / 100),
    ),
    "clock_event_reasons": (_query("nvmlDeviceGetCurrentClocksEventReasons"), int),
    "processes": (
        _query("nvmlDeviceGetComputeRunningProcesses"),
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

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._sensors = dict(_SENSORS)
        self.power_is_instant = gpu.power_instant_mw().value is not None
        """True if the polled power is instantaneous, not a mean."""
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
        names = () if why is None else ("gpu_utilization", "memory_utilization")
        return reasons | dict.fromkeys(names, str(why))

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
        while not self._end.wait(PERIOD_S) and self.failure is None:
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


_MIB = 2**20

_STRANGER_MIB = 256
"""Memory in use before our context that must belong to another process.

The smallest context takes more, and drivers keep less for an idle GPU.
"""
_RESERVE_MIB = 2048
"""Memory of the driver itself, where it counts as used (before 510)."""


class Neighbours:
    """Other processes on this GPU: earlier ones, and those that came later."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._before, self._why_unknown = self._processes()
        memory = gpu.memory().value
        self.used_before: int | None = None if memory is None else memory.used
        """Bytes in use on the GPU at the start; the baseline."""
        self.mib_before: float | None = None
        """The same in MiB without the driver's memory."""
        if memory is not None:
            reserve_mib = 0 if hasattr(memory, "reserved") else _RESERVE_MIB
            self.mib_before = max(0.0, memory.used / _MIB - reserve_mib)

    @property
    def count_before(self) -> int | None:
        """Number of processes on the GPU at the start; None if unavailable."""
        return None if self._why_unknown is not None else len(self._before)

    def own_bytes(self) -> tuple[int | None, str | None]:
        """Return the bytes that this process uses on the GPU, or why they are unknown."""
        processes, why = self._processes()
        # In a container NVML shows the host's process ids, so ours is the one that is new.
        new = processes.keys() - self._before.keys()
        mine = os.getpid() if os.getpid() in new else (min(new) if len(new) == 1 else None)
        if mine is None:
            return None, why or f"NVML lists {len(new)} new processes on the GPU, not just ours"
        return processes[mine], "NVML does not report the memory of a process"

    def count(self, seen: Set[int]) -> int | None:
        """Return the number of other processes among those seen; None if ours is not listed."""
        if not seen:
            return None
        new = seen - self._before.keys()
        return len(seen) - bool(new)  # one of the new is this process

    def hidden_processes_remark(self) -> str | None:
        """Return a remark on unlisted processes that used the GPU before us, or None."""
        if self._before or self.mib_before is None or self.mib_before <= _STRANGER_MIB:
            return None
        return f"others on the GPU, not listed, who had {self.mib_before:.0f} MiB of it before us"

    def others_remark(self) -> str | None:
        """Return a remark on other processes on the GPU, or None."""
        processes, _ = self._processes()
        others = self.count(processes.keys()) or len(self._before)
        return f"{others} other processes on the GPU" if others else self.hidden_processes_remark()

    def why_processes_unknown(self) -> str | None:
        """Return why NVML does not list the processes on the GPU, or None if it does."""
        return self._why_unknown or self._processes()[1]

    def _processes(self) -> tuple[dict[int, int | None], str | None]:
        """Return the bytes of each process on the GPU by its id, or why they are unknown."""
        processes, why = self._gpu.ask("nvmlDeviceGetComputeRunningProcesses")
        return {process.pid: process.usedGpuMemory for process in processes or []}, why
