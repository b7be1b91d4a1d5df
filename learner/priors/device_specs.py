"""What is known of devices before any label: where the constants of priors start from.

They are starting points only: labels move everything that hangs on them.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    process_mib: float = 1750.0
    """What a process needs before its first tensor: CUDA's context and the libraries' kernels on an
    A100 (MEMORY.md, step 5 of the recipe)."""
    fragments: float = 1.0
    """How much of the gaps between the blocks of CUDA's allocator there is."""


DEVICE_SPECS = {
    "v100": DeviceSpec(112, 14, 900, 6, 80),
    "a100": DeviceSpec(312, 19.5, 1555, 40, 108),
    "h100": DeviceSpec(989, 67, 3350, 50, 132),
    "rtx3090": DeviceSpec(71, 35.6, 936, 6, 82),
    "rtx4090": DeviceSpec(165, 82.6, 1008, 72, 128),
    # Above the baseline of a warm process there is little but tensors on a CPU.
    "cpu": DeviceSpec(
        0.06, 0.06, 20, 32, 2, launch_us=5.0, dispatch_us=5.0, process_mib=5.0, fragments=0.1
    ),
}
"""By the first letters of a device's key. GeForce cards: with fp32 accumulation."""

UNKNOWN_GPU = DEVICE_SPECS["a100"]


def spec_of(device: str) -> DeviceSpec:
    """The specification of the device of this key, such as `a100` or `cpu-2t`.

    A device that nobody listed is taken for a GPU like an A100.
    """
    name = device.removeprefix("simulated:")
    found = (spec for key, spec in DEVICE_SPECS.items() if name.startswith(key))
    return next(found, UNKNOWN_GPU)


def is_gpu(device: str) -> bool:
    """Whether the device of this key launches kernels one by one, as all but CPUs are taken to."""
    return spec_of(device) is not DEVICE_SPECS["cpu"]
