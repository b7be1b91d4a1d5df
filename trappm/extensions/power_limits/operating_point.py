"""The power of a step, and the clock that a power limit leaves it: few constants of a card.

power          idle + busy + (energy of operations and bytes) / step time
dynamic power  falls with the clock f as (floor^8 + f^8)^(a/8): voltage falls, down to a floor
time           what is bound by arithmetic goes with 1 / f, what is bound by memory hardly does
limit          kernels draw more and less than the mean: those above the limit are held to it,
               and the clock falls until the mean is what remains (uniform within +- spread)

Energies are in units of the data sheet (the card's limit as delivered over its peaks), so that
cards of which nothing is measured start from the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trappm.learner.interface import Array, BoolArray
from trappm.learner.physics.power import CONSTANTS, Loads
from trappm.learner.physics.step_time import SHARPNESS
from trappm.profiler.devices.catalogue import Card
from trappm.profiler.errors import InputError

BLEND = 4.0
"""Sharpness between time that scales with the clock and time that does not."""
MOST_SLOWER = 1.3
"""A step that takes longer than its kernels by more than this waits for something else."""
LEAST_CLOCK = 0.05
BISECTIONS = 20


@dataclass(frozen=True)
class Sheet:
    """Part of a data sheet that constants are relative to."""

    power_w: float
    tflops: tuple[float, float, float]
    """Peak rates by `Peak`."""
    bandwidth_gbs: float

    @classmethod
    def of(cls, card: Card) -> Sheet:
        """Raises InputError where the catalogue has no limit of the card's power."""
        if card.power_w is None:
            raise InputError(
                f"the power limit of {card.name} is not known; add it to the catalogue"
            )
        tf32 = card.tf32_tflops or card.fp32_tflops
        return cls(card.power_w, (card.fp32_tflops, card.half_tflops, tf32), card.bandwidth_gbs)


@dataclass(frozen=True, eq=False)
class Point:
    """Operating points of n steps under a limit."""

    power_w: Array
    time_ms: Array
    clock: Array
    """Clock as a share of the card's highest."""


@dataclass(frozen=True, eq=False)
class Steps:
    """n steps of known time under some limit, ready to be asked about other limits."""

    loads: Loads
    sheet: Sheet
    values: Array
    """`CONSTANTS` (c), or a set for each step (n, c)."""
    slower: Array
    """Ratio of the device's time to that of the loads (n)."""
    waiting_ms: Array

    @classmethod
    def timed(
        cls, loads: Loads, sheet: Sheet, constants: Array, time_ms: Array, limit_w: Array
    ) -> Steps:
        """Return the steps from their times under a limit (n).

        Args:
            constants: logarithms of `CONSTANTS` (c), or a set for each step (n, c).
        """
        values = np.exp(constants)
        unscaled = cls(loads, sheet, values, np.ones(len(loads)), np.zeros(len(loads)))

        def at_clock(clock: Array) -> Steps:
            device_ms = unscaled.device_ms(clock)
            slower = np.minimum(time_ms / device_ms, MOST_SLOWER)
            rest = np.maximum(time_ms**SHARPNESS - (slower * device_ms) ** SHARPNESS, 0.0)
            return cls(loads, sheet, values, slower, rest ** (1 / SHARPNESS))

        def draws_too_much(clock: Array) -> BoolArray:
            steps = at_clock(clock)
            return steps.at(clock)[0] > steps.held_to(limit_w)

        return at_clock(_highest(draws_too_much, len(loads)))

    def under(self, limit_w: Array) -> Point:
        """Under a limit (n)."""
        held_to = self.held_to(limit_w)
        clock = _highest(lambda clock: self.at(clock)[0] > held_to, len(self.loads))
        power, time = self.at(clock)
        return Point(power, time, clock)

    def held_to(self, limit_w: Array) -> Array:
        """The mean of the smaller of a limit and the power of kernels at the full clock (n)."""
        free, _ = self.at(np.ones(len(self.loads)))
        spread = self._of("spread")
        lowest_w, highest_w = free * (1 - spread), free * (1 + spread)
        above_w = np.clip(limit_w, lowest_w, highest_w) - lowest_w
        range_w = highest_w - lowest_w
        held: Array = np.minimum(limit_w, lowest_w) + above_w - above_w**2 / (2 * range_w)
        return held

    def at(self, clock: Array) -> tuple[Array, Array]:
        """Power in W and time in ms at a clock (n)."""
        device = self.device_ms(clock)
        time = (device**SHARPNESS + self.waiting_ms**SHARPNESS) ** (1 / SHARPNESS)
        floor = self._of("floor")
        falls = ((floor**SHARPNESS + clock**SHARPNESS) / (floor**SHARPNESS + 1)) ** (
            self._of("exponent") / SHARPNESS
        )
        sheet = self.sheet
        busy_s = np.maximum(device - self.slower * self.loads.launch_ms, 0.0) / 1e3
        energy = self._of("busy") * busy_s * clock + self._of("bytes") * self.loads.bytes / (
            sheet.bandwidth_gbs * 1e9
        )
        for at, name in enumerate(("full", "half", "tf32")):
            peak = sheet.tflops[at] * 1e12
            energy = energy + self._of(name) * self.loads.operations[:, at] / peak
        return sheet.power_w * (self._of("idle") + falls * energy / (time / 1e3)), time

    def device_ms(self, clock: Array) -> Array:
        """Return the time of the kernels at a clock in ms (n)."""
        loads = self.loads

        def slower(clocked: Array) -> Array:
            part: Array = (1 + (clocked / clock) ** BLEND) / (1 + clocked**BLEND)
            return part ** (1 / BLEND)

        products = loads.products_ms * slower(self._of("products"))
        return self.slower * (products + loads.streams_ms * slower(self._of("streams")))

    def _of(self, name: str) -> Array:
        values: Array = self.values[..., CONSTANTS.index(name)]
        return values


def _highest(too_much: Callable[[Array], BoolArray], count: int) -> Array:
    """Return the highest clock at which each of n steps does not draw too much."""
    low, high = np.full(count, LEAST_CLOCK), np.ones(count)
    for _ in range(BISECTIONS):
        clock = (low + high) / 2
        over = too_much(clock)
        low, high = np.where(over, low, clock), np.where(over, clock, high)
    return high
