"""What is known of devices before any label: where the constants of priors start from.

They are starting points only: labels move everything that hangs on them. Peaks of GPUs stand in
`profiler.devices.catalogue`.
"""

from __future__ import annotations

from dataclasses import dataclass

from trappm.profiler.devices.base import rank_key
from trappm.profiler.devices.catalogue import CONTEXT_MIB, card_of
from trappm.profiler.errors import InputError
from trappm.profiler.records import Phase


@dataclass(frozen=True)
class DeviceSpec:
    """The speed of a device on paper, and what its processes need."""

    half_tflops: float
    """Dense products in 16 bits."""
    full_tflops: float
    """Products in fp32, as PyTorch runs them by default (no TF32 in matrix products)."""
    bandwidth_gbs: float
    cache_mib: float
    """Last-level cache."""
    units: int
    """Streaming multiprocessors, or threads of a CPU."""
    launch_us: float = 2.0
    """Least time of a kernel on the device."""
    dispatch_us: float = 8.0
    """Time of the host for an operator, where the device waits for the host."""
    process_mib: float = CONTEXT_MIB[Phase.TRAIN]
    """What a training process needs beside its tensors: context, libraries, their workspaces."""
    fragments: float = 1.0
    """How much of the gaps between the blocks of CUDA's allocator there is."""
    tf32_tflops: float | None = None
    """Convolutions of fp32 tensors, for which PyTorch lets cuDNN take TF32; None where there is no
    TF32: then they are as fast as other products."""


# Above the baseline of a warm process there is little but tensors on a CPU.
CPU = DeviceSpec(
    0.06, 0.06, 20, 32, 2, launch_us=5.0, dispatch_us=5.0, process_mib=5.0, fragments=0.1
)


def spec_of(device: str) -> DeviceSpec:
    """The specification of the device of this key, such as `a100` or `cpu-2t`.

    Raises:
        InputError: nobody has listed this device.
    """
    spec = known_spec(device)
    if spec is None:
        raise InputError(
            f"nothing is known of device {device!r}, so its step times cannot be simulated; add "
            "a line of its data sheet to profiler/devices/catalogue.csv"
        )
    return spec


def known_spec(device: str) -> DeviceSpec | None:
    """The specification of a device; None where the catalogue does not list it."""
    if device.startswith("cpu"):
        return CPU
    card = card_of(rank_key(device).member)
    if card is None:
        return None
    return DeviceSpec(
        half_tflops=card.half_tflops,
        full_tflops=card.fp32_tflops,
        bandwidth_gbs=card.bandwidth_gbs,
        cache_mib=card.cache_mib,
        units=card.units,
        tf32_tflops=card.tf32_tflops,
        process_mib=CONTEXT_MIB[Phase.TRAIN] + card.library_workspace_mib(Phase.TRAIN),
    )


def has_kernels(device: str) -> bool:
    """Whether kernels explain the step times of this device: how fast an unknown GPU runs them is
    not known."""
    return known_spec(device) is not None
