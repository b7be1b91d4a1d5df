"""How much memory a device has, before any measurement: by its name, or on its host."""

from __future__ import annotations

from trappm.profiler.devices.catalogue import card_of
from trappm.profiler.host import procfs
from trappm.profiler.records import is_cpu_device


def memory_mib(device: str) -> float | None:
    """A GPU's memory, or that of its part; None for a device whose memory its name does not fix.

    Where nobody has seen what a process can have of it, what the data sheet says.
    """
    card = None if is_cpu_device(device) else card_of(device)
    if card is None:
        return None
    return card.memory_mib or 1024.0 * card.memory_gb


def expected_memory_mib(device: str) -> float | None:
    """The same, and for cores what a process of this machine may have: their host may be another.

    None where nobody knows.
    """
    return procfs.allowed_memory_mib() if is_cpu_device(device) else memory_mib(device)
