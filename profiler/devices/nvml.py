"""NVIDIA's management library at the boundary: which GPUs a process may use, and their meters.

NVML numbers GPUs by PCI bus whatever CUDA_VISIBLE_DEVICES says, so a GPU is known by its UUID only.
Nothing here creates a CUDA context; any process may ask.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from profiler.errors import DeviceError

_NOT_PART_OF_KEY = re.compile(
    r"\b(nvidia|tesla|geforce|quadro|graphics|device|pcie|nvl|hbm\w+|sxm\w*|\d+gb)\b"
)


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process may use."""

    uuid: str
    name: str
    handle: Any
    """NVML's own handle."""

    @property
    def short_key(self) -> str:
        """`a100` for NVIDIA A100-SXM4-40GB, `rtx-3090` for NVIDIA GeForce RTX 3090."""
        words = _NOT_PART_OF_KEY.sub(" ", self.name.lower().replace("-", " ")).split()
        return "-".join(words)

    def ask(self, function: str, *arguments: Any) -> Any:
        """The answer of one NVML query on this GPU, or None where it does not know the question.

        Raises:
            DeviceError: any other failure, such as missing rights or a GPU that fell off the bus.
        """
        import pynvml

        try:
            return getattr(pynvml, function)(self.handle, *arguments)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
            return None
        except pynvml.NVMLError as error:
            raise DeviceError(f"NVML cannot answer {function} for {self.name}: {error}") from error


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this process, in its order.

    Raises:
        DeviceError: NVML is not there, or CUDA_VISIBLE_DEVICES names what is not a whole GPU here.
    """
    return select_visible(all_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def select_visible(gpus: list[Gpu], visible: str | None) -> list[Gpu]:
    """What a value of CUDA_VISIBLE_DEVICES leaves of all GPUs: indices by PCI bus, or UUIDs.

    Raises:
        DeviceError: it names a MIG instance or a GPU that is not here.
    """
    if visible is None:
        return gpus
    chosen = []
    for entry in filter(None, (part.strip() for part in visible.split(","))):
        if entry == "-1":
            break  # CUDA ignores whatever follows an invalid index
        if entry.isdigit():
            matches = gpus[int(entry) : int(entry) + 1]
        else:
            matches = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        if len(matches) != 1:
            raise DeviceError(
                f"CUDA_VISIBLE_DEVICES={visible!r} names {entry!r}, which is not one whole GPU here"
            )
        chosen += matches
    return chosen


def all_gpus() -> list[Gpu]:
    """Every GPU of this machine, by PCI bus.

    Raises:
        DeviceError: NVML is not installed, or finds no driver.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [
            Gpu(
                uuid=_text(pynvml.nvmlDeviceGetUUID, handle),
                name=_text(pynvml.nvmlDeviceGetName, handle),
                handle=handle,
            )
            for handle in handles
        ]
    except ImportError as error:
        raise DeviceError("the package nvidia-ml-py is not installed") from error
    except pynvml.NVMLError as error:
        raise DeviceError(f"NVML finds no GPU: {error}") from error


def driver_version() -> str:
    """The version of the NVIDIA driver; `all_gpus` has been called before."""
    import pynvml

    return _text(pynvml.nvmlSystemGetDriverVersion)


def _text(function: Callable[..., str | bytes], *arguments: Any) -> str:
    answer = function(*arguments)
    return answer.decode() if isinstance(answer, bytes) else answer
