"""Keys of devices whose steps several ranks share: `a100x4`, `cpu-2x1t`, `a100x4-fsdp`.

A rank is a process with a device of its own: a GPU of the node, or some of the host's cores.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_RANKS = r"(?P<ranks>[2-9]|[1-9]\d)"
_STRATEGY = r"(?:-(?P<strategy>fsdp))?"
_CORES = re.compile(rf"cpu-{_RANKS}x(?P<threads>[1-9]\d{{0,3}}t){_STRATEGY}")
_GPUS = re.compile(rf"(?P<card>[^:]+)x{_RANKS}{_STRATEGY}")


@dataclass(frozen=True)
class RankKey:
    """What the key of a device says of its ranks."""

    member: str
    """The key of the device that each rank has, such as `a100` or `cpu-1t`."""
    ranks: int = 1
    strategy: str = "ddp"
    """How they share the step: `ddp` (gradients are summed) or `fsdp` (parameters are shared)."""


def rank_key(device: str) -> RankKey:
    """Member, number of ranks and strategy of a device; one rank for a device without."""
    cores = _CORES.fullmatch(device)
    match = cores or _GPUS.fullmatch(device)
    if match is None or (cores is None and device.startswith("cpu-")):
        return RankKey(device)
    member = f"cpu-{cores['threads']}" if cores else match["card"]
    return RankKey(member, int(match["ranks"]), match["strategy"] or "ddp")
