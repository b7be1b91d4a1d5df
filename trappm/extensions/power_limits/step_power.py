"""Power and energy of a predicted step under any power limit, and the most efficient limit.

`operating_point` has the formula. Medians are of the most probable constants and the
predicted time; intervals are of draws of both, so that what makes a step longer makes its power
lower in the same draw.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from trappm.extensions.power_limits.card_power import CardPower, power_of
from trappm.extensions.power_limits.operating_point import Steps
from trappm.learner.heads.physics_heads import Heads
from trappm.learner.interface import Array, DeviceHeads, IntArray, Workload
from trappm.learner.physics.power import Loads, loads_of
from trappm.learner.physics.step_time import StepTimePrior
from trappm.prediction.costs import BestPowerLimit, Interval, Power
from trappm.profiler.devices.catalogue import card_of, spec_of
from trappm.profiler.errors import InputError

DRAWS = 100
SEED = 1337
UNTIMED = 1.6
"""Factor of the interval of a step time that no head predicts: devices held out
(docs/research/step_time.md)."""
MOST_SLOWER = 1.05
"""Largest ratio of the times at the most efficient limit and at the factory setting."""
WAITING_NOISE = 0.25
"""Deviation of log power of steps that mostly wait for their host or data loader."""
SLOWDOWN_NOISE = 0.25
"""Deviation of the log slowdown under a limit, on held-out networks."""
LEAST_SHARE = 0.4
"""Lowest limit of most cards, as a share of the factory setting (P100: 0.5)."""
LEAST_LIMIT = 0.25
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
    """Return power and energy of a step on a card; see `costs.power_of_step`.

    Raises:
        InputError: The card has no such limit, or its power is unknown.
    """
    known = power_of(card_of(card))
    if known is None or workload.kernels is None:
        if limit_w is not None:
            why = f"of the power of {card}" if known is None else "of the kernels of this model"
            raise InputError(f"nothing is known {why}, so not what a power limit does to it")
        return Power()
    head = heads.heads.get("step_time_ms") if isinstance(heads, Heads) else None
    times = head.prior if head is not None and isinstance(head.prior, StepTimePrior) else None
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
        if not LEAST_LIMIT * most <= limit_w <= most:
            raise InputError(
                f"the power limit is {limit_w:g} W; this card has {LEAST_LIMIT * most:g} to "
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
        """Return the limit with the least energy within `MOST_SLOWER` of the time."""
        most = self._known.limit_w
        limits = np.arange(most, LEAST_SHARE * most - 1e-9, -5.0)
        rows = np.zeros(len(limits), dtype=np.int64)
        time_ms = np.full(len(limits), self._step_time_ms[0])
        steps = self._timed(rows, self._known.constants.mean, time_ms)
        point = steps.under(limits)
        energy = point.power_w * point.time_ms / 1e3
        allowed = point.time_ms <= MOST_SLOWER * point.time_ms[0]
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
    """The first is the median, the others are draws around it."""
    low, high = np.quantile(values[1:], _QUANTILES)
    median = float(values[0])
    return median, min(float(low), median), max(float(high), median)
