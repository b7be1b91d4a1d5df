"""Other users of a GPU while we measure on it, as far as NVML lists them.

NVML may list every process, only those of a container, or nobody; it may hide what each of them
uses. So the processes are looked at before our own CUDA context exists, when all are strangers, and
the memory that is in use then tells of those whom nobody lists.
"""

from __future__ import annotations

import os
from collections.abc import Set

from trappm.profiler.devices.gpu.nvml import Gpu

_MIB = 2**20

_STRANGER_MIB = 256
"""More than this in use before our context exists is somebody's, whoever is listed: the smallest
context takes more, and what a driver keeps for an idle GPU is less."""
_RESERVE_MIB = 2048
"""What the driver may have taken for itself, where it counts that as used (before 510)."""


class Neighbours:
    """Whoever has been on this GPU before this was made, and whoever came since, but for us."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._before, self._untold = self._processes()
        memory = gpu.memory().value
        self.used_before: int | None = None if memory is None else memory.used
        """Bytes in use on the GPU; the baseline."""
        self.mib_before: float | None = None
        """The same in MiB without the driver's own."""
        if memory is not None:
            reserve_mib = 0 if hasattr(memory, "reserved") else _RESERVE_MIB
            self.mib_before = max(0.0, memory.used / _MIB - reserve_mib)

    @property
    def count_before(self) -> int | None:
        """How many processes were on the GPU; None where NVML does not tell."""
        return None if self._untold is not None else len(self._before)

    def own_bytes(self) -> tuple[int | None, str | None]:
        """Bytes that this process uses on the GPU, or why they are unknown."""
        processes, why = self._processes()
        # In a container NVML shows the host's process ids, so ours is the one that is new.
        new = processes.keys() - self._before.keys()
        mine = os.getpid() if os.getpid() in new else (min(new) if len(new) == 1 else None)
        if mine is None:
            return None, why or f"NVML lists {len(new)} new processes on the GPU, not just ours"
        return processes[mine], "NVML does not tell the memory of a process"

    def count(self, seen: Set[int]) -> int | None:
        """How many of the processes seen on the GPU are not ours; None if not even we are."""
        if not seen:
            return None
        new = seen - self._before.keys()
        return len(seen) - bool(new)  # one of the new is this process

    def unlisted(self) -> str | None:
        """Who had the GPU before us without being listed, if anybody."""
        if self._before or self.mib_before is None or self.mib_before <= _STRANGER_MIB:
            return None
        return f"others on the GPU, not listed, who had {self.mib_before:.0f} MiB of it before us"

    def now(self) -> str | None:
        """Processes that have been on the GPU beside us, as far as known."""
        processes, _ = self._processes()
        others = self.count(processes.keys()) or len(self._before)
        return f"{others} other processes on the GPU" if others else self.unlisted()

    def untold(self) -> str | None:
        """Why NVML does not list the processes on the GPU; None if it did and does."""
        return self._untold or self._processes()[1]

    def _processes(self) -> tuple[dict[int, int | None], str | None]:
        """Bytes that each process uses on the GPU by its id, or why they are unknown."""
        processes, why = self._gpu.ask("nvmlDeviceGetComputeRunningProcesses")
        return {process.pid: process.usedGpuMemory for process in processes or []}, why
