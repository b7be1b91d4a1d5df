"""The thriftiest power limit of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Thrift:
    """The power limit under which a step costs the least energy, for 5 % more time at most."""

    power_limit_w: float
    step_time_ms: float
    power_w: float
    energy_j: float
    saved: float
    """Share of the energy of a step under the limit as delivered."""
