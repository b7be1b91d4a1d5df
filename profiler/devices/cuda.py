"""An NVIDIA GPU as a device: `cuda:0`, or by its name, such as `a100`.

Steps are timed with CUDA events around whole steps and one synchronisation at the end of a batch of
steps; the wall clock beside them shows a step that waits for launches rather than for the GPU.
Memory is what NVML counts for this process, context and libraries included: what the step takes
away from everybody else. Energy is NVML's counter over a window of seconds.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from profiler.devices.base import Mark, MarkedStep, MemoryReading, StepDevice, Window
from profiler.devices.gpu_watch import PERIOD_S, GpuWatch
from profiler.devices.nvml import Answer, Gpu, driver_version, visible_gpus
from profiler.environment import host_facts
from profiler.errors import DeviceError
from profiler.records import Configuration, Precision

if TYPE_CHECKING:
    import torch

_EVENT_BATCH = 64
"""Steps between two synchronisations: bounds how far Python may run ahead of the GPU."""

_MIB = 2**20


class CudaDevice(StepDevice):
    """One GPU or MIG instance, known by its UUID."""

    min_power_window_s = 2.0  # the counter is refreshed about every 100 ms

    @classmethod
    def local_keys(cls) -> list[str]:
        """The short names of the GPUs that this process may use; none without GPU or driver."""
        try:
            return sorted({gpu.short_key for gpu in visible_gpus()})
        except DeviceError:
            return []

    def __init__(self, key: str) -> None:
        super().__init__(key)
        gpus = visible_gpus()
        ordinal = re.fullmatch(r"cuda:(\d{1,3})", key)
        if ordinal is not None:
            matches = gpus[int(ordinal[1]) : int(ordinal[1]) + 1]
        else:
            matches = [gpu for gpu in gpus if gpu.short_key == key]
        if not matches:
            raise DeviceError("no GPU here has this number or name")
        self._gpu: Gpu = matches[0]
        memory, why = self._gpu.ask("nvmlDeviceGetMemoryInfo")
        if memory is None:
            raise DeviceError(f"{self._gpu.name} does not tell its memory ({why})")
        self._capacity_mib = float(memory.total / _MIB)
        # Instances of one GPU share its power budget and memory bus.
        self.lock_name = f"gpu-{(self._gpu.board or self._gpu).uuid}"
        self._wall_ms: list[float] = []

    def environment(self) -> dict[str, Any]:
        import torch

        gpu = self._gpu
        answers = {
            "device_power_limit_w": gpu.ask("nvmlDeviceGetEnforcedPowerLimit"),
            "ecc": gpu.ask("nvmlDeviceGetEccMode"),
            "mig": gpu.ask("nvmlDeviceGetMigMode"),
            "persistence": gpu.ask("nvmlDeviceGetPersistenceMode"),
        }
        facts = {name: answer.value for name, answer in answers.items()}
        limit_mw = facts["device_power_limit_w"]
        if limit_mw is not None:
            facts["device_power_limit_w"] = limit_mw / 1000
        return {
            **host_facts(),
            **facts,
            "untold": {name: a.missing for name, a in answers.items() if a.missing is not None},
            "device": self.key,
            "device_name": gpu.name,
            "device_uuid": gpu.uuid,
            "device_memory_mib": self.capacity_mib,
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "tf32": "convolutions only",
            "cudnn_benchmark": False,
        }

    def prepare(self) -> dict[str, Any]:
        # Any process that NVML sees before our context exists is somebody else's.
        self._strangers, untold = self._processes()
        self._used_before = self._gpu.ask("nvmlDeviceGetMemoryInfo")
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["CUDA_VISIBLE_DEVICES"] = self._gpu.uuid
        import torch

        if not torch.cuda.is_available():
            raise DeviceError(f"torch {torch.__version__} cannot use CUDA on {self._gpu.name}")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        opened = str(torch.cuda.get_device_properties(0).uuid)
        if opened not in _bare_uuids(self._gpu):
            raise DeviceError(f"CUDA opened {opened} where NVML means {self._gpu.uuid}")
        # PyTorch's own defaults, fixed so that no environment variable changes them.
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cuda.matmul.allow_tf32 = False
        return {
            "threads": torch.get_num_threads(),
            "foreign_gpu_processes": len(self._strangers) if untold is None else None,
        }

    def refusal(self, configuration: Configuration) -> str | None:
        import torch

        if configuration.precision is Precision.AMP_BF16 and not torch.cuda.is_bf16_supported(
            including_emulation=False
        ):
            return f"{self._gpu.name} has no bf16 arithmetic"
        return None

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cuda", 0)  # the only one that this process sees

    @property
    def capacity_mib(self) -> float:
        return self._capacity_mib

    def time_steps(self, step: Callable[[], None], count: int) -> list[float]:
        samples_ms: list[float] = []
        while len(samples_ms) < count:
            batch = min(_EVENT_BATCH, count - len(samples_ms))
            begin = time.perf_counter()
            samples_ms += _between_events(functools.partial(_repeat, step, batch))
            self._wall_ms.append((time.perf_counter() - begin) * 1000 / batch)
        return samples_ms

    def time_parts(self, step: MarkedStep) -> list[float]:
        return _between_events(step)

    def watch_memory(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()

    def memory(self) -> MemoryReading:
        import torch

        peak_reserved = torch.cuda.max_memory_reserved()
        detail = {
            "peak_allocated": torch.cuda.max_memory_allocated() / _MIB,
            "peak_reserved": peak_reserved / _MIB,
            "capacity": self.capacity_mib,
        }
        missing: dict[str, str] = {}
        # What the caching allocator gave back under pressure has been ours at the peak.
        given_back = (peak_reserved - torch.cuda.memory_reserved()) / _MIB
        memory, why = self._gpu.ask("nvmlDeviceGetMemoryInfo")
        if memory is None:
            missing["device_used"] = str(why)
        else:
            detail["device_used"] = memory.used / _MIB
        used, why = self._own_bytes()
        if used is not None:
            detail["process_used"] = used / _MIB
            peak_mib, method = detail["process_used"] + given_back, "nvml process memory"
        elif memory is not None and self._used_before.value is not None and not self._strangers:
            missing["process_used"] = str(why)
            above = (memory.used - self._used_before.value.used) / _MIB
            peak_mib, method = above + given_back, "nvml device memory above its baseline"
        else:
            missing |= {"process_used": str(why), "memory_mib": str(why)}
            return MemoryReading(peak_mib=None, method="none", detail_mib=detail, missing=missing)
        return MemoryReading(peak_mib=peak_mib, method=method, detail_mib=detail, missing=missing)

    def open_window(self) -> None:
        self._wall_ms.clear()
        self._watch = GpuWatch(self._gpu)
        self._energy_mj = self._gpu.ask("nvmlDeviceGetTotalEnergyConsumption")
        self._begin = time.perf_counter()

    def close_window(self) -> Window:
        seconds = time.perf_counter() - self._begin
        energy_mj = self._gpu.ask("nvmlDeviceGetTotalEnergyConsumption")
        self._watch.stop()
        watch = self._watch
        disturbances = [f"{what} of the GPU" for what in watch.slowdowns()]
        if watch.failure is not None:
            disturbances.append(f"the GPU's sensors failed meanwhile ({watch.failure})")
        foreign = self._foreign_count(watch.processes())
        if foreign:
            disturbances.append(f"{foreign} other processes on the GPU")
        energy_j, why = _joules(self._energy_mj, energy_mj)
        method = "nvml total energy counter" if energy_j is not None else None
        if energy_j is None and watch.failure is None and watch.mean_power_w is not None:
            energy_j = watch.mean_power_w * seconds
            method = f"nvml power, polled every {PERIOD_S:g} s ({why})"
        wall_ms = sorted(self._wall_ms)[len(self._wall_ms) // 2] if self._wall_ms else None
        return Window(
            seconds=seconds,
            energy_j=energy_j,
            energy_missing=why if energy_j is None else None,
            disturbances=tuple(disturbances),
            facts={
                **watch.facts(),
                "wall_step_time_ms": wall_ms,
                "power_method": method,
                "foreign_gpu_processes": foreign,
            },
            missing=watch.missing,
        )

    def _processes(self) -> tuple[dict[int, int | None], str | None]:
        """Bytes that each process uses on the GPU by its id, or why they are not told."""
        processes, why = self._gpu.ask("nvmlDeviceGetComputeRunningProcesses")
        return {process.pid: process.usedGpuMemory for process in processes or []}, why

    def _own_bytes(self) -> tuple[int | None, str | None]:
        """Bytes that this process uses on the GPU, or why they are not told."""
        processes, why = self._processes()
        # In a container NVML shows the host's process ids, so ours is the one that is new.
        new = processes.keys() - self._strangers.keys()
        mine = os.getpid() if os.getpid() in processes else (min(new) if len(new) == 1 else None)
        if mine is None:
            return None, why or f"NVML lists {len(new)} new processes on the GPU, not just ours"
        return processes[mine], "NVML does not tell the memory of a process"

    def _foreign_count(self, seen: set[int] | None) -> int | None:
        """How many of the processes seen on the GPU are not ours; None if NVML tells of none."""
        if seen is None:
            return None
        new = seen - self._strangers.keys()
        return len(seen) - bool(new)  # one of the new is this process


def _joules(before: Answer, after: Answer) -> tuple[float | None, str | None]:
    """Energy between two readings of the counter in mJ, or why it is not known."""
    if before.value is None or after.value is None:
        return None, before.missing or after.missing
    if after.value < before.value:
        return None, f"the energy counter fell from {before.value} to {after.value} mJ"
    if after.value == before.value:
        return None, f"the energy counter stood still at {after.value} mJ"
    return (after.value - before.value) / 1000, None


def _bare_uuids(gpu: Gpu) -> set[str]:
    """The UUIDs by which CUDA may know this GPU or instance, without NVML's prefix."""
    uuids = {gpu.uuid, gpu.board.uuid if gpu.board else gpu.uuid}
    return {uuid.removeprefix("GPU-").removeprefix("MIG-") for uuid in uuids}


def _repeat(step: Callable[[], None], count: int, mark: Mark) -> None:
    for _ in range(count):
        step()
        mark()


def _between_events(work: MarkedStep) -> list[float]:
    """Milliseconds on the GPU between the marks that the work sets, and from its start."""
    import torch

    events: list[torch.cuda.Event] = []

    def mark() -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        events.append(event)

    mark()
    work(mark)
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in itertools.pairwise(events)]
