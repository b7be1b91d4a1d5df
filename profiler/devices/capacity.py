"""Memory of a device before any measurement."""

from __future__ import annotations

from trappm.profiler.devices.catalogue import card_of
from trappm.profiler.devices.rank_keys import rank_key
from trappm.profiler.host import procfs
from trappm.profiler.records import is_cpu_device

USABLE_SHARE = 0.94
"""Usable share of a device's memory; the rest is lost to fragmentation.

Most published runs that reached 38,000 of an A100's 40,536 MiB ran out of memory.
"""


def memory_mib(device: str) -> float | None:
    """Return the memory of a GPU or of its part; None for other devices.

    It is the observed memory of a process, or else that of the data sheet.
    """
    card = None if is_cpu_device(device) else card_of(device)
    if card is None:
        return None
    return card.memory_mib or 1024.0 * card.memory_gb


def expected_memory_mib(device: str) -> float | None:
    """Return the memory of a GPU, or for CPU cores that of this machine's processes."""
    key = rank_key(device)
    if is_cpu_device(device):
        return procfs.allowed_memory_mib() / key.ranks
    return memory_mib(key.member)
