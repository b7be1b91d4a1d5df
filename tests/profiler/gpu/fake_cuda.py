"""CUDA as far as `CudaDevice.prepare` asks torch for it, on a machine that has none.

What is computed "on the GPU" is computed on the CPU. torch's bookkeeping of memory answers what a
test sets in `Cuda`.
"""

import os
import types
from dataclasses import dataclass

import pynvml
import torch

from trappm.profiler.devices import MemoryReading, open_device
from trappm.profiler.devices.gpu.cuda import CudaDevice
from trappm.profiler.records import PAPER
from trappm.profiler.steps.sampling import StepRun, StepSamples, judge

CPU = torch.device("cpu")
CONTEXT_MIB = 400
"""Memory of a context in `cuda_on_cpu`."""


@dataclass
class Cuda:
    """What torch says of the one GPU that the process sees, in MiB."""

    total: int = 40_330
    free: int = 39_000
    max_memory_allocated: int = 1500
    max_memory_reserved: int = 2000
    memory_reserved: int = 1900


def visible_devices():
    """Return NVML's handle and UUID of each GPU or instance that CUDA shows this process."""
    boards = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        board = pynvml.nvmlDeviceGetHandleByIndex(index)
        boards.append([board, *_instances(board)])
    if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        boards.reverse()  # "fastest first", CUDA's own order
    by_name = {str(index): board[0] for index, board in enumerate(boards)}
    by_name |= {pynvml.nvmlDeviceGetUUID(each): each for board in boards for each in board}
    names = [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name in by_name]
    return [(by_name[name], pynvml.nvmlDeviceGetUUID(by_name[name])) for name in names]


def _instances(board):
    if not pynvml.nvmlDeviceGetMigMode(board)[0]:
        return []
    found = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(board)):
        try:
            found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(board, index))
        except pynvml.NVMLError_NotFound:
            continue
    return found


def properties(index, total_mib=40_330):
    uuid = visible_devices()[index][1].removeprefix("GPU-").removeprefix("MIG-")
    return types.SimpleNamespace(uuid=uuid, total_memory=total_mib << 20)


def install_cuda(monkeypatch):
    """Puts it in the place of torch's CUDA."""
    cuda = Cuda()
    replaced = {
        "is_available": lambda: True,
        "get_device_properties": lambda index: properties(index, cuda.total),
        "mem_get_info": lambda: (cuda.free << 20, cuda.total << 20),
    }
    for name in ("init", "empty_cache", "synchronize", "reset_peak_memory_stats"):
        replaced[name] = lambda: None
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_reserved"):
        replaced[name] = lambda name=name: getattr(cuda, name) << 20
    for name, function in replaced.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(CudaDevice, "torch_device", CPU)
    return cuda


def prepared(key, monkeypatch):
    """The device of this key after its own `prepare`, which sets variables for its own process."""
    device = open_device(key)
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("CUDA_DEVICE_ORDER", "")
        device.prepare()
    return device


def window_of(device, meanwhile=lambda: None):
    device.open_window(lambda: None)
    meanwhile()
    return device.close_window()


def window_on(key, monkeypatch, meanwhile=lambda: None):
    install_cuda(monkeypatch)
    return window_of(prepared(key, monkeypatch), meanwhile)


def judged(window):
    """The measurement of twenty steps of 10 ms in this window."""
    memory = MemoryReading(peak_mib=100.0, method="made up")
    samples = StepSamples((10.0,) * 20)
    run = StepRun(samples=samples, window=window, steps_in_window=20, memory=memory)
    return judge(run, PAPER)
