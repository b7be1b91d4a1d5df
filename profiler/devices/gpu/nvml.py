"""NVIDIA's management library at the boundary: which GPUs a process may use, and their meters.

NVML numbers GPUs by PCI bus whatever CUDA_VISIBLE_DEVICES says, so a GPU is known by its UUID only.
A GPU that is split by MIG is not used itself; its instances are. Nothing here creates a CUDA
context; any process may ask.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.errors import DeviceError

_POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT, in mW, an unsigned int

_MASKS = 32
"""Number of 64-bit masks of cores, enough for 2,048 of them."""

_OF_INSTANCE = frozenset({"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"})
"""Queries of a MIG instance itself; all others go to its board."""
_OF_ALL_INSTANCES = frozenset(
    {"nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage",
     "nvmlDeviceGetFieldValues", "nvmlDeviceGetUtilizationRates"}
)  # fmt: skip
"""Queries that a board answers for all its instances together."""

_OTHERWISE = {
    "nvmlDeviceGetCurrentClocksEventReasons": "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetComputeRunningProcesses": "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetTemperature": "nvmlDeviceGetTemperatureV",
}
"""Replacements in drivers before 535, before 510, and after NVML 13's deprecations."""

_DEPRECATED = 26
"""NVML's code for a removed function; older packages have no class for it."""


class NoDriverError(DeviceError):
    """Missing NVIDIA driver or Python package; most likely there is no GPU."""


class NvmlReply(NamedTuple):
    """Result of an NVML query, or why there is none."""

    value: Any
    missing: str | None


@dataclass(frozen=True)
class Gpu:
    """A GPU or MIG instance that this process may use."""

    uuid: str
    name: str
    handle: Any = field(compare=False)
    """Handle of NVML: a pointer, which can be neither compared nor hashed."""
    board: Gpu | None = None
    """GPU of a MIG instance; None for a whole GPU."""
    failure: str | None = None
    """Why NVML cannot query it, such as a lost GPU."""

    @property
    def short_key(self) -> str:
        """`a100` for NVIDIA A100-SXM4-40GB, `a100-mig-1g.5gb` for a part of it."""
        return read_name(self.name).key

    def ask(self, function: str, *arguments: Any) -> NvmlReply:
        """Return the result of an NVML query on this GPU, or the reason why there is none."""
        handle = self.handle
        if self.board is not None and function not in _OF_INSTANCE:
            if function in _OF_ALL_INSTANCES:
                return NvmlReply(None, "a MIG instance shares this meter with its whole GPU")
            handle = self.board.handle
        why = None
        for name in filter(None, (function, _OTHERWISE.get(function))):
            try:
                return _query(handle, name, *arguments)
            except _AbsentError as error:
                why = why or str(error)
        return NvmlReply(None, why)

    def power_instant_mw(self) -> NvmlReply:
        """Return the instantaneous power; NVML's usual one may be a mean of the last second."""
        values, why = self.ask("nvmlDeviceGetFieldValues", [_POWER_INSTANT])
        if values is None:
            return NvmlReply(None, why)
        if values[0].nvmlReturn != 0:
            return NvmlReply(
                None, f"NVML on the field {_POWER_INSTANT}: code {values[0].nvmlReturn}"
            )
        return NvmlReply(int(values[0].value.uiVal), None)

    def local_cores(self) -> set[int]:
        """Return the numbers of the cores of the GPU's NUMA node; empty if unknown."""
        masks, _ = self.ask("nvmlDeviceGetCpuAffinity", _MASKS)
        return {
            place * 64 + bit
            for place, mask in enumerate(masks or ())
            for bit in range(64)
            if mask >> bit & 1
        }

    def memory(self) -> NvmlReply:
        """Return the memory in bytes as `total` and `used`; since driver 510 without `reserved`."""
        import pynvml

        version = getattr(pynvml, "nvmlMemory_v2", None)
        answer = NvmlReply(None, None)
        if version is not None:
            answer = self.ask("nvmlDeviceGetMemoryInfo", version)
        return answer if answer.value is not None else self.ask("nvmlDeviceGetMemoryInfo")


class _AbsentError(Exception):
    """A function that the driver or its Python package does not have."""


def _query(handle: Any, function: str, *arguments: Any) -> NvmlReply:
    """Query NVML.

    Raises:
        _AbsentError: The driver has no such function.
    """
    import pynvml

    try:
        return NvmlReply(getattr(pynvml, function)(handle, *arguments), None)
    except (AttributeError, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLLibraryMismatchError):
        raise _AbsentError(
            f"the driver, or the installed nvidia-ml-py, has no {function}"
        ) from None
    except pynvml.NVMLError as error:
        if error.value == _DEPRECATED:
            raise _AbsentError(f"the driver has {function} no more (deprecated)") from None
        return NvmlReply(None, f"NVML on {function}: {error}")


def visible_gpus() -> list[Gpu]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, in its order.

    Raises:
        DeviceError: NVML is missing, or CUDA_VISIBLE_DEVICES names a missing GPU.
    """
    return select_visible(all_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def select_visible(gpus: list[Gpu], visible: str | None) -> list[Gpu]:
    """Return the GPUs of a value of CUDA_VISIBLE_DEVICES: indices by PCI bus, or UUIDs.

    Args:
        gpus: All GPUs, as `all_gpus` lists them.
        visible: The value.

    Raises:
        DeviceError: It names a missing GPU, or one that is split by MIG.
    """
    if visible is None:
        return gpus
    boards = list(dict.fromkeys(gpu.board or gpu for gpu in gpus))
    chosen = []
    for entry in filter(None, (part.strip() for part in visible.split(","))):
        if entry == "-1":
            break  # CUDA ignores whatever follows an invalid index
        if entry.isdigit():
            matches = boards[int(entry) : int(entry) + 1]
        else:
            matches = [gpu for gpu in dict.fromkeys(boards + gpus) if gpu.uuid.startswith(entry)]
        if len(matches) != 1:
            raise DeviceError(
                f"CUDA_VISIBLE_DEVICES={visible!r} names {entry!r}, which is not one GPU here"
            )
        if matches[0] not in gpus:
            raise DeviceError(
                f"CUDA_VISIBLE_DEVICES={visible!r} names {entry!r}, which is split by MIG; name "
                "one of its instances by UUID"
            )
        chosen += matches
    return chosen


def all_gpus() -> list[Gpu]:
    """Return the GPUs of this machine by PCI bus; MIG instances in place of a split GPU.

    A GPU that NVML cannot query is listed with its `failure`.

    Raises:
        NoDriverError: NVML is not installed.
        DeviceError: NVML does not work, as with a driver that is not loaded.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except ImportError as error:
        raise NoDriverError("the package nvidia-ml-py is not installed") from error
    except pynvml.NVMLError_LibraryNotFound as error:
        raise NoDriverError(f"NVML finds no GPU: {error}") from error
    except pynvml.NVMLError as error:
        raise DeviceError(f"NVML finds no GPU: {error}") from error
    return [gpu for index in range(count) for gpu in _board(index)]


def driver_version() -> str:
    """Return the version of the NVIDIA driver, after a call of `all_gpus`.

    Raises:
        DeviceError: NVML does not report it.
    """
    import pynvml

    try:
        return _text(pynvml.nvmlSystemGetDriverVersion)
    except pynvml.NVMLError as error:
        raise DeviceError(f"NVML does not report the driver's version: {error}") from error


def _board(index: int) -> list[Gpu]:
    """Return the GPU at this index of the bus, or its MIG instances."""
    import pynvml

    try:
        gpu = _gpu(pynvml.nvmlDeviceGetHandleByIndex(index))
        mode = gpu.ask("nvmlDeviceGetMigMode").value
        return _instances(gpu) if mode and mode[0] else [gpu]
    except pynvml.NVMLError as error:
        failure = f"NVML on GPU {index} of this machine: {error}"
        return [Gpu(uuid=f"(GPU {index})", name="", handle=None, failure=failure)]


def _instances(board: Gpu) -> list[Gpu]:
    import pynvml

    instances = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(board.handle)):
        try:
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(board.handle, index)
        except pynvml.NVMLError_NotFound:
            continue  # places for instances are numbered, and may be empty
        instances.append(_gpu(handle, board))
    return instances


def _gpu(handle: Any, board: Gpu | None = None) -> Gpu:
    import pynvml

    return Gpu(
        uuid=_text(pynvml.nvmlDeviceGetUUID, handle),
        name=_text(pynvml.nvmlDeviceGetName, handle),
        handle=handle,
        board=board,
    )


def _text(function: Callable[..., str | bytes], *arguments: Any) -> str:
    answer = function(*arguments)
    return answer.decode() if isinstance(answer, bytes) else answer
