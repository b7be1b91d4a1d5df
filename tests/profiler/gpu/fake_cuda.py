"""CUDA as far as `CudaDevice.prepare` asks torch for it, on a machine that has none.

What is computed "on the GPU" is computed on the CPU. torch's bookkeeping of memory answers what a
test sets in `Cuda`.
"""

from __future__ import annotations

import os
import types
from dataclasses import dataclass

import torch

from trappm.profiler.devices import open_device
from trappm.profiler.devices.gpu.cuda import CudaDevice

CPU = torch.device("cpu")


@dataclass
class Cuda:
    """What torch says of the one GPU that the process sees, in MiB."""

    total: int = 40_330
    free: int = 39_000
    max_memory_allocated: int = 1500
    max_memory_reserved: int = 2000
    memory_reserved: int = 1900


def install_cuda(monkeypatch):
    """Puts it in the place of torch's CUDA."""
    cuda = Cuda()

    def properties(_):
        uuid = os.environ["CUDA_VISIBLE_DEVICES"].removeprefix("GPU-").removeprefix("MIG-")
        return types.SimpleNamespace(uuid=uuid, total_memory=cuda.total << 20)

    replaced = {
        "is_available": lambda: True,
        "init": lambda: None,
        "get_device_properties": properties,
        "empty_cache": lambda: None,
        "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "mem_get_info": lambda: (cuda.free << 20, cuda.total << 20),
        "max_memory_allocated": lambda: cuda.max_memory_allocated << 20,
        "max_memory_reserved": lambda: cuda.max_memory_reserved << 20,
        "memory_reserved": lambda: cuda.memory_reserved << 20,
    }
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
