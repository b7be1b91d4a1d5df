"""How much memory a device has, before any measurement has told: what its name or its host says."""

from __future__ import annotations

import re

from trappm.profiler.measuring import procfs
from trappm.profiler.records import is_cpu_device

MEMORY_MIB = {
    "a100-40gb": 40_536.0,
    "a100-80gb": 81_251.0,
    "a100": 40_536.0,
    "h100": 81_251.0,
    "rtx3090": 24_268.0,
    "rtx4090": 24_217.0,
    "t4": 15_110.0,
    "v100-32gb": 32_510.0,
    "v100": 16_160.0,
}
"""What a CUDA process can have of a GPU by the first letters of its key, the longest first."""

_MIG = re.compile(r"-mig-\d+g\.(\d+)gb")


def memory_mib(device: str) -> float | None:
    """A GPU's memory, or that of its part; None for a device whose memory its name does not fix."""
    if part := _MIG.search(device):
        return 1024.0 * int(part[1])
    for key in sorted(MEMORY_MIB, key=len, reverse=True):
        if device.removeprefix("simulated:").startswith(key):
            return MEMORY_MIB[key]
    return None


def expected_memory_mib(device: str) -> float | None:
    """The same, and for cores what a process of this machine may have: their host may be another.

    None where nobody knows.
    """
    return procfs.allowed_memory_mib() if is_cpu_device(device) else memory_mib(device)
