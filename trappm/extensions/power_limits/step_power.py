"""Power and energy of a step under any power limit, and the most efficient limit.

power          idle + busy + (energy of operations and bytes) / step time
dynamic power  falls with the clock f as (floor^8 + f^8)^(a/8): voltage falls, down to a floor
time           what is bound by arithmetic goes with 1 / f, what is bound by memory hardly does
limit          kernels draw more and less than the mean: those above the limit are held to it,
               and the clock falls until the mean is what remains (uniform within +- spread)

Energies are in units of the data sheet (the card's limit as delivered over its peaks), so that
cards of which nothing is measured start from the others. Medians are of the most probable
constants and the predicted time. Intervals are of draws of both, so that what makes a step longer
makes its power lower in the same draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trappm.learner.heads.physics_heads import kernel_head
from trappm.learner.interface import Array, BoolArray, DeviceHeads, IntArray, Workload
from trappm.learner.physics.power import (
    CONSTANTS,
    MEASURED,
    UNKNOWN,
    Loads,
    Normal,
    known_power,
    loads_of,
)
from trappm.learner.physics.step_time import SHARPNESS, StepTimePrior
from trappm.prediction.prediction import BestPowerLimit, Interval, Power
from trappm.profiler.devices.catalogue import Card, card_of, spec_of
from trappm.profiler.errors import InputError

BLEND = 4.0
"""Sharpness between time that scales with the clock and time that does not."""
MAX_WAITING = 1.3
"""A step that takes longer than its kernels by more than this waits for something else."""
MIN_CLOCK = 0.05
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
        """Raise InputError where the catalogue has no limit of the card's power."""
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
            slower = np.minimum(time_ms / device_ms, MAX_WAITING)
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
        """Return the mean of the smaller of a limit and the power at the full clock, shape (n)."""
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
    low, high = np.full(count, MIN_CLOCK), np.ones(count)
    for _ in range(BISECTIONS):
        clock = (low + high) / 2
        over = too_much(clock)
        low, high = np.where(over, low, clock), np.where(over, clock, high)
    return high


@dataclass(frozen=True, eq=False)
class CardPower:
    """Constants of a card's power, with their reference."""

    sheet: Sheet
    constants: Normal
    noise: float
    """Deviation of the logarithm of power on workloads like none of the labels."""
    limit_w: float
    """Factory power limit in watts."""
    rests_on: str


def power_of(card: Card | None) -> CardPower | None:
    """Return the power constants of a card; None for MIG parts and cards without a known limit."""
    if card is None or card.power_w is None:
        return None
    known = known_power()
    if card.name.model in MEASURED:
        reference, labels = MEASURED[card.name.model]
        measured = card_of(reference)
        if measured is None:
            raise KeyError(f"the catalogue has no {reference}, whose power was measured")
        constants, noise = known[card.name.model]
        return CardPower(Sheet.of(measured), constants, noise, card.power_w, labels)
    constants, noise = known[UNKNOWN]
    others = ", ".join(model.upper() for model in MEASURED)
    why = f"this card's limit of {card.power_w:g} W, and labels of {others}"
    return CardPower(Sheet.of(card), constants, noise, card.power_w, why)


DRAWS = 100
SEED = 1337
UNTIMED = 1.6
"""Factor of the interval of a step time that no head predicts: devices held out
(docs/research/step_time.md)."""
MAX_SLOWDOWN = 1.05
"""Largest ratio of the times at the most efficient limit and at the factory setting."""
WAITING_NOISE = 0.25
"""Deviation of log power of steps that mostly wait for their host or data loader."""
SLOWDOWN_NOISE = 0.25
"""Deviation of the log slowdown under a limit, on held-out networks."""
MIN_LIMIT_SHARE = 0.4
"""Lowest limit of most cards, as a share of the factory setting (P100: 0.5)."""
MIN_MEASURED_SHARE = 0.25
"""Lowest measured limit, as a share of the factory setting."""
_QUANTILES = (0.05, 0.95)
_Z = 1.645


def power_of_step(
    workload: Workload,
    heads: DeviceHeads,
    card: str,
    step_time_ms: Interval | None,
    limit_w: float | None,
) -> Power:
    """Return power and energy of a step on a card; see `answer.power_of_step`.

    Raises:
        InputError: The card has no such limit, or its power is unknown.
    """
    known = power_of(card_of(card))
    if known is None or workload.kernels is None:
        if limit_w is not None:
            why = f"of the power of {card}" if known is None else "of the kernels of this model"
            raise InputError(f"nothing is known {why}, so not what a power limit does to it")
        return Power()
    head = kernel_head(heads)
    times = None if head is None else head.prior
    step = StepPower(workload, times, card, known, step_time_ms)
    figures = step.under(known.limit_w if limit_w is None else limit_w)
    time_ms, low, high = figures["step_time_ms"]
    if step_time_ms is None:
        del figures["step_time_ms"], figures["energy_j"]
    elif limit_w is None:
        del figures["step_time_ms"]  # the head predicts it
    else:
        samples_ms = 1e3 * workload.batch_size
        figures["samples_per_s"] = samples_ms / time_ms, samples_ms / high, samples_ms / low
    return Power(
        figures=figures,
        power_source=known.rests_on,
        best_power_limit=None if step_time_ms is None else step.best_limit(),
    )


class StepPower:
    """Power of a step on a card with known constants."""

    def __init__(
        self, workload: Workload, times: StepTimePrior | None, card: str, known: CardPower,
        step_time_ms: Interval | None,
    ) -> None:  # fmt: skip
        """Set up the step of a workload with kernels.

        Args:
            workload, card, known: Workload, any name of the card, constants of its power.
            times: Prior of the device's step times, if it has heads of kernels.
            step_time_ms: Prediction under the factory limit; None if no head predicts it.
        """
        prior = times or _of_other_cards(card)
        if step_time_ms is None:
            median = float(np.exp(prior.log_values([workload])[0]))
            step_time_ms = median, median / UNTIMED, median * UNTIMED
        self._loads = loads_of([workload], prior)
        self._known = known
        self._step_time_ms = step_time_ms

    def under(self, limit_w: float) -> dict[str, Interval]:
        """`step_time_ms`, `power_w` and `energy_j` under a limit.

        Raises:
            InputError: no limit of this card.
        """
        most = self._known.limit_w
        if not MIN_MEASURED_SHARE * most <= limit_w <= most:
            raise InputError(
                f"the power limit is {limit_w:g} W; this card has {MIN_MEASURED_SHARE * most:g} to "
                f"{most:g} W"
            )
        drawn = self._draws.under(np.full(DRAWS + 1, limit_w))
        waits = 1 - self._draws.device_ms(drawn.clock) / drawn.time_ms
        noise = self._normal[:, 1] * np.hypot(self._known.noise, WAITING_NOISE * waits)
        # The noise is of the model; nothing draws more than its limit for long.
        power = np.minimum(drawn.power_w * np.exp(noise), np.maximum(limit_w, drawn.power_w[0]))
        slowdown = np.log(drawn.time_ms / self._times_ms)
        times = drawn.time_ms * np.exp(SLOWDOWN_NOISE * slowdown * self._normal[:, 2])
        values = {"step_time_ms": times, "power_w": power, "energy_j": power * times / 1e3}
        return {name: _interval(value) for name, value in values.items()}

    def best_limit(self) -> BestPowerLimit:
        """Return the limit with the least energy within `MAX_SLOWDOWN` of the time."""
        most = self._known.limit_w
        limits = np.arange(most, MIN_LIMIT_SHARE * most - 1e-9, -5.0)
        rows = np.zeros(len(limits), dtype=np.int64)
        time_ms = np.full(len(limits), self._step_time_ms[0])
        steps = self._timed(rows, self._known.constants.mean, time_ms)
        point = steps.under(limits)
        energy = point.power_w * point.time_ms / 1e3
        allowed = point.time_ms <= MAX_SLOWDOWN * point.time_ms[0]
        best = int(np.argmin(np.where(allowed, energy, np.inf)))
        return BestPowerLimit(
            power_limit_w=float(limits[best]),
            step_time_ms=float(point.time_ms[best]),
            power_w=float(point.power_w[best]),
            energy_j=float(energy[best]),
            saved=float(1 - energy[best] / energy[0]),
        )

    @cached_property
    def _normal(self) -> Array:
        """Return normal draws of time, power and slowdown; the first is 0, the median."""
        normal = np.random.default_rng(SEED).normal(size=(DRAWS + 1, 3))
        normal[0] = 0.0
        return normal

    @cached_property
    def _times_ms(self) -> Array:
        """A step time for each draw, as wide as its interval."""
        median, low, high = self._step_time_ms
        z = self._normal[:, 0]
        wide = np.where(z < 0, np.log(median / low) / _Z, np.log(high / median) / _Z)
        times: Array = median * np.exp(z * wide)
        return times

    @cached_property
    def _draws(self) -> Steps:
        known = self._known.constants
        generator = np.random.default_rng(SEED)
        constants = generator.multivariate_normal(known.mean, known.covariance, size=DRAWS)
        rows = np.zeros(DRAWS + 1, dtype=np.int64)
        return self._timed(rows, np.vstack([known.mean, constants]), self._times_ms)

    def _timed(self, rows: IntArray, constants: Array, time_ms: Array) -> Steps:
        loads: Loads = self._loads.at(rows)
        limit_w = np.full(len(rows), self._known.limit_w)
        return Steps.timed(loads, self._known.sheet, constants, time_ms, limit_w)


def _of_other_cards(card: str) -> StepTimePrior:
    from trappm.learner.physics.devices.known_devices import known_devices

    return StepTimePrior(spec_of(card), known_devices().centre)


def _interval(values: Array) -> Interval:
    """Return median and quantiles of values: the median first, then draws around it."""
    low, high = np.quantile(values[1:], _QUANTILES)
    median = float(values[0])
    return median, min(float(low), median), max(float(high), median)
