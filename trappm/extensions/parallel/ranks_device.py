"""Multi-rank devices that share each step, such as `a100x4` and `cpu-2x1t`.

Each rank has a GPU of the node or a group of its cores. Batch, memory and power are per rank: the
largest memory, and the mean power. The step time is that of the slowest rank. A few additional
steps without communication give the time of each rank alone.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from trappm.profiler.devices.base import Device, StepDevice
from trappm.profiler.devices.catalogue import rank_key
from trappm.profiler.devices.cpu import CpuDevice
from trappm.profiler.devices.gpu.cuda import CudaDevice
from trappm.profiler.devices.gpu.nvml import visible_gpus
from trappm.profiler.errors import DeviceError
from trappm.profiler.records import Configuration, Protocol, is_cpu_device
from trappm.profiler.steps.meter import Findings, Window

if TYPE_CHECKING:
    from trappm.extensions.parallel.rank_processes import RankProcesses, RankRun
    from trappm.profiler.steps.sampling import StepRun


class RanksDevice(Device):
    """Several devices of one kind, each with its own process."""

    processes: RankProcesses
    """Set by `prepare`."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        parts = rank_key(key)
        self.ranks = parts.ranks
        self.strategy = parts.strategy
        self._members: list[StepDevice]
        if is_cpu_device(key):
            self._members = [
                CpuDevice(parts.member, rank=rank, ranks=self.ranks) for rank in range(self.ranks)
            ]
        elif "-mig-" in parts.member:
            raise DeviceError("MIG instances cannot be ranks: NCCL does not support them")
        else:
            self._members = [CudaDevice(parts.member, rank=rank) for rank in range(self.ranks)]
        self.lock_name = self._members[0].lock_name
        self.uses_host_memory = self._members[0].uses_host_memory

    @classmethod
    def local_keys(cls) -> list[str]:
        """Return a key with all cores as ranks, and a key with all GPUs of each kind."""
        cores = len(os.sched_getaffinity(0))
        keys = [f"cpu-{cores}x1t"] if cores > 1 else []
        with contextlib.suppress(DeviceError):  # no GPU or driver
            gpus = Counter(gpu.short_key for gpu in visible_gpus() if gpu.failure is None)
            keys += [f"{name}x{count}" for name, count in sorted(gpus.items()) if count > 1]
        return [key for key in keys if rank_key(key).ranks > 1 and "-mig-" not in key]

    @property
    def lock_names(self) -> tuple[str, ...]:
        # Sorted, so that two processes that share GPUs cannot deadlock.
        return tuple(sorted({name for member in self._members for name in member.lock_names}))

    def environment(self) -> dict[str, Any]:
        each = [member.environment() for member in self._members]
        kinds = {(facts["device_name"], facts.get("device_memory_mib")) for facts in each}
        if len(kinds) > 1:
            names = ", ".join(sorted(str(name) for name, _ in kinds))
            raise DeviceError(f"the GPUs differ ({names}); name one kind, including its memory")
        facts = {
            **each[0],
            "device": self.key,
            "world_size": self.ranks,
            "strategy": self.strategy,
            "collectives": "gloo" if self.uses_host_memory else "nccl",
        }
        if not self.uses_host_memory:
            import torch

            # Canaries compare the same GPUs over time.
            facts["device_uuid"] = "+".join(str(one["device_uuid"]) for one in each)
            if torch.distributed.is_nccl_available():  # else `prepare` reports a CPU-only build
                facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return facts

    def prepare(self) -> dict[str, Any]:
        from trappm.extensions.parallel.rank_processes import RankProcesses  # imports torch

        self.processes = RankProcesses(self._members, self.strategy)
        each = self.processes.prepare()
        facts = dict(each[0])
        if "pinned_cores" in facts:
            facts["pinned_cores"] = [core for one in each for core in one["pinned_cores"]]
        return facts

    @property
    def capacity_mib(self) -> float:
        return self._members[0].capacity_mib

    def memory_limits_mib(self) -> dict[str, float]:
        return self._members[0].memory_limits_mib()

    def measure(
        self, configuration: Configuration, protocol: Protocol, enter: Callable[[str], None]
    ) -> Findings:
        from trappm.profiler.steps.sampling import judge

        results = self.processes.measure(configuration, protocol, enter)
        if isinstance(results, Findings):
            return results
        return judge(_combine_runs(results, shares_meter=self.uses_host_memory), protocol)


def _combine_runs(results: Sequence[RankRun], *, shares_meter: bool) -> StepRun:
    """Combine the runs of all ranks into one.

    Args:
        results: Results of all ranks, rank 0 first.
        shares_meter: True if the energy meter of each rank measures all ranks.
    """
    runs = [result.run for result in results]
    step_ms = [median(run.samples.times_ms) for run in runs]
    alone_ms = [median(result.alone_ms) for result in results if result.alone_ms]
    slowest = runs[step_ms.index(max(step_ms))]
    memory = max((run.memory for run in runs), key=lambda reading: reading.peak_mib or 0.0)
    facts = {
        "rank_step_ms": step_ms,
        "rank_memory_mib": [run.memory.peak_mib for run in runs],
        "rank_alone_ms": alone_ms or None,
        "straggler_ratio": max(alone_ms) / median(alone_ms) if alone_ms else None,
    }
    missing = {} if alone_ms else dict.fromkeys(
        ("rank_alone_ms", "straggler_ratio"), "fsdp cannot run a step without communication"
    )  # fmt: skip
    window = window_of_all([run.window for run in runs], shares_meter=shares_meter)
    return replace(
        runs[0],
        samples=replace(runs[0].samples, times_ms=slowest.samples.times_ms),
        memory=memory,
        window=replace(
            window, facts={**window.facts, **facts}, missing={**window.missing, **missing}
        ),
    )


def window_of_all(windows: Sequence[Window], *, shares_meter: bool) -> Window:
    """Return rank 0's window with the mean energy and the disturbances of all ranks."""
    first = windows[0]
    metered = windows[:1] if shares_meter else windows
    joules = [window.energy_j for window in metered if window.energy_j is not None]
    whole = len(joules) == len(metered)
    missing = next((w.energy_missing for w in metered if w.energy_missing is not None), None)
    lost = [window.lost_share for window in windows if window.lost_share is not None]
    return replace(
        first,
        energy_j=sum(joules) / len(windows) if whole else None,
        energy_missing=missing,
        lost_share=max(lost) if len(lost) == len(windows) else None,
        disturbances=tuple(
            f"rank {rank}: {what}"
            for rank, window in enumerate(windows)
            for what in window.disturbances
        ),
        missing={name: why for window in reversed(windows) for name, why in window.missing.items()},
    )
