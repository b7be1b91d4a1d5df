"""Keys of devices whose members share each step, such as `a100x4`; extensions define them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from trappm.profiler.extensions import extension_modules


@dataclass(frozen=True)
class RankKey:
    """Ranks of a device: processes with a member device each."""

    member: str
    """Key of the device of each rank, such as `a100` or `cpu-1t`."""
    ranks: int = 1
    strategy: str = "ddp"
    """How the ranks share a step."""


@lru_cache(maxsize=10_000)
def rank_key(device: str) -> RankKey:
    """Return the member, number of ranks and strategy of a device; by default one rank."""
    keys = (extension.rank_key(device) for extension in extension_modules("device_kinds"))
    return next((key for key in keys if key is not None), RankKey(device))
