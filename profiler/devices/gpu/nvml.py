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

_OF_INSTANCE = frozenset({"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"})
"""What a MIG instance answers for itself; everything else is asked of its board."""
_OF_ALL_INSTANCES = frozenset(
    {"nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage",
     "nvmlDeviceGetFieldValues", "nvmlDeviceGetUtilizationRates"}
)  # fmt: skip
"""What a board answers for all its instances together, which says nothing of one of them."""

_OTHERWISE = {
    "nvmlDeviceGetCurrentClocksEventReasons": "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetComputeRunningProcesses": "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetTemperature": "nvmlDeviceGetTemperatureV",
}
"""What other drivers have in the place of a function: those before 535, those before 510, and those
that answer DEPRECATED (NVIDIA's deprecation notices of NVML 13 say which will)."""

_DEPRECATED = 26
"""NVML's code for a function that a driver has no more; older packages have no class for it."""


class NoDriverError(DeviceError):
    """This machine has no NVIDIA driver, or nothing to ask it with: most likely it has no GPU."""


class Answer(NamedTuple):
    """What NVML answers, or why it does not."""

    value: Any
    missing: str | None


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance, that this process may use."""

    uuid: str
    name: str
    handle: Any = field(compare=False)
    """NVML's own handle: a pointer, which can be neither compared nor hashed."""
    board: Gpu | None = None
    """Of a MIG instance: the GPU that it is a part of."""
    failure: str | None = None
    """Why NVML knows nothing about it: it is lost, say, and only keeps its number."""

    @property
    def short_key(self) -> str:
        """`a100` for NVIDIA A100-SXM4-40GB, `a100-mig-1g.5gb` for a part of it."""
        return read_name(self.name).key

    def ask(self, function: str, *arguments: Any) -> Answer:
        """The answer of one NVML query on this GPU, or the reason why there is none."""
        handle = self.handle
        if self.board is not None and function not in _OF_INSTANCE:
            if function in _OF_ALL_INSTANCES:
                return Answer(None, "a MIG instance shares this meter with its whole GPU")
            handle = self.board.handle
        why = None
        for name in filter(None, (function, _OTHERWISE.get(function))):
            try:
                return _query(handle, name, *arguments)
            except _AbsentError as error:
                why = why or str(error)
        return Answer(None, why)

    def power_instant_mw(self) -> Answer:
        """Its power at this moment; NVML's usual one is the mean of the last second on some."""
        values, why = self.ask("nvmlDeviceGetFieldValues", [_POWER_INSTANT])
        if values is None:
            return Answer(None, why)
        if values[0].nvmlReturn != 0:
            return Answer(None, f"NVML on the field {_POWER_INSTANT}: code {values[0].nvmlReturn}")
        return Answer(int(values[0].value.uiVal), None)

    def memory(self) -> Answer:
        """Its memory in bytes as `total` and `used`; since driver 510 `used` leaves out `reserved`,
        the driver's own."""
        import pynvml

        version = getattr(pynvml, "nvmlMemory_v2", None)
        answer = Answer(None, None)
        if version is not None:
            answer = self.ask("nvmlDeviceGetMemoryInfo", version)
        return answer if answer.value is not None else self.ask("nvmlDeviceGetMemoryInfo")


class _AbsentError(Exception):
    """The driver, or its Python package, has no such function, or has it no more."""


def _query(handle: Any, function: str, *arguments: Any) -> Answer:
    """What NVML answers.

    Raises:
        _AbsentError: there is nobody to answer.
    """
    import pynvml

    try:
        return Answer(getattr(pynvml, function)(handle, *arguments), None)
    except (AttributeError, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLLibraryMismatchError):
        raise _AbsentError(
            f"the driver, or the installed nvidia-ml-py, has no {function}"
        ) from None
    except pynvml.NVMLError as error:
        if error.value == _DEPRECATED:
            raise _AbsentError(f"the driver has {function} no more (deprecated)") from None
        return Answer(None, f"NVML on {function}: {error}")


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this process, in its order.

    Raises:
        DeviceError: NVML is not there, or CUDA_VISIBLE_DEVICES names what is not here.
    """
    return select_visible(all_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def select_visible(gpus: list[Gpu], visible: str | None) -> list[Gpu]:
    """What a value of CUDA_VISIBLE_DEVICES leaves: indices by PCI bus, or UUIDs.

    Args:
        gpus: all of them, as `all_gpus` lists them.

    Raises:
        DeviceError: it names what is not here, or a GPU that is split by MIG.
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
    """Every GPU of this machine by PCI bus; in the place of one split by MIG, its instances.

    One that NVML cannot ask keeps its place, with its `failure`.

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
    """The version of the NVIDIA driver; `all_gpus` has been called before.

    Raises:
        DeviceError: NVML does not tell.
    """
    import pynvml

    try:
        return _text(pynvml.nvmlSystemGetDriverVersion)
    except pynvml.NVMLError as error:
        raise DeviceError(f"NVML does not tell the driver's version: {error}") from error


def _board(index: int) -> list[Gpu]:
    """The GPU in this place of the bus, or its MIG instances."""
    import pynvml

    try:
        gpu = _gpu(pynvml.nvmlDeviceGetHandleByIndex(index))
        mode = gpu.ask("nvmlDeviceGetMigMode").value
        return _instances(gpu) if mode and mode[0] else [gpu]
    except pynvml.NVMLError as error:
        failure = f"NVML on GPU {index} of this machine: {error}"
        return [Gpu(uuid=f"(GPU {index})", name="", handle=None, failure=failure)]


def _instances(board: Gpu) -> list[Gpu]:
    """The MIG instances of a GPU."""
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
