"""Keys of multi-rank devices, such as `a100x4`, `cpu-2x1t` and `a100x4-fsdp`.

Each rank is a process with its own device: a GPU of the node, or some cores of the host.
"""

from __future__ import annotations

import re

from trappm.profiler.devices.catalogue import RankKey

KINDS = {"ranks": "trappm.extensions.parallel.ranks_device:RanksDevice"}
"""Class of each kind of device."""

_RANKS = r"(?P<ranks>[2-9]|[1-9]\d)"
_STRATEGY = r"(?:-(?P<strategy>fsdp))?"
_CORES = re.compile(rf"cpu-{_RANKS}x(?P<threads>[1-9]\d{{0,3}}t){_STRATEGY}")
_GPUS = re.compile(rf"(?P<card>[^:]+)x{_RANKS}{_STRATEGY}")


def rank_key(device: str) -> RankKey | None:
    """Return the ranks of a multi-rank device; None for other devices.

    The strategy is `ddp` (replicated parameters) or `fsdp` (sharded parameters).
    """
    cores = _CORES.fullmatch(device)
    match = cores or _GPUS.fullmatch(device)
    if match is None or (cores is None and device.startswith("cpu-")):
        return None
    member = f"cpu-{cores['threads']}" if cores else match["card"]
    return RankKey(member, int(match["ranks"]), match["strategy"] or "ddp")
