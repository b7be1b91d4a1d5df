"""Devices of this machine by key: `cpu-2t`, `cuda:0`, or a GPU's name such as `a100`.

A key begins with the kind of the device, up to the first `:` or `-`; any other key is the name of a
GPU. A new kind is a subclass of `Device` or `StepDevice` and an entry point of the group
`trappm.devices` (docs/own_device.md). Extensions add kinds with several ranks in their module
`device_kinds`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from trappm.profiler.devices.base import Device, StepDevice
from trappm.profiler.devices.catalogue import nearest_device, rank_key
from trappm.profiler.errors import DeviceError
from trappm.profiler.extensions import extension_modules
from trappm.profiler.steps.meter import Findings, MemoryReading, Window

__all__ = [
    "Device",
    "Findings",
    "MemoryReading",
    "StepDevice",
    "Window",
    "local_devices",
    "local_failures",
    "meant_device",
    "open_device",
]

_GROUP = "trappm.devices"

_KINDS = {
    "cpu": "trappm.profiler.devices.cpu:CpuDevice",
    "cuda": "trappm.profiler.devices.gpu.cuda:CudaDevice",
    "replay": "trappm.profiler.devices.replay:ReplayDevice",
    "simulated": "trappm.profiler.devices.simulated:SimulatedDevice",
}


def open_device(key: str) -> Device:
    """Return the device of this key, without using it or importing torch.

    Raises:
        DeviceError: This machine has no such device; the message lists its devices.
    """
    kinds = _kinds()
    try:
        return _load(kinds.get(_kind(key), kinds["cuda"]))(key)
    except DeviceError as error:
        meant = meant_device(key)
        raise DeviceError(
            f"device {key!r} cannot be used: {error}; this machine has {', '.join(local_devices())}"
            + (f"; did you mean {meant!r}?" if meant else "")
        ) from error


def meant_device(key: str, offered: Iterable[str] = ()) -> str | None:
    """Return the device that a misspelled key probably means; None for a plausible key.

    Args:
        key: Key of a device, perhaps of another machine.
        offered: Keys of devices of other machines.
    """
    if _kind(key) in _kinds().keys() - {"simulated"}:
        return None
    return nearest_device(key, {*local_devices(), *offered})


def local_devices() -> list[str]:
    """Return the keys of this machine's devices."""
    keys = []
    for entry in _kinds().values():
        with contextlib.suppress(DeviceError):  # a broken kind says so when it is asked for
            keys += _load(entry).local_keys()
    return keys


def local_failures() -> list[str]:
    """Return one line for each device of this machine that cannot be used."""
    failures = []
    for entry in _kinds().values():
        with contextlib.suppress(DeviceError):  # as above
            failures += _load(entry).local_failures()
    return failures


def _kind(key: str) -> str:
    if rank_key(key).ranks > 1:
        return "ranks"
    return re.split("[:-]", key, maxsplit=1)[0]


def _kinds() -> dict[str, EntryPoint]:
    """Return the entry point of each kind of device; built-in kinds cannot be replaced."""
    classes = dict(_KINDS)
    for extension in extension_modules("device_kinds"):
        classes |= extension.KINDS
    ours = {kind: EntryPoint(kind, value, _GROUP) for kind, value in classes.items()}
    theirs = {entry.name: entry for entry in entry_points(group=_GROUP)}
    return ours | {kind: entry for kind, entry in theirs.items() if kind not in ours}


def _load(entry: EntryPoint) -> type[Device]:
    try:
        loaded = entry.load()
    except (ImportError, AttributeError) as error:
        raise DeviceError(f"the device kind {entry.name!r} cannot be loaded: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Device)):
        raise DeviceError(f"the device kind {entry.name!r} is {entry.value}, which is not a Device")
    return loaded
