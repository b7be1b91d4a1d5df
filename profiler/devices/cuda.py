"""An NVIDIA GPU as a device: `cuda:0`, or by its name, such as `a100`.

Steps are timed with CUDA events around whole steps and one synchronisation at the end of a batch of
steps; the wall clock beside them shows a step that waits for launches rather than for the GPU.
Memory is what NVML counts for this process, context and libraries included: what the step takes
away from everybody else. Energy is NVML's counter over a window of seconds.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from profiler.devices.base import MemoryReading, StepDevice, Window
from profiler.devices.nvml import Gpu, driver_version, visible_gpus
from profiler.environment import host_facts
from profiler.errors import DeviceError

if TYPE_CHECKING:
    import torch

_SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""NVML's clock event reasons that spoil a sample; a software power cap is normal under load."""


class CudaDevice(StepDevice):
    """One GPU, known by its UUID."""

    min_power_window_s = 2.0  # the counter is refreshed about every 100 ms

    @classmethod
    def local_keys(cls) -> list[str]:
        """The short names of the GPUs that this process may use; none without GPU or driver."""
        try:
            return sorted({gpu.short_key for gpu in visible_gpus()})
        except DeviceError:
            return []

    def __init__(self, key: str) -> None:
        gpus = visible_gpus()
        ordinal = re.fullmatch(r"cuda:(\d{1,3})", key)
        if ordinal is not None:
            matches = gpus[int(ordinal[1]) : int(ordinal[1]) + 1]
        else:
            matches = [gpu for gpu in gpus if gpu.short_key == key]
        if not matches:
            raise DeviceError("no GPU here has this number or name")
        super().__init__(key)
        self._gpu: Gpu = matches[0]
        self.lock_name = f"gpu-{self._gpu.uuid}"
        self._wall_ms: list[float] = []
        self._slowdowns: set[str] = set()

    def environment(self) -> dict[str, Any]:
        import torch

        gpu = self._gpu
        limit_mw = gpu.ask("nvmlDeviceGetEnforcedPowerLimit")
        return {
            **host_facts(),
            "device": self.key,
            "device_name": gpu.name,
            "device_uuid": gpu.uuid,
            "device_memory_mib": self.capacity_mib,
            "device_power_limit_w": None if limit_mw is None else limit_mw / 1000,
            "ecc": gpu.ask("nvmlDeviceGetEccMode"),
            "mig": gpu.ask("nvmlDeviceGetMigMode"),
            "persistence": gpu.ask("nvmlDeviceGetPersistenceMode"),
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "tf32": "convolutions only",
            "cudnn_benchmark": False,
        }

    def prepare(self) -> dict[str, Any]:
        # Any process that NVML sees before our context exists is somebody else's.
        self._foreign = self._processes()
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["CUDA_VISIBLE_DEVICES"] = self._gpu.uuid
        import torch

        if not torch.cuda.is_available():
            raise DeviceError(f"torch {torch.__version__} cannot use CUDA on {self._gpu.name}")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        if uuid != self._gpu.uuid:
            raise DeviceError(f"CUDA opened {uuid} where NVML means {self._gpu.uuid}")
        # PyTorch's own defaults, fixed so that no environment variable changes them.
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cuda.matmul.allow_tf32 = False
        return {"threads": torch.get_num_threads(), "foreign_gpu_processes": len(self._foreign)}

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cuda", 0)  # the only one that this process sees

    @property
    def capacity_mib(self) -> float:
        return float(self._gpu.ask("nvmlDeviceGetMemoryInfo").total / 2**20)

    def time_steps(self, step: Callable[[], None], count: int) -> list[float]:
        import torch

        marks = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(count + 1)
        ]
        begin = time.perf_counter()
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        self._note_slowdowns()  # asked while the GPU still works on the last steps
        torch.cuda.synchronize()
        self._wall_ms.append((time.perf_counter() - begin) * 1000 / count)
        return [marks[i].elapsed_time(marks[i + 1]) for i in range(count)]

    def watch_memory(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()

    def memory(self) -> MemoryReading:
        import torch

        detail = {
            "peak_allocated": torch.cuda.max_memory_allocated() / 2**20,
            "peak_reserved": torch.cuda.max_memory_reserved() / 2**20,
            "device_used": self._gpu.ask("nvmlDeviceGetMemoryInfo").used / 2**20,
            "capacity": self.capacity_mib,
        }
        # In a container NVML shows the host's process ids, so ours is the one that is new.
        processes = self._processes()
        new = processes.keys() - self._foreign.keys()
        mine = os.getpid() if os.getpid() in processes else (new.pop() if len(new) == 1 else None)
        used = None if mine is None else processes[mine]
        if used is not None:
            detail["process_used"] = used / 2**20
        return MemoryReading(
            peak_mib=detail.get("process_used"),
            method="nvml process memory; the caching allocator keeps its peak",
            detail_mib=detail,
            missing={} if used else {"memory_mib": "NVML does not tell this process's memory"},
        )

    def open_window(self) -> None:
        self._wall_ms.clear()
        self._slowdowns.clear()
        self._energy_mj = self._gpu.ask("nvmlDeviceGetTotalEnergyConsumption")
        self._begin = time.perf_counter()

    def close_window(self) -> Window:
        seconds = time.perf_counter() - self._begin
        energy_mj = self._gpu.ask("nvmlDeviceGetTotalEnergyConsumption")
        known = energy_mj is not None and self._energy_mj is not None
        disturbances = [f"{what} of the GPU" for what in sorted(self._slowdowns)]
        strangers = max(len(self._foreign), len(self._processes()) - 1)
        if strangers > 0:
            disturbances.append(f"{strangers} other processes on the GPU")
        wall_ms = sorted(self._wall_ms)[len(self._wall_ms) // 2] if self._wall_ms else None
        return Window(
            seconds=seconds,
            energy_j=(energy_mj - self._energy_mj) / 1000 if known else None,
            energy_missing=None if known else f"{self._gpu.name} has no energy counter",
            disturbances=tuple(disturbances),
            facts={
                "wall_step_time_ms": wall_ms,
                "power_method": "nvml total energy counter" if known else None,
            },
        )

    def _processes(self) -> dict[int, int | None]:
        """Bytes that each process uses on the GPU by process id; None where NVML does not say."""
        processes = self._gpu.ask("nvmlDeviceGetComputeRunningProcesses") or []
        return {process.pid: process.usedGpuMemory for process in processes}

    def _note_slowdowns(self) -> None:
        reasons = self._gpu.ask("nvmlDeviceGetCurrentClocksEventReasons") or 0
        self._slowdowns |= {what for bit, what in _SLOWDOWNS.items() if reasons & bit}
