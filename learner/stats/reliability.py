"""How good a predicted distribution is: its score, and whether its intervals hold as often as told.

Coverage alone is bought by wide intervals. The continuous ranked probability score (Gneiting and
Raftery 2007, "Strictly proper scoring rules") is not: of a point it is the absolute error, and of a
distribution less, the better it knows where the point errs. Here it is that of the logarithm, so
that it stands beside relative errors.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trappm.learner.stats.calibration import LEVELS

Array = npt.NDArray[np.float64]

NOMINAL = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Of central intervals, whose coverage is looked at."""


def crps(log_quantiles: Array, logs: Array) -> Array:
    """The score of each of n distributions where its value was this (n).

    Exact for what the heads' quantiles at `LEVELS` say (n, levels): a distribution function that is
    straight between two of them, and reaches 0 and 1 in a step at the first and the last.
    """
    low, high = log_quantiles[:, :-1], log_quantiles[:, 1:]
    first, last = LEVELS[:-1], LEVELS[1:]
    # A piece with the value inside is two: F^2 is integrated below it, (1 - F)^2 above.
    value = np.clip(logs[:, None], low, high)
    share = np.divide(value - low, high - low, out=np.zeros_like(low), where=high > low)
    there = first + (last - first) * share
    below = (value - low) * (first**2 + first * there + there**2) / 3
    above = (high - value) * ((1 - last) ** 2 + (1 - last) * (1 - there) + (1 - there) ** 2) / 3
    beyond = np.maximum(log_quantiles[:, 0] - logs, 0) + np.maximum(logs - log_quantiles[:, -1], 0)
    score: Array = (below + above).sum(axis=1) + beyond
    return score


def coverages(log_quantiles: Array, logs: Array) -> Array:
    """What share of n values lies in the central interval of each of `NOMINAL` (nominal)."""
    shares = []
    for nominal in NOMINAL:
        low, high = (_quantile(log_quantiles, (1 + sign * nominal) / 2) for sign in (-1, 1))
        shares.append(float(np.mean((low <= logs) & (logs <= high))))
    return np.array(shares)


def _quantile(log_quantiles: Array, level: float) -> Array:
    """Of n distributions (n), between the two of `LEVELS` that are nearest."""
    after = min(max(int(np.searchsorted(LEVELS, level)), 1), len(LEVELS) - 1)
    share = (level - LEVELS[after - 1]) / (LEVELS[after] - LEVELS[after - 1])
    between: Array = (1 - share) * log_quantiles[:, after - 1] + share * log_quantiles[:, after]
    return between
