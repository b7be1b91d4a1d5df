"""How much memory a device has, before any measurement: by its name, or on its host."""

from __future__ import annotations

from trappm.profiler.devices.catalogue import card_of
from trappm.profiler.devices.rank_keys import rank_key
from trappm.profiler.host import procfs
from trappm.profiler.records import is_cpu_device

USABLE_SHARE = 0.94
"""Of a device's memory: published runs that reached 38,000 of an A100's 40,536 MiB had mostly died.
The rest is what single segments do not fit into."""


def memory_mib(device: str) -> float | None:
    """A GPU's memory, or that of its part; None for a device whose memory its name does not fix.

    By the data sheet, where it was never observed how much a process can have.
    """
    card = None if is_cpu_device(device) else card_of(device)
    if card is None:
        return None
    return card.memory_mib or 1024.0 * card.memory_gb


def expected_memory_mib(device: str) -> float | None:
    """The same, and for cores what a process of this machine may have: their host may be another.

    None where that is unknown.
    """
    key = rank_key(device)
    if is_cpu_device(device):
        return procfs.allowed_memory_mib() / key.ranks
    return memory_mib(key.member)
