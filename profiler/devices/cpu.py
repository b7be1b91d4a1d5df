"""CPU cores of this host as a device: `cpu-1t`, `cpu-2t`, ... with one thread per pinned core.

Memory is the peak resident set above the baseline before the model was created, without libraries
that were paged in since. While it is observed, the C library maps every tensor on its own, so that
freed memory does not count; otherwise the heap's layout moves the peak by 10 % between runs. During
timed steps the heap keeps freed memory, as in a long training. Energy comes from RAPL's package
counters, if readable.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.profiler.devices.base import StepDevice
from trappm.profiler.errors import DeviceError, one_line
from trappm.profiler.host import procfs
from trappm.profiler.host.environment import CORES_VERSION, host_facts
from trappm.profiler.records import Configuration, Precision, Protocol
from trappm.profiler.steps.meter import MemoryReading, Window

if TYPE_CHECKING:
    import torch

POWERCAP = Path("/sys/class/powercap")

_MEMORY_SHARE = 0.9
"""Share of the available memory that a measurement may take."""

_POWER_WINDOW_S = 0.1
"""RAPL's counters are refreshed every millisecond."""

_SLACK_MIB = 512
"""Address space for thread stacks and allocator arenas, which are reserved but hardly used."""


# Parameters of glibc's mallopt. The second mmap threshold is the largest that it accepts.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAP_EACH_TENSOR = {_M_MMAP_THRESHOLD: 128 << 10}
_KEEP_FREED = {_M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 1 << 30}


class CpuDevice(StepDevice):
    """n threads on n cores of this host; the key is `cpu-<n>t`."""

    lock_name = "cpu"

    @classmethod
    def local_keys(cls) -> list[str]:
        """Return `cpu-1t`, `cpu-2t`, `cpu-4t`, ... up to the number of usable cores."""
        cores = len(os.sched_getaffinity(0))
        threads = {2**power for power in range(cores.bit_length()) if 2**power <= cores} | {cores}
        return [f"cpu-{n}t" for n in sorted(threads)]

    def __init__(
        self, key: str, *, powercap: Path = POWERCAP, rank: int = 0, ranks: int = 1
    ) -> None:
        """Create the device; with `rank` and `ranks` one of several on separate cores."""
        match = re.fullmatch(r"cpu-([1-9]\d{0,3})t", key)
        if match is None:
            raise DeviceError("write cpu-2t for two threads, cpu-2x1t for two ranks of one thread")
        super().__init__(key)
        self.threads = int(match[1])
        self._ranks = ranks
        allowed = os.sched_getaffinity(0)
        if ranks * self.threads > len(allowed):
            raise DeviceError(f"it needs {ranks * self.threads} cores, {len(allowed)} may be used")
        self._energy = _Rapl(powercap)
        self._capacity_mib = 0.0
        # One hardware thread per physical core first; the highest numbers, because interrupts
        # and the pinning of other programs tend to start at 0.
        cores = sorted(allowed, reverse=True)
        cores.sort(key=lambda cpu: procfs.first_sibling(cpu) != cpu)
        self._cores = sorted(cores[rank * self.threads : (rank + 1) * self.threads])

    def environment(self) -> dict[str, Any]:
        facts = host_facts()
        own = {"device": self.key, "device_name": facts["cpu_model"]}
        if self._ranks == 1:
            own["measuring_version"] = CORES_VERSION
        method = _method(_has_mallopt(), procfs.can_reset_peak_resident())
        return {**facts, **own, "memory_method": method}

    def prepare(self) -> dict[str, Any]:
        import torch

        os.sched_setaffinity(0, self._cores)
        # Ray sets OMP_NUM_THREADS for its workers, so the count is set here whatever it says.
        torch.set_num_threads(self.threads)
        torch.set_num_interop_threads(1)
        if torch.get_num_threads() != self.threads:
            raise DeviceError(
                f"torch uses {torch.get_num_threads()} threads where {self.key} asks for "
                f"{self.threads}; is it built without OpenMP?"
            )
        self._capacity_mib = procfs.available_memory_mib() * _MEMORY_SHARE / self._ranks
        in_use_kib = procfs.memory_status_kib()["VmSize"]
        limit = in_use_kib * 1024 + int((self._capacity_mib + _SLACK_MIB) * 2**20)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        return {
            "threads": self.threads,
            "pinned_cores": self._cores,
            "omp_num_threads_found": os.environ.get("OMP_NUM_THREADS"),
            "memory_limit_mib": round(self._capacity_mib, 1),
            "memory_allowed_mib": round(procfs.allowed_memory_mib() / self._ranks),
        }

    def refusal(self, configuration: Configuration) -> str | None:
        """Try half precision, which depends on torch's version and on the processor."""
        if configuration.precision.is_fp32:
            return None
        import torch

        dtype = torch.float16 if configuration.precision is Precision.AMP_FP16 else torch.bfloat16
        module = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(512, 4)
        )
        try:
            with torch.autocast("cpu", dtype=dtype):
                loss = module(torch.zeros(1, 3, 8, 8)).float().sum()
            loss.backward()
        except RuntimeError as error:  # what torch raises for a missing kernel, too
            return (
                f"torch {torch.__version__} cannot compute in {configuration.precision} on this "
                f"processor: {one_line(error)}"
            )
        return None

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    @property
    def capacity_mib(self) -> float:
        return self._capacity_mib

    def memory_limits_mib(self) -> dict[str, float]:
        host_mib = procfs.allowed_memory_mib() / self._ranks
        return {"capacity": self.capacity_mib, "host_memory": host_mib}

    def time_steps(self, step: Callable[[], None], count: int) -> list[float]:
        samples_ms = []
        for _ in range(count):
            begin = time.perf_counter_ns()
            step()
            samples_ms.append((time.perf_counter_ns() - begin) / 1e6)
        return samples_ms

    def thread_waits_ns(self) -> Mapping[str, int]:
        # Gloo's threads compete with the step's own: then only the whole window is judged.
        return {} if self._ranks > 1 else procfs.run_queue_waits_ns()

    def watch_memory(self) -> None:
        # Where the peak cannot be reset it counts from the fork of this process, which is
        # close: nothing large happens between the fork and here.
        self._maps_each_tensor = _set_heap(_MAP_EACH_TENSOR)
        self._peak_was_reset = procfs.reset_peak_resident()
        self._baseline = procfs.memory_status_kib()

    def memory(self) -> MemoryReading:
        now = procfs.memory_status_kib()
        _set_heap(_KEEP_FREED)
        if not {"VmHWM", "RssFile"} <= now.keys():
            why = "the kernel reports no peak resident set in /proc/self/status"
            return MemoryReading(peak_mib=None, method="none", missing={"memory_mib": why})
        peak = (now["VmHWM"] - self._baseline["VmRSS"]) / 1024
        libraries = max(0, now["RssFile"] - self._baseline["RssFile"]) / 1024
        detail = {
            "peak_resident_above_baseline": peak,
            "libraries_paged_in": libraries,
            "baseline_resident": self._baseline["VmRSS"] / 1024,
            "capacity": self._capacity_mib,
        }
        method = _method(self._maps_each_tensor, self._peak_was_reset)
        return MemoryReading(peak_mib=peak - libraries, detail_mib=detail, method=method)

    def power_window_s(self, protocol: Protocol) -> float:
        del protocol
        return 0.0 if self._energy.missing else _POWER_WINDOW_S

    def open_window(self, step: Callable[[], None], *, is_metered: bool = True) -> None:
        del step, is_metered  # RAPL's counters are always fresh
        # Gloo sums gradients in threads of its own, on the same cores.
        has_helpers = self._ranks > 1
        self._lost_time = procfs.LostTime(self._cores, self.threads, has_helpers=has_helpers)
        self._energy.start()
        self._begin = time.perf_counter()

    def close_window(self) -> Window:
        seconds = time.perf_counter() - self._begin
        energy_j = self._energy.joules()
        lost = self._lost_time.facts()
        method = None if energy_j is None else "rapl package energy counter"
        return Window(
            seconds=seconds,
            energy_j=energy_j,
            energy_missing=self._energy.missing,
            lost_share=lost["lost_cpu_share"],
            facts={**lost, "power_method": method},
        )


def _method(maps_each_tensor: bool, peak_was_reset: bool) -> str:
    method = "peak resident set"
    method += "" if maps_each_tensor else ", freed memory of the heap included"
    return method + ("" if peak_was_reset else ", counted from the fork")


def _has_mallopt() -> bool:
    return hasattr(ctypes.CDLL(None), "mallopt")


def _set_heap(options: Mapping[int, int]) -> bool:
    """Set options of glibc's malloc; return False for another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, value) for name, value in options.items())


class _Rapl:
    """Energy of all processor packages from the kernel's powercap counters."""

    def __init__(self, root: Path) -> None:
        self._counters = sorted(root.glob("intel-rapl:[0-9]*"))
        # intel-rapl:0:0 is a part of intel-rapl:0; psys would count everything twice.
        self._counters = [c for c in self._counters if c.name.count(":") == 1]
        self.missing: str | None = None
        if not self._counters:
            self.missing = f"no RAPL energy counter under {root}"
            return
        try:
            self._counters = [c for c in self._counters if _text(c / "name") != "psys"]
            self._read_uj()
        except (OSError, ValueError) as error:
            self.missing = f"RAPL energy counter is not readable: {error}"

    def start(self) -> None:
        self._start_uj = {} if self.missing else self._read_uj()

    def joules(self) -> float | None:
        if self.missing:
            return None
        total_uj = 0
        for counter, now in self._read_uj().items():
            used = now - self._start_uj[counter]
            if used < 0:  # the counter has wrapped around
                used += int(_text(counter / "max_energy_range_uj"))
            total_uj += used
        return total_uj / 1e6

    def _read_uj(self) -> dict[Path, int]:
        return {counter: int(_text(counter / "energy_uj")) for counter in self._counters}


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()
