"""Power of a step, and its time under a power limit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BestPowerLimit:
    """Power limit with the least energy per step and at most 5 % more time."""

    power_limit_w: float
    step_time_ms: float
    power_w: float
    energy_j: float
    saved: float
    """Energy saved, as a share of the energy at the factory setting."""
