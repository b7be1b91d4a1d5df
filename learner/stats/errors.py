"""Relative errors of predictions, and a split that holds whole architectures out.

Batch variants of one architecture are near-copies, so a test set must not divide any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from trappm.learner.interface import Array
from trappm.learner.stats.calibration import LEVELS
from trappm.profiler.errors import InputError
from trappm.profiler.models.families import family_of
from trappm.profiler.records import Configuration


class Accuracy(TypedDict):
    """Errors of predictions against measurements, ready for JSON; relative ones in percent."""

    count: int
    mape: float
    """Mean absolute percentage error."""
    median_ape: float
    rmse: float
    """Root mean square error in the metric's unit."""
    within_10_percent: float
    """Share of predictions that are off by at most a tenth, in percent."""
    kendall_tau: float | None
    """Rank correlation (tau-b); None where it is not defined: one point, or all equal."""
    coverage: float | None
    """Share of measurements inside their predicted interval, in percent."""
    crps: float | None
    """Mean continuous ranked probability score of the logarithm, in percent: the absolute error of
    a whole distribution, so a point that is 3 % off has 3, and 0 is the best."""


def accuracy(
    measured: Array,
    predicted: Array,
    low: Array | None = None,
    high: Array | None = None,
    log_quantiles: Array | None = None,
) -> Accuracy:
    """Return the errors of predictions; pairs with NaN are left out.

    Args:
        measured, predicted, low, high: Values and bounds of intervals (n each).
        log_quantiles: Quantiles of the predicted logarithm at `LEVELS` (n, levels).

    Raises:
        InputError: No pair is complete, or a measurement is not positive.
    """
    complete = ~(np.isnan(measured) | np.isnan(predicted))
    truth, guess = measured[complete], predicted[complete]
    if not len(truth):
        raise InputError("there is nothing to evaluate: no measurement has a prediction")
    if np.any(truth <= 0):
        raise InputError("a measured value is not positive; relative errors need positive ones")
    relative = np.abs(guess - truth) / truth
    coverage = None
    if low is not None and high is not None:
        inside = (low[complete] <= truth) & (truth <= high[complete])
        coverage = 100 * float(inside.mean())
    return Accuracy(
        count=len(truth),
        mape=100 * float(relative.mean()),
        median_ape=100 * float(np.median(relative)),
        rmse=float(np.sqrt(np.mean((guess - truth) ** 2))),
        within_10_percent=100 * float(np.mean(relative <= 0.1)),
        kendall_tau=kendall_tau(truth, guess),
        coverage=coverage,
        crps=None
        if log_quantiles is None
        else 100 * float(crps(log_quantiles[complete], np.log(truth)).mean()),
    )


def kendall_tau(first: Array, second: Array) -> float | None:
    """Return Kendall's tau-b of two rankings (n); None if either has no two distinct values."""
    if len(first) < 2:
        return None
    from scipy.stats import kendalltau  # type: ignore[import-untyped]  # takes half a second

    tau = float(kendalltau(first, second).statistic)
    return None if np.isnan(tau) else tau


def crps(log_quantiles: Array, logs: Array) -> Array:
    """Return the continuous ranked probability score of n distributions for values (n).

    Gneiting and Raftery 2007, "Strictly proper scoring rules". The score of a point is its absolute
    error. The distribution function is linear between quantiles at `LEVELS` (n, levels), and
    reaches 0 and 1 in a step at the first and the last.
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


def split_architectures(
    configurations: Sequence[Configuration],
    share: float,
    generator: np.random.Generator,
    groups: Sequence[str] | None = None,
) -> set[str]:
    """Return the architectures to hold out, drawn uniformly within each family.

    A family never gives its only architecture. At least one architecture is held out, and at least
    one is not.

    Args:
        configurations: Configurations to divide (n).
        share: Share of the architectures to hold out; rounded at random within each family.
        generator: Draws the architectures.
        groups: Group of each configuration (`learner.stats.folds.content_groups`); architectures
            of one group are held out together.

    Raises:
        InputError: The share is not between 0 and 1, or there are fewer than two architectures.
    """
    if not 0 < share < 1:
        raise InputError(f"the share held out is {share}; it must be between 0 and 1")
    names = [c.architecture for c in configurations]
    members_of: dict[str, set[str]] = defaultdict(set)
    for name, group in zip(names, names if groups is None else groups, strict=True):
        members_of[group].add(name)
    architectures = sorted(members_of)
    if len(architectures) < 2:
        raise InputError("holding architectures out needs two or more of them")
    families: dict[str, list[str]] = defaultdict(list)
    for architecture in architectures:
        families[family_of(architecture)].append(architecture)
    held_out: set[str] = set()
    # The fraction that one family could not give is owed by the next ones.
    owed = float(generator.random())
    for name in generator.permutation(sorted(families)).tolist():
        members = families[name]
        owed += share * len(members)
        count = max(0, min(int(owed), len(members) - 1))
        held_out.update(generator.permutation(members)[:count].tolist())
        owed -= count
    if not held_out:
        spare = [a for members in families.values() if len(members) > 1 for a in members]
        held_out.add(str(generator.choice(spare or architectures)))
    return {name for group in held_out for name in members_of[group]}
