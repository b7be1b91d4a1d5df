"""An NVIDIA GPU as a device: `cuda:0`, or by its name, such as `a100`.

Steps are timed with CUDA events, with one synchronization per batch of steps; the wall clock next
to them shows a step that waits for launches. Memory is what NVML counts for this process, context
and libraries included. Energy is NVML's counter over a window of seconds.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

from trappm.profiler.devices.base import StepDevice
from trappm.profiler.devices.catalogue import has_triton, read_name
from trappm.profiler.devices.gpu.nvml import (
    Gpu,
    NoDriverError,
    NvmlReply,
    all_gpus,
    driver_version,
    visible_gpus,
)
from trappm.profiler.devices.gpu.sensors import PERIOD_S, GpuWatch, Neighbours
from trappm.profiler.errors import DeviceError, one_line
from trappm.profiler.host import procfs
from trappm.profiler.host.environment import GPU_VERSION, host_facts
from trappm.profiler.records import Configuration, Execution, Protocol
from trappm.profiler.steps.meter import Mark, MarkedStep, MemoryReading, Window

if TYPE_CHECKING:
    import torch
    from torch.autograd.profiler_util import FunctionEvent


_EVENT_BATCH = 64
"""Steps between two synchronizations, which bounds how far Python runs ahead of the GPU."""

_MIB = 2**20

TRACED = "CUDA"
"""Activity of Kineto whose events are kernels."""

_CONTEXT_MIB = 1500
"""More than any context with its libraries takes in addition to torch's memory.

On an H100 they take 760 MiB.
"""
_SAME_MIB = 64
"""Largest change of the memory outside of torch in a window without other processes."""
_NEARLY_FULL = 0.8
"""Share of the GPU that torch has reserved at the peak."""
_TICK_TIMEOUT_S = 0.25
"""More than twice the refresh period of the meters of these cards."""

_PAUSES = 8
_MAX_PAUSE_S = 0.025
"""Longest pause of a window's eight.

The power sensors of A100 and H100 see 25 ms of each 100 ms. Pauses of up to 25 ms shift the steps
over the whole period (Yang, Adamek and Armour, "Part-time power measurements", SC 2024).
"""
_CLOCK_SM = 1  # of nvml.h

_PROCESS_MEMORY = "nvml process memory"
_ENERGY = "nvmlDeviceGetTotalEnergyConsumption"
_ABOVE_BASELINE = "nvml device memory above its baseline"


class CudaDevice(StepDevice):
    """One GPU or MIG instance, identified by its UUID."""

    uses_host_memory = False
    min_warmup_s = 0.5  # an idle GPU takes a while to raise its clocks

    @classmethod
    def local_keys(cls) -> list[str]:
        """Return the short names of the usable GPUs; none without GPU or driver."""
        try:
            return sorted({gpu.short_key for gpu in visible_gpus() if gpu.failure is None})
        except DeviceError:
            return []

    @classmethod
    def local_failures(cls) -> list[str]:
        """Return why GPUs cannot be used: lost, or a broken driver."""
        try:
            return [gpu.failure for gpu in visible_gpus() if gpu.failure is not None]
        except NoDriverError:
            return []
        except DeviceError as error:
            return [str(error)]

    def __init__(self, key: str, *, rank: int = 0) -> None:
        """Open the GPU of this key; `rank` chooses among several of one name."""
        super().__init__(key)
        gpus = visible_gpus()
        ordinal = re.fullmatch(r"cuda:(\d{1,3})", key)
        if ordinal is not None:
            matches = gpus[int(ordinal[1]) : int(ordinal[1]) + 1]
        else:
            matches = [gpu for gpu in gpus if read_name(key).may_be(read_name(gpu.name))]
        if rank >= len(matches):
            failures = [gpu.failure for gpu in gpus if gpu.failure is not None]
            few = f"only {len(matches)} of the GPUs here have this name"
            what = few if matches else "no GPU here has this number or name"
            raise DeviceError("; ".join([what, *failures]))
        self._gpu: Gpu = matches[rank]
        if self._gpu.failure is not None:
            raise DeviceError(self._gpu.failure)
        memory, why = self._gpu.memory()
        if memory is None:
            raise DeviceError(f"{self._gpu.name} does not report its memory ({why})")
        self._total_mib = self._capacity_mib = float(memory.total / _MIB)
        # Instances of one GPU share its power budget and memory bus.
        self.lock_name = f"gpu-{(self._gpu.board or self._gpu).uuid}"
        self._wall_ms: list[float] = []
        self._paused_s = 0.0

    def environment(self) -> dict[str, Any]:
        import torch

        gpu = self._gpu
        answers = {
            "device_power_limit_w": gpu.ask("nvmlDeviceGetEnforcedPowerLimit"),
            "ecc": gpu.ask("nvmlDeviceGetEccMode"),
            "mig": gpu.ask("nvmlDeviceGetMigMode"),
            "persistence": gpu.ask("nvmlDeviceGetPersistenceMode"),
            # What a user has set; a lower one makes another device of it.
            "device_clock_mhz": gpu.ask("nvmlDeviceGetApplicationsClock", _CLOCK_SM),
            "compute_capability": gpu.ask("nvmlDeviceGetCudaComputeCapability"),
        }
        facts = {name: answer.value for name, answer in answers.items()}
        limit_mw = facts["device_power_limit_w"]
        if limit_mw is not None:
            facts["device_power_limit_w"] = limit_mw / 1000
        host = host_facts()
        return {
            **host,
            **facts,
            "measuring_version": GPU_VERSION,
            "host_cpu": host["cpu_model"],
            "ecc_enabled": None if facts["ecc"] is None else bool(facts["ecc"][0]),
            "untold": {name: a.missing for name, a in answers.items() if a.missing is not None},
            "device": self.key,
            "device_name": gpu.name,
            "device_uuid": gpu.uuid,
            "device_memory_mib": self._total_mib,
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "tf32": _tf32(facts["compute_capability"]),
            "cudnn_benchmark": False,
        }

    def prepare(self) -> dict[str, Any]:
        # NVML answers the process that initialized it, not its forks.
        gpus = [gpu for gpu in all_gpus() if gpu.failure is None]
        opened = next((gpu for gpu in gpus if gpu.uuid == self._gpu.uuid), None)
        if opened is None:
            raise DeviceError(f"{self._gpu.name} ({self._gpu.uuid}) no longer answers NVML")
        self._gpu = opened
        # Any process that NVML sees before our context exists is somebody else's.
        self._neighbours = Neighbours(self._gpu)
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["CUDA_VISIBLE_DEVICES"] = self._gpu.uuid
        boards = list(dict.fromkeys(gpu.board or gpu for gpu in gpus))
        cores = share_of_cores(self._gpu.board or self._gpu, boards, os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores)  # before any thread is started
        quota = procfs.cpu_quota()
        threads = min(len(cores), math.floor(quota / len(boards))) if quota else len(cores)
        import torch

        if not torch.cuda.is_available():
            raise DeviceError(f"torch {torch.__version__} cannot use CUDA on {self._gpu.name}")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        properties = torch.cuda.get_device_properties(0)
        if str(properties.uuid) not in _bare_uuids(self._gpu):
            raise DeviceError(f"CUDA opened {properties.uuid} where NVML means {self._gpu.uuid}")
        self._capacity_mib = properties.total_memory / _MIB  # less than NVML's: what can be had
        # PyTorch's own default. Settings of the environment are in `switches`.
        torch.backends.cudnn.benchmark = False
        try:
            torch.ones(1, device=self.torch_device).add_(1).cpu()
        except RuntimeError as error:  # no kernel for this GPU in this torch, say
            raise DeviceError(
                f"torch {torch.__version__} cannot compute on {self._gpu.name}: {one_line(error)}"
            ) from error
        torch.cuda.empty_cache()
        # Ray leaves a process one thread, and a large model is minutes of random numbers.
        torch.set_num_threads(max(1, threads))
        used, _ = self._process_bytes()
        return {
            "threads": torch.get_num_threads(),
            "pinned_cores": cores,
            "cpu_quota": quota,
            # Of runs too that end before their memory is read; the same as theirs, most likely.
            "memory_method": _PROCESS_MEMORY if used is not None else _ABOVE_BASELINE,
            "foreign_gpu_processes": self._neighbours.count_before,
            "gpu_memory_in_use_before_mib": self._neighbours.mib_before,
        }

    def refusal(self, configuration: Configuration) -> str | None:
        import torch

        if configuration.precision.needs_bf16 and not torch.cuda.is_bf16_supported(
            including_emulation=False
        ):
            return f"{self._gpu.name} has no bf16 arithmetic"
        if configuration.execution is Execution.COMPILE and not has_triton(
            torch.cuda.get_device_capability(), configuration.precision
        ):
            return (
                f"Triton has no {configuration.precision} kernels for {self._gpu.name}, so "
                "torch.compile is not measured; it is eager, or in fp32 from capability 7.0 on"
            )
        return None

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cuda", 0)  # the only one that this process sees

    @property
    def capacity_mib(self) -> float:
        return self._capacity_mib

    def memory_limits_mib(self) -> dict[str, float]:
        import torch

        if self._neighbours.others_remark() is None:
            return {"capacity": self.capacity_mib}
        free, _ = torch.cuda.mem_get_info()
        available_mib = (free + torch.cuda.memory_reserved()) / _MIB
        return {"capacity": available_mib, "device_memory": self.capacity_mib}

    def is_nearly_full(self) -> bool:
        import torch

        return torch.cuda.max_memory_reserved() / _MIB > _NEARLY_FULL * self.capacity_mib

    def time_steps(self, step: Callable[[], None], count: int) -> list[float]:
        samples_ms: list[float] = []
        while len(samples_ms) < count:
            batch = min(_EVENT_BATCH, count - len(samples_ms))
            begin = time.perf_counter()
            samples_ms += between_events(functools.partial(repeat, step, batch), step)
            self._wall_ms.append((time.perf_counter() - begin) * 1000 / (batch + 1))
        return samples_ms

    def time_parts(self, step: MarkedStep) -> list[float]:
        return between_events(step, lambda: step(lambda: None))

    def device_time_ms(self, step: Callable[[], None]) -> tuple[float | None, str | None]:
        import torch
        from torch.profiler import profile

        try:
            with profile(activities=[getattr(torch.profiler.ProfilerActivity, TRACED)]) as trace:
                step()
                torch.cuda.synchronize()
            sum_ms = sum_of_kernels_ms(trace.events())
        except RuntimeError as error:  # no memory for its buffers, or another profiler runs
            return None, f"Kineto: {one_line(error)}"
        return (sum_ms, None) if sum_ms else (None, "Kineto has seen no kernel")

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
        memory, why = self._gpu.memory()
        if memory is None:
            missing["device_used"] = str(why)
        else:
            detail["device_used"] = memory.used / _MIB
        used, why = self._process_bytes()
        if used is not None:
            detail["process_used"] = used / _MIB
            peak_mib, method = detail["process_used"] + given_back, _PROCESS_MEMORY
        else:
            missing["process_used"] = str(why)
            above_mib, why = self._above_baseline(memory)
            if above_mib is None:
                missing["memory_mib"] = f"{missing['process_used']}; {why}"
                return MemoryReading(
                    peak_mib=None, method="none", detail_mib=detail, missing=missing
                )
            peak_mib, method = above_mib + given_back, _ABOVE_BASELINE
        return MemoryReading(peak_mib=peak_mib, method=method, detail_mib=detail, missing=missing)

    def _process_bytes(self) -> tuple[int | None, str | None]:
        """Return this process's bytes on the GPU by NVML, or why they are implausible."""
        import torch

        used, why = self._neighbours.own_bytes()
        reserved = torch.cuda.memory_reserved()
        if used is not None and used <= reserved:  # a context alone takes more than nothing
            return None, (
                f"NVML reports {used / _MIB:.0f} MiB of this process, of which torch alone has "
                f"{reserved / _MIB:.0f} MiB"
            )
        return used, why

    def _above_baseline(self, memory: Any) -> tuple[float | None, str | None]:
        """Return the memory in use above the baseline in MiB, or why it is not only ours."""
        import torch

        before = self._neighbours.used_before
        if memory is None or before is None:
            return None, "NVML does not report the memory of the GPU"
        others = self._neighbours.why_processes_unknown() or self._neighbours.others_remark()
        if others is not None:
            return None, others
        above_mib = (memory.used - before) / _MIB
        if above_mib - torch.cuda.memory_reserved() / _MIB > _CONTEXT_MIB:
            return None, f"{above_mib:.0f} MiB of the GPU came into use, too much to be ours alone"
        return above_mib, None

    def _outside_torch_mib(self) -> tuple[float | None, str | None]:
        """Return the memory of the GPU in use that torch has not reserved, or why it is unknown."""
        import torch

        memory, why = self._gpu.memory()
        if memory is None:
            return None, why
        return (memory.used - torch.cuda.memory_reserved()) / _MIB, None

    def power_window_s(self, protocol: Protocol) -> float:
        return protocol.power_window_s

    def open_window(self, step: Callable[[], None], *, is_metered: bool = True) -> None:
        self._wall_ms.clear()
        self._paused_s = 0.0
        self._watch = GpuWatch(self._gpu)
        self._outside_before_mib, _ = self._outside_torch_mib()
        # One thread launches the kernels of a step, wherever on this host it runs.
        self._lost_time = procfs.LostTime(os.sched_getaffinity(0), threads=1)
        self._energy_mj = self._at_tick(step) if is_metered else self._gpu.ask(_ENERGY)
        self._begin = time.perf_counter()

    def fill_window(self, step: Callable[[], None], count: int, pauses: random.Random) -> None:
        parts = min(_PAUSES, count)
        for part in range(parts):
            self.time_steps(step, count // parts + (part < count % parts))
            begin = time.perf_counter()
            time.sleep(pauses.uniform(0, _MAX_PAUSE_S))
            self._paused_s += time.perf_counter() - begin

    def run_to_tick(self, step: Callable[[], None]) -> None:
        self._at_tick(step)

    def close_window(self) -> Window:
        seconds = time.perf_counter() - self._begin
        energy_mj = self._gpu.ask(_ENERGY)
        lost = self._lost_time.facts()
        self._watch.stop()
        watch = self._watch
        disturbances = [f"{what} of the GPU" for what in watch.slowdowns()]
        if watch.failure is not None:
            disturbances.append(f"the GPU's sensors failed during it ({watch.failure})")
        seen, unlisted = watch.processes(), self._neighbours.hidden_processes_remark()
        foreign = None if seen is None else self._neighbours.count(seen)
        if foreign:
            disturbances.append(f"{foreign} other processes on the GPU")
        if unlisted is not None:
            disturbances.append(unlisted)
        outside_mib, why = self._outside_torch_mib()
        before_mib = self._outside_before_mib
        if outside_mib is None or before_mib is None:
            # Without a GPU that reports its memory, as all do at the start, no sensor is reliable.
            disturbances.append(f"the GPU no longer reported its memory ({why or 'for a while'})")
        elif abs(outside_mib - before_mib) > _SAME_MIB:
            disturbances.append(
                f"the memory of the GPU outside of torch changed by {outside_mib - before_mib:.0f} "
                "MiB"
            )
        missing = watch.missing
        if seen is not None and foreign is None:
            missing["foreign_gpu_processes"] = "NVML lists no process on the GPU, not even ours"
        energy_j, why = _joules(self._energy_mj, energy_mj)
        method = "nvml total energy counter" if energy_j is not None else None
        if energy_j is None and watch.failure is None and watch.mean_power_w is not None:
            energy_j = watch.mean_power_w * seconds
            meter = "nvml instant power" if watch.power_is_instant else "nvml power"
            method = f"{meter}, polled every {PERIOD_S:g} s ({why})"
        wall_ms = sorted(self._wall_ms)[len(self._wall_ms) // 2] if self._wall_ms else None
        return Window(
            seconds=seconds - self._paused_s,  # what it took in the pauses counts as the steps'
            energy_j=energy_j,
            energy_missing=why if energy_j is None else None,
            lost_share=lost["lost_cpu_share"],
            disturbances=tuple(disturbances),
            facts={
                **watch.facts(),
                **lost,
                "wall_step_time_ms": wall_ms,
                "power_method": method,
                "paused_s": self._paused_s,
                "foreign_gpu_processes": foreign,
            },
            missing=missing,
        )

    def _at_tick(self, step: Callable[[], None]) -> NvmlReply:
        """Return the energy counter when it has moved, or after a timeout.

        Steps keep the GPU as busy as it is in the window.
        """
        import torch

        first = latest = self._gpu.ask(_ENERGY)
        deadline = time.perf_counter() + _TICK_TIMEOUT_S
        while first.value is not None and latest == first and time.perf_counter() < deadline:
            step()
            torch.cuda.synchronize()
            latest = self._gpu.ask(_ENERGY)
        return latest


def _tf32(capability: tuple[int, int] | None) -> str | None:
    """Return where TF32 is used in `fp32`; it exists since Ampere."""
    if capability is None:
        return None
    return "convolutions only" if capability[0] >= 8 else "not available"


def _joules(before: NvmlReply, after: NvmlReply) -> tuple[float | None, str | None]:
    """Return the energy between two readings of the counter in mJ, or why it is unknown."""
    if before.value is None or after.value is None:
        return None, before.missing or after.missing
    if after.value < before.value:
        return None, f"the energy counter fell from {before.value} to {after.value} mJ"
    if after.value == before.value:
        return None, f"the energy counter stood still at {after.value} mJ"
    return (after.value - before.value) / 1000, None


def _bare_uuids(gpu: Gpu) -> set[str]:
    """Return the UUIDs that CUDA may report for this GPU or instance, without NVML's prefix."""
    uuids = {gpu.uuid, gpu.board.uuid if gpu.board else gpu.uuid}
    return {uuid.removeprefix("GPU-").removeprefix("MIG-") for uuid in uuids}


def share_of_cores(gpu: Gpu, gpus: Sequence[Gpu], allowed: Set[int]) -> list[int]:
    """Return the cores for the process that measures on a GPU, so that it disturbs no other.

    GPUs of one NUMA node share its cores equally: all hardware threads of a core are one GPU's.

    Args:
        gpu: One of `gpus`.
        gpus: All GPUs of the machine.
        allowed: Cores that this process may use.
    """
    local = {each.uuid: each.local_cores() & allowed or allowed for each in gpus}
    sharing = [uuid for uuid, cores in local.items() if cores & local[gpu.uuid]]
    threads_of_core: dict[int, list[int]] = {}
    for thread in sorted(local[gpu.uuid]):
        threads_of_core.setdefault(procfs.first_sibling(thread), []).append(thread)
    cores = list(threads_of_core.values())
    place, parts = sharing.index(gpu.uuid), len(sharing)
    share = cores[place * len(cores) // parts : (place + 1) * len(cores) // parts]
    return sorted(itertools.chain(*(share or [cores[place % len(cores)]])))


def sum_of_kernels_ms(events: Iterable[FunctionEvent]) -> float:
    """Return the milliseconds of all kernels, copies and fills in a trace.

    Two that run at once count twice. Ranges that a user has annotated contain kernels.
    """
    return (
        sum(
            event.time_range.elapsed_us()  # type: ignore[no-untyped-call]
            for event in events
            if event.device_type.name == TRACED
            and not event.cpu_children
            and not getattr(event, "is_user_annotation", False)
        )
        / 1000
    )


def repeat(step: Callable[[], None], count: int, mark: Mark) -> None:
    """Run this number of steps, and set the mark after each."""
    for _ in range(count):
        step()
        mark()


def between_events(work: MarkedStep, before: Callable[[], None]) -> list[float]:
    """Return the milliseconds on the GPU between the marks that `work` sets.

    `before` is launched first, so that the GPU is busy when the first event is set. Otherwise the
    first span would include a launch.
    """
    import torch

    events: list[torch.cuda.Event] = []

    def mark() -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        events.append(event)

    before()
    mark()
    work(mark)
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in itertools.pairwise(events)]
