"""Joint fit of the power constants of several cards.

    constants = center + shared offset + offset of the card

The fit maximizes the posterior with Student-t errors of the logarithms of power and time. A card
without labels differs from the shared constants as much as labelled cards do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trappm.learner.physics.power.operating_point import CONSTANTS, Loads, Sheet, Steps
from trappm.learner.physics.power.power_prior import Normal

Array = npt.NDArray[np.float64]

# Rough prior means from data sheets and literature.
_CENTRE = {
    "idle": 0.14, "busy": 0.15, "full": 0.8, "half": 0.8, "tf32": 0.8, "bytes": 0.8,
    "exponent": 2.0, "floor": 0.55, "streams": 0.5, "products": 0.9, "spread": 0.7,
}  # fmt: skip
_SHARED = {"idle": 0.3, "busy": 1.0, "exponent": 0.4, "floor": 0.2, "streams": 0.5,
           "products": 0.5, "spread": 0.15}  # fmt: skip
_OWN = {"idle": 0.3, "busy": 0.5, "full": 0.4, "half": 0.5, "tf32": 0.5, "bytes": 0.5}
_LEAST = {"exponent": 0.2, "floor": 0.1, "streams": 0.2, "products": 0.2, "spread": 0.05}
"""Prior standard deviations between cards."""
NOISE = 0.05
"""Scale of the error of a logarithm."""
DEGREES = 4.0
PSEUDO_CARDS = 2.0
"""Weight of the prior deviation between cards, as a number of cards."""
ROUNDS = 3
ITERATIONS = 25
STEP = 1e-3
LEAST_GAIN = 0.02
"""Minimum gain of the log posterior per iteration in nats."""


@dataclass(frozen=True, eq=False)
class Labels:
    """Labels of a card with measured power (n)."""

    card: str
    sheet: Sheet
    loads: Loads
    usual_ms: Array
    """Step times under the usual limit, `usual_w`."""
    usual_w: Array
    limit_w: Array
    """Power limit of each measurement."""
    power_w: Array
    time_ms: Array
    """Step time under `limit_w`; NaN if it is unknown or the limit is the usual one."""
    weight: Array
    """Weight of each label; near-copies share a total weight of one."""

    def at(self, rows: npt.NDArray[np.bool_]) -> Labels:
        """Return the selected labels."""
        chosen = np.flatnonzero(rows)
        names = ("usual_ms", "usual_w", "limit_w", "power_w", "time_ms", "weight")
        parts = {name: getattr(self, name)[chosen] for name in names}
        return Labels(self.card, self.sheet, self.loads.at(chosen), **parts)

    def predicted(self, constants: Array) -> tuple[Array, Array]:
        """Return the logarithms of predicted power and time, shape (n,) each."""
        steps = Steps.timed(self.loads, self.sheet, constants, self.usual_ms, self.usual_w)
        point = steps.under(self.limit_w)
        return np.log(point.power_w), np.log(point.time_ms)

    def errors(self, constants: Array) -> Array:
        """Return log errors of power and then time, 0 for unknown times, shape (2 n,)."""
        power, time = self.predicted(constants)
        of_time = np.where(np.isnan(self.time_ms), 0.0, np.log(self.time_ms) - time)
        return np.concatenate([np.log(self.power_w) - power, of_time])


@dataclass(frozen=True, eq=False)
class Fitted:
    """Posteriors of power constants."""

    cards: dict[str, Normal]
    unknown: Normal
    """Distribution for a card without labels."""


def fit(evidence: Sequence[Labels]) -> Fitted:
    """Fit the constants of all cards jointly."""
    cards = sorted({part.card for part in evidence})
    size = len(CONSTANTS)
    centre = np.log([_CENTRE[name] for name in CONSTANTS])
    shared = np.array([_SHARED.get(name, 0.7) for name in CONSTANTS])
    first = np.array([_OWN.get(name, _LEAST.get(name, 0.0)) for name in CONSTANTS])
    own, values = first, np.zeros((1 + len(cards)) * size)
    for _ in range(ROUNDS):
        scales = np.concatenate([shared, *[own] * len(cards)])
        values, precision = _most_probable(evidence, cards, centre, scales, values)
        covariance = np.linalg.inv(precision).astype(np.float64)
        shifts = values.reshape(-1, size)[1:]
        left = np.diag(covariance).reshape(-1, size)[1:]
        moved = (shifts**2 + left).sum(0)
        own = np.sqrt((PSEUDO_CARDS * first**2 + moved) / (PSEUDO_CARDS + len(cards)))
    known = {}
    for place, card in enumerate(cards, start=1):
        both = np.zeros((size, len(values)))
        both[:, :size] = np.eye(size)
        both[:, place * size : (place + 1) * size] = np.eye(size)
        known[card] = Normal(centre + both @ values, both @ covariance @ both.T)
    unsure = covariance[:size, :size] + np.diag(own**2)
    return Fitted(known, Normal(centre + values[:size], unsure))


def _most_probable(
    evidence: Sequence[Labels], cards: Sequence[str], centre: Array, scales: Array, start: Array
) -> tuple[Array, Array]:
    """Return shared shifts followed by each card's (k), and their precision (k, k).

    The fit takes damped Gauss-Newton steps on reweighted squares.
    """
    size, values, damping = len(centre), start, 1e-2
    weights = np.concatenate([np.tile(part.weight, 2) for part in evidence])

    def constants(shifts: Array, card: str) -> Array:
        parts = shifts.reshape(-1, size)
        result: Array = centre + parts[0] + parts[1 + cards.index(card)]
        return result

    def errors_at(shifts: Array) -> Array:
        return np.concatenate([part.errors(constants(shifts, part.card)) for part in evidence])

    def loss(errors: Array, shifts: Array) -> float:
        tails = np.log1p(errors**2 / (DEGREES * NOISE**2))
        return float((DEGREES + 1) * (weights * tails).sum() + ((shifts / scales) ** 2).sum())

    errors = errors_at(values)
    for _ in range(ITERATIONS):
        rows = []
        for part in evidence:
            own = constants(values, part.card)
            here = part.errors(own)
            moves = [(here - part.errors(own + STEP * unit)) / STEP for unit in np.eye(size)]
            place = 1 + cards.index(part.card)
            block = np.zeros((2 * len(part.weight), len(values)))
            block[:, :size] = block[:, place * size : (place + 1) * size] = np.stack(moves, axis=1)
            rows.append(block)
        jacobian = np.concatenate(rows)
        inverse = weights * (DEGREES + 1) / (DEGREES * NOISE**2 + errors**2)
        precision = jacobian.T @ (inverse[:, None] * jacobian) + np.diag(scales**-2.0)
        slope = jacobian.T @ (inverse * errors) - values / scales**2
        before, improved = loss(errors, values), False
        while not improved and damping < 1e6:
            step = np.linalg.solve(precision + damping * np.diag(np.diag(precision)), slope)
            after = errors_at(values + step)
            gain = before - loss(after, values + step)
            improved = gain >= 0
            damping = max(damping / 5, 1e-6) if improved else damping * 5
        if not improved:
            break
        values, errors = values + step, after
        if gain < LEAST_GAIN:
            break
    return values, precision
