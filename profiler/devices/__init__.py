"""The devices of this machine by key: `cpu-2t`, `cuda:0`, or a GPU's name such as `a100`.

A new kind of device is one file with one subclass of `Device`, and a line in `open_device`.
"""

from __future__ import annotations

from profiler.devices.base import Device, MemoryReading, Window
from profiler.errors import DeviceError
from profiler.records import is_cpu_device

__all__ = ["Device", "MemoryReading", "Window", "local_devices", "open_device"]


def open_device(key: str) -> Device:
    """The device of this key on this machine; nothing of it is used yet, torch is not imported.

    Raises:
        DeviceError: there is no such device here; the message says which there are.
    """
    from profiler.devices.cpu import CpuDevice
    from profiler.devices.cuda import CudaDevice

    try:
        return CpuDevice(key) if is_cpu_device(key) else CudaDevice(key)
    except DeviceError as error:
        here = ", ".join(local_devices())
        raise DeviceError(
            f"device {key!r} cannot be used: {error}; this machine has {here}"
        ) from error


def local_devices() -> list[str]:
    """Keys of what this machine can offer: numbers of CPU threads, then each GPU by its name."""
    from profiler.devices.cpu import cpu_keys
    from profiler.devices.cuda import gpu_keys

    return [*cpu_keys(), *gpu_keys()]
