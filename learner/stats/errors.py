"""How good predictions are: relative errors, ranking, and a split by whole architectures.

Batch variants of one architecture are near-copies, so a test set must hold whole architectures out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from trappm.learner.stats.reliability import crps
from trappm.profiler.errors import InputError
from trappm.profiler.models.families import family_of
from trappm.profiler.records import Configuration

Array = npt.NDArray[np.float64]

MAX_PAIRED = 2_000
"""Kendall's tau compares all pairs; of more points than this an even sample is taken."""


class Accuracy(TypedDict):
    """Errors of predictions against measurements, ready for JSON; relative ones in percent."""

    count: int
    mape: float
    """Mean absolute percentage error."""
    median_ape: float
    rmse: float
    """In the metric's unit."""
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
    """Errors of n predictions (n), with their intervals and distributions (n, levels) if given.

    Pairs with NaN are left out.

    Raises:
        InputError: the shapes differ, no pair is complete, or a measurement is not positive.
    """
    if measured.shape != predicted.shape or measured.ndim != 1:
        raise InputError(f"measured has shape {measured.shape}, predicted {predicted.shape}")
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
    """Kendall's tau-b of two rankings (n) each; None if either has no two different values."""
    if len(first) > MAX_PAIRED:
        chosen = np.linspace(0, len(first) - 1, MAX_PAIRED).astype(np.int64)
        first, second = first[chosen], second[chosen]
    rows, columns = np.triu_indices(len(first), k=1)
    a = np.sign(first[rows] - first[columns])
    b = np.sign(second[rows] - second[columns])
    untied = float(np.sqrt(np.count_nonzero(a) * np.count_nonzero(b)))
    return float((a * b).sum()) / untied if untied else None


def split_architectures(
    configurations: Sequence[Configuration],
    share: float,
    generator: np.random.Generator,
    groups: Sequence[str] | None = None,
) -> set[str]:
    """The architectures to hold out: about `share` of all, drawn uniformly within each family.

    Each family gives its share, rounded at random so that the sum comes out right on average, but
    never its only architecture, of which nothing could be learned then. At least one architecture
    is held out, and at least one is not. Where `groups` say with whom each configuration is held
    out (`learner.stats.folds.content_groups`), twins under two names count as one, and both names
    are returned.

    Raises:
        InputError: the share is not between 0 and 1, or there are fewer than two architectures.
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
