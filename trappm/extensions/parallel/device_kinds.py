"""Keys of devices whose steps several ranks share: `a100x4`, `cpu-2x1t`, `a100x4-fsdp`.

A rank is a process with a device of its own: a GPU of the node, or some of the host's cores.
"""

from __future__ import annotations

import re

from trappm.profiler.devices.base import RankKey

KINDS = {"ranks": "trappm.extensions.parallel.ranks_device:RanksDevice"}
"""Class of each kind of device."""

_RANKS = r"(?P<ranks>[2-9]|[1-9]\d)"
_STRATEGY = r"(?:-(?P<strategy>fsdp))?"
_CORES = re.compile(rf"cpu-{_RANKS}x(?P<threads>[1-9]\d{{0,3}}t){_STRATEGY}")
_GPUS = re.compile(rf"(?P<card>[^:]+)x{_RANKS}{_STRATEGY}")


def rank_key(device: str) -> RankKey | None:
    """Return the ranks of a device; None for a device without.

    The strategy is `ddp` (gradients are summed) or `fsdp` (parameters are sharded).
    """
    cores = _CORES.fullmatch(device)
    match = cores or _GPUS.fullmatch(device)
    if match is None or (cores is None and device.startswith("cpu-")):
        return None
    member = f"cpu-{cores['threads']}" if cores else match["card"]
    return RankKey(member, int(match["ranks"]), match["strategy"] or "ddp")
