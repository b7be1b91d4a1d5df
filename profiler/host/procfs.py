"""Numbers about this process and this machine from /proc and /sys."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_USER_NICE_SYSTEM = slice(3)
_STEAL = 7
"""Index of the stolen time of a core in /proc/stat."""


def memory_status_kib() -> dict[str, int]:
    """Return the `Vm*` and `Rss*` lines of this process's status in KiB."""
    status = {}
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.startswith(("Vm", "Rss")):
            status[name] = int(value.split()[0])
    return status


_CLEAR_REFS = Path("/proc/self/clear_refs")


def can_reset_peak_resident() -> bool:
    """Return whether the kernel supports `reset_peak_resident`."""
    return os.access(_CLEAR_REFS, os.W_OK)


def reset_peak_resident() -> bool:
    """Reset this process's VmHWM to its resident set; return False if not permitted."""
    try:
        _CLEAR_REFS.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def available_memory_mib(*, proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> float:
    """Return the memory that a new process may take without swapping, in MiB.

    All cgroups around this process count: Slurm and Kubernetes limit a job by its own or an outer
    one.
    """
    rooms = [_meminfo_kib(proc / "meminfo", "MemAvailable") / 1024]
    rooms += [limit - used for limit, used in _memory_limits_mib(proc, cgroups)]
    return max(0.0, min(rooms))


def allowed_memory_mib(*, proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> float:
    """Return the memory of the machine or of the smallest cgroup, in MiB."""
    limits = [limit for limit, _ in _memory_limits_mib(proc, cgroups)]
    return min([_meminfo_kib(proc / "meminfo", "MemTotal") / 1024, *limits])


_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _memory_limits_mib(proc: Path, cgroups: Path) -> Iterator[tuple[float, float]]:
    """Yield the limit and the used memory of each cgroup of this process, in MiB."""
    for group, is_v2 in _groups("memory", proc, cgroups):
        limit, used, reclaimable = _V2 if is_v2 else _V1
        try:
            limit_bytes = int((group / limit).read_text(encoding="ascii"))  # v2 may say "max"
            used_bytes = int((group / used).read_text(encoding="ascii"))
            statistics = (group / "memory.stat").read_text(encoding="ascii").split()
        except (OSError, ValueError):
            continue  # no limit here, or none to be seen
        # The kernel drops what it keeps of files when the group needs the memory.
        sizes = dict(zip(statistics[::2], statistics[1::2], strict=False))
        yield limit_bytes / 2**20, (used_bytes - int(sizes.get(reclaimable, 0))) / 2**20


def cpu_quota(*, proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> float | None:
    """Return the number of cores whose time this process may use, or None without a limit.

    Containers limit the time, not the cores: a process may run on 96 cores for a twelfth of the
    time.
    """
    limits = []
    for group, is_v2 in _groups("cpu", proc, cgroups):
        names = ["cpu.max"] if is_v2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        with contextlib.suppress(OSError, ValueError):  # no limit here: "max", or no such file
            words = " ".join((group / name).read_text(encoding="ascii") for name in names).split()
            quota_us, period_us = map(int, words)
            if quota_us > 0:  # v1 has -1 without a limit
                limits.append(quota_us / period_us)
    return min(limits, default=None)


def _groups(controller: str, proc: Path, cgroups: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the cgroups of this controller around this process, and whether they are of v2."""
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controller if controllers else cgroups
        # In a container the name is the host's and the folder not there; the root's files are ours.
        group = root / name.lstrip("/")
        yield group, not controllers
        while group != root:
            group = group.parent
            yield group, not controllers


def total_memory_mib() -> float:
    return _meminfo_kib(Path("/proc/meminfo"), "MemTotal") / 1024


def kernel_oom_kills() -> int:
    """Return the number of OOM kills on this machine, or 0 if unavailable."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0  # a sandbox such as gVisor has no such file
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def run_queue_waits_ns(tasks: str = "/proc/self/task") -> dict[str, int]:
    """Return how long each thread of this process has been ready to run without a core.

    Returns:
        Nanoseconds by thread id; empty where the kernel keeps no scheduler statistics.
    """
    waits = {}
    for thread in os.listdir(tasks):
        # A thread may end between the listing and the reading.
        with contextlib.suppress(OSError, IndexError), open(f"{tasks}/{thread}/schedstat") as file:
            waits[thread] = int(file.read().split()[1])
    return waits


def run_queue_wait_s() -> float | None:
    """Return the seconds that all threads of this process waited for cores; None if unknown."""
    waits_ns = run_queue_waits_ns()
    return sum(waits_ns.values()) / 1e9 if waits_ns else None


def lost_ms(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """Estimate the time that a computation lost because its threads waited for cores.

    Threads of a parallel computation wait for each other, so it loses at least the longest wait.
    If the second-longest wait overlaps the longest one, it adds nothing; if not, all of it. Half of
    it is added.

    Args:
        before: Waits of each thread when the computation began, from `run_queue_waits_ns`.
        after: Waits of each thread when it ended.
    """
    waits = sorted((now - before.get(thread, 0) for thread, now in after.items()), reverse=True)
    longest, second, *_ = [*waits, 0, 0]
    return (longest + second / 2) / 1e6


def stolen_cpu_s(cores: Iterable[int]) -> float:
    """Return the seconds that a hypervisor took from these cores since the machine started."""
    return _core_seconds(cores, slice(_STEAL, _STEAL + 1))


def busy_cpu_s(cores: Iterable[int]) -> float:
    """Return the seconds in which these cores ran any process since the machine started."""
    return _core_seconds(cores, _USER_NICE_SYSTEM)


def _core_seconds(cores: Iterable[int], kinds: slice) -> float:
    names = {f"cpu{core}" for core in cores}
    ticks = 0
    with open("/proc/stat", encoding="ascii") as lines:
        for line in lines:
            name, *fields = line.split()
            if name in names:
                ticks += sum(map(int, fields[kinds]))
    return ticks / CLOCK_TICKS_PER_S


class LostTime:
    """Processor time that this process had to wait for since the object was created.

    Args:
        cores, threads: Cores that the process may use, and number of threads that run at once.
        has_helpers: Whether more threads than cores wait for each other. Then the time that other
            processes had on the cores counts, by the kernel's clock ticks.
    """

    def __init__(self, cores: Iterable[int], threads: int, *, has_helpers: bool = False) -> None:
        self._cores = [*cores]
        self._threads = threads
        self._has_helpers = has_helpers
        self._others_s = self._others()
        self._stolen_s = stolen_cpu_s(self._cores)
        self._waited_s = run_queue_wait_s()
        self._others_of_host_s = self._others_of_host()
        self._switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        self._begin = time.perf_counter()

    def facts(self) -> dict[str, float | int | None]:
        """Return facts for the environment; `lost_cpu_share` is None if unavailable."""
        seconds = time.perf_counter() - self._begin
        waited_s = run_queue_wait_s()
        stolen_s = stolen_cpu_s(self._cores) - self._stolen_s
        stolen_share = stolen_s / (seconds * len(self._cores))
        lost_share = None
        others_of_host_s = max(0.0, self._others_of_host() - self._others_of_host_s)
        if self._has_helpers:
            others_s = max(0.0, self._others() - self._others_s)
            lost_share = others_s / (seconds * len(self._cores)) + stolen_share
        elif waited_s is not None and self._waited_s is not None:
            lost_share = (waited_s - self._waited_s) / (seconds * self._threads) + stolen_share
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        return {
            "lost_cpu_share": lost_share,
            "stolen_cpu_s": stolen_s,
            "stolen_cpu_share": stolen_share,
            "others_cpu_share": others_of_host_s / (seconds * (os.cpu_count() or 1)),
            "involuntary_context_switches": switches - self._switches,
        }

    def _others(self) -> float:
        """Return the seconds of its cores that other processes used."""
        return busy_cpu_s(self._cores) - _own_cpu_s()

    def _others_of_host(self) -> float:
        """Return the seconds of all cores that other processes used."""
        return busy_cpu_s(range(os.cpu_count() or 1)) - _own_cpu_s()


def _own_cpu_s() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


def first_sibling(cpu: int) -> int:
    """Return the lowest-numbered hardware thread of this thread's core."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return int(path.read_text(encoding="ascii").replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu


def _meminfo_kib(path: Path, field: str) -> int:
    with path.open(encoding="ascii") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0])
    raise OSError(f"{path} has no {field}")
