"""The few numbers about this process and this machine that Linux keeps in /proc and /sys."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_STEAL = 7
"""Place of the stolen time among the numbers of a core in /proc/stat."""


def memory_status_kib() -> dict[str, int]:
    """The `Vm*` and `Rss*` lines of this process's status, in KiB."""
    status = {}
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.startswith(("Vm", "Rss")):
            status[name] = int(value.split()[0])
    return status


def reset_peak_resident() -> bool:
    """Sets VmHWM of this process back to its resident set; False where the kernel forbids it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def available_memory_mib() -> float:
    """Memory that a new process may take without swapping, within this process's cgroup."""
    available = _meminfo_kib("MemAvailable") / 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return available  # no cgroup limit to be seen from here
    return available if limit == "max" else min(available, (int(limit) - used) / 2**20)


def total_memory_mib() -> float:
    """Memory of this machine."""
    return _meminfo_kib("MemTotal") / 1024


def kernel_oom_kills() -> int:
    """How often the kernel has killed a process of this machine for lack of memory; 0 if untold."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0  # a sandbox such as gVisor has no such file
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def run_queue_wait_s() -> float | None:
    """Seconds that all threads of this process were ready to run but others had their core.

    None where the kernel keeps no scheduler statistics.
    """
    waited_ns = 0
    for thread in Path("/proc/self/task").iterdir():
        try:
            waited_ns += int((thread / "schedstat").read_text(encoding="ascii").split()[1])
        except (OSError, IndexError):
            return None
    return waited_ns / 1e9


def stolen_cpu_s(cores: Iterable[int]) -> float:
    """Seconds of these cores that a hypervisor gave to others, since the machine started."""
    names = {f"cpu{core}" for core in cores}
    ticks = 0
    with open("/proc/stat", encoding="ascii") as lines:
        for line in lines:
            name, *fields = line.split()
            if name in names and len(fields) > _STEAL:
                ticks += int(fields[_STEAL])
    return ticks / CLOCK_TICKS_PER_S


def first_sibling(cpu: int) -> int:
    """The lowest-numbered hardware thread of the core that this one belongs to."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return int(path.read_text(encoding="ascii").replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu


def _meminfo_kib(field: str) -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0])
    raise OSError(f"/proc/meminfo has no {field}")
