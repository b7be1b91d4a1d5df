"""CUDA on the CPU for a whole measuring process: the fork server imports this module after torch.

An event has a time only after a synchronization. The allocator counts the storages of all tensors,
in blocks of 2 MiB that it keeps; NVML's stub counts them with a context of 400 MiB. As with CUDA, a
process that was forked after the context was made has none.
"""

import os
import time
import weakref

import pynvml
import torch
from fake_cuda import CONTEXT_MIB, CPU, properties, visible_devices
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trappm.profiler.devices.gpu import cuda
from trappm.profiler.devices.gpu.cuda import CudaDevice

_MIB = 1 << 20


class Allocator(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.owner, self.handle = None, None
        self.storages, self.used, self.peak, self.reserved = {}, 0, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self.owner is not None:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.count(leaf.untyped_storage())
        return result

    def count(self, storage):
        key = storage._cdata
        if key in self.storages or storage.nbytes() == 0:
            return
        self.storages[key] = storage.nbytes()
        weakref.finalize(storage, self.free, key)
        self.used += storage.nbytes()
        self.peak = max(self.peak, self.used)
        if self.used > self.reserved:
            self.reserved = -(-self.used // (2 * _MIB)) * 2 * _MIB
            self.show()

    def free(self, key):
        self.used -= self.storages.pop(key)

    def show(self):
        """Tell NVML."""
        bytes_used = pynvml.c_ulonglong(self.reserved + CONTEXT_MIB * _MIB)
        pynvml.nvmlLib.stub_use(self.handle, bytes_used)

    def own(self):
        if self.owner != os.getpid():
            raise RuntimeError("CUDA error: initialization error (made in another process)")
        return self


allocator = Allocator()
launched = []


class Event:
    def __init__(self, *, enable_timing):
        assert enable_timing
        self.is_done = False

    def record(self):
        allocator.own()
        self.time = time.perf_counter()
        launched.append(self)

    def elapsed_time(self, later):
        if not (self.is_done and later.is_done):
            raise RuntimeError("CUDA error: device not ready")
        return (later.time - self.time) * 1000


def synchronize():
    allocator.own()
    for event in launched:
        event.is_done = True
    launched.clear()


def init():
    allocator.owner = os.getpid()
    allocator.handle = visible_devices()[0][0]
    allocator.show()


def reset_peak():
    allocator.own().peak = allocator.used


REPLACED = {
    "Event": Event,
    "synchronize": synchronize,
    "is_available": lambda: True,
    "init": init,
    "get_device_properties": properties,
    "empty_cache": lambda: allocator.own() and None,
    "reset_peak_memory_stats": reset_peak,
    "mem_get_info": lambda: (30 << 30, 40 << 30),
    "max_memory_allocated": lambda: allocator.own().peak,
    "max_memory_reserved": lambda: allocator.own().reserved,
    "memory_reserved": lambda: allocator.own().reserved,
    "is_bf16_supported": lambda including_emulation: False,
}
for name, replacement in REPLACED.items():
    setattr(torch.cuda, name, replacement)
CudaDevice.torch_device = CPU
cuda.TRACED = "CPU"  # Kineto's operators on the CPU are its kernels here
allocator.__enter__()
