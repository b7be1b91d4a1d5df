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

from trappm.extensions.power_limits.step_power import Sheet, Steps
from trappm.learner.physics.power import CONSTANTS, Loads, Normal
from trappm.learner.stats.student_t import map_fit, precisions

Array = npt.NDArray[np.float64]

# Rough prior means from data sheets and literature.
_CENTRE = {
    "idle": 0.14, "busy": 0.15, "full": 0.8, "half": 0.8, "tf32": 0.8, "bytes": 0.8,
    "exponent": 2.0, "floor": 0.55, "streams": 0.5, "products": 0.9, "spread": 0.7,
}  # fmt: skip
_SHARED = {"idle": 0.3, "busy": 1.0, "exponent": 0.4, "floor": 0.2, "streams": 0.5,
           "products": 0.5, "spread": 0.15}  # fmt: skip
_OWN = {"idle": 0.3, "busy": 0.5, "full": 0.4, "half": 0.5, "tf32": 0.5, "bytes": 0.5}
_MIN = {"exponent": 0.2, "floor": 0.1, "streams": 0.2, "products": 0.2, "spread": 0.05}
"""Prior standard deviations between cards."""
NOISE = 0.05
"""Scale of the error of a logarithm."""
PSEUDO_CARDS = 2.0
"""Weight of the prior deviation between cards, as a number of cards."""
ROUNDS = 3
STEP = 1e-3


@dataclass(frozen=True, eq=False)
class PowerLabels:
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

    def at(self, rows: npt.NDArray[np.bool_]) -> PowerLabels:
        """Return the selected labels."""
        chosen = np.flatnonzero(rows)
        names = ("usual_ms", "usual_w", "limit_w", "power_w", "time_ms", "weight")
        parts = {name: getattr(self, name)[chosen] for name in names}
        return PowerLabels(self.card, self.sheet, self.loads.at(chosen), **parts)

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
class FittedConstants:
    """Posteriors of power constants."""

    cards: dict[str, Normal]
    unknown: Normal
    """Distribution for a card without labels."""


def fit(evidence: Sequence[PowerLabels]) -> FittedConstants:
    """Fit the constants of all cards jointly."""
    cards = sorted({part.card for part in evidence})
    size = len(CONSTANTS)
    centre = np.log([_CENTRE[name] for name in CONSTANTS])
    shared = np.array([_SHARED.get(name, 0.7) for name in CONSTANTS])
    first = np.array([_OWN.get(name, _MIN.get(name, 0.0)) for name in CONSTANTS])
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
    return FittedConstants(known, Normal(centre + values[:size], unsure))


def _most_probable(
    evidence: Sequence[PowerLabels],
    cards: Sequence[str],
    centre: Array,
    scales: Array,
    start: Array,
) -> tuple[Array, Array]:
    """Return shared shifts followed by each card's (k), and their precision (k, k)."""
    size = len(centre)
    weights = np.concatenate([np.tile(part.weight, 2) for part in evidence])

    def constants(x: Array, card: str) -> Array:
        parts = (scales * x).reshape(-1, size)
        result: Array = centre + parts[0] + parts[1 + cards.index(card)]
        return result

    def errors(x: Array) -> Array:
        return np.concatenate([part.errors(constants(x, part.card)) for part in evidence])

    def jacobian(x: Array) -> Array:
        rows = []
        for part in evidence:
            own = constants(x, part.card)
            here = part.errors(own)
            moves = [(part.errors(own + STEP * unit) - here) / STEP for unit in np.eye(size)]
            place = 1 + cards.index(part.card)
            block = np.zeros((2 * len(part.weight), len(x)))
            block[:, :size] = block[:, place * size : (place + 1) * size] = np.stack(moves, axis=1)
            rows.append(block)
        return np.concatenate(rows) * scales

    x = map_fit(
        errors, jacobian, start / scales,
        is_value=np.ones(len(weights), dtype=np.bool_),
        first_scale=NOISE, least_scale=NOISE, weights=weights,
    )  # fmt: skip
    inverse = weights * precisions(errors(x) ** 2, NOISE)
    derivatives = jacobian(x) / scales
    return scales * x, derivatives.T @ (inverse[:, None] * derivatives) + np.diag(scales**-2.0)
