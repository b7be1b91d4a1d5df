"""Other processes on a GPU during a measurement, as far as NVML lists them.

NVML may list every process, only those of a container, or none, and may hide their memory.
Processes are listed before our own CUDA context exists, and memory that is in use then reveals
unlisted ones.
"""

from __future__ import annotations

import os
from collections.abc import Set

from trappm.profiler.devices.gpu.nvml import Gpu

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
        self._before, self._untold = self._processes()
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
        return None if self._untold is not None else len(self._before)

    def own_bytes(self) -> tuple[int | None, str | None]:
        """Return the bytes that this process uses on the GPU, or why they are unknown."""
        processes, why = self._processes()
        # In a container NVML shows the host's process ids, so ours is the one that is new.
        new = processes.keys() - self._before.keys()
        mine = os.getpid() if os.getpid() in new else (min(new) if len(new) == 1 else None)
        if mine is None:
            return None, why or f"NVML lists {len(new)} new processes on the GPU, not just ours"
        return processes[mine], "NVML does not tell the memory of a process"

    def count(self, seen: Set[int]) -> int | None:
        """Return the number of other processes among those seen; None if ours is not listed."""
        if not seen:
            return None
        new = seen - self._before.keys()
        return len(seen) - bool(new)  # one of the new is this process

    def unlisted(self) -> str | None:
        """Return a remark on unlisted processes that used the GPU before us, or None."""
        if self._before or self.mib_before is None or self.mib_before <= _STRANGER_MIB:
            return None
        return f"others on the GPU, not listed, who had {self.mib_before:.0f} MiB of it before us"

    def now(self) -> str | None:
        """Return a remark on other processes on the GPU, or None."""
        processes, _ = self._processes()
        others = self.count(processes.keys()) or len(self._before)
        return f"{others} other processes on the GPU" if others else self.unlisted()

    def untold(self) -> str | None:
        """Return why NVML does not list the processes on the GPU, or None if it does."""
        return self._untold or self._processes()[1]

    def _processes(self) -> tuple[dict[int, int | None], str | None]:
        """Return the bytes of each process on the GPU by its id, or why they are unknown."""
        processes, why = self._gpu.ask("nvmlDeviceGetComputeRunningProcesses")
        return {process.pid: process.usedGpuMemory for process in processes or []}, why
