"""Residual of a prior in the logarithm of a metric: one model from two labels to thousands.

Its members are a Gaussian process with Student-t noise (`learner.gaussian_process`), the best at
few labels, and boosted trees with absolute error (`trees`), the best at many, which see the
process's prediction as a feature. Their weights have the least relative error of out-of-fold
predictions (stacking, Wolpert 1992); all may be 0. A run out of memory has only a lower bound: a
prediction above it has no error.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from trappm.learner.estimator import joined_tensors, with_prefix
from trappm.learner.gaussian_process import (
    LEAST_NOISE,
    FoldPredictions,
    GaussianProcess,
    fit_process,
)
from trappm.learner.residual.trees import Growth, Trees, grow, join
from trappm.learner.stats.folds import grouped_folds
from trappm.learner.stats.student_t import robust_deviation
from trappm.learner.workload import Array, BoolArray, IntArray
from trappm.profiler.errors import InputError

FOLDS = 5
"""Folds of architectures; the usual number."""
REPEATS = 2
"""Divisions into folds that trees are grown on: the median of several is better than one."""
# Round numbers, as all below, judged by `python -m research evaluate` (docs/research/accuracy.md).
GROWTH = Growth(rounds=300, max_depth=5, learning_rate=0.05, least_in_leaf=30.0)
LEAF_SHARE, LEAST_IN_LEAF = 0.02, 5.0
"""Share and least number of the labels in a leaf, which `GROWTH` bounds from above."""
LEAST_FOR_PROCESS, LEAST_FOR_TREES = 6, 40
"""Least number of labels for each member."""
MEMBERS = ("process", "trees")
CAUTION = 5.0
"""Weight of the prior guess that all weights are 0, as a number of labels."""
WEIGHT_STEP = 0.1
"""Step between the weights that are tried."""
UNKNOWN_NOISE, UNKNOWN_VOTES = 0.2, 0.5
"""Deviation of the logarithm without labels, between memory's and step time's, and its weight as a
number of labels next to fewer than `LEAST_FOR_PROCESS`."""


@dataclass(frozen=True, eq=False)
class Residual:
    """A fitted residual."""

    width: int
    """Number of features."""
    process: GaussianProcess | None
    trees: Trees | None
    """Models over the features and the process's prediction; None with few labels."""
    weights: Mapping[str, float]
    """Weight of each of `MEMBERS`."""
    noise: float
    """Robust deviation of the out-of-fold errors."""

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Return mean of the residual and deviation of a label (n each) for features (n, f).

        Raises:
            InputError: The number of features differs from training.
        """
        if features.ndim != 2 or features.shape[1] != self.width:
            raise InputError(f"features have shape {features.shape}, not (n, {self.width})")
        mean, variance = np.zeros(len(features)), np.full(len(features), self.noise**2)
        if self.process is not None and len(features):
            of_process, deviation = self.process.predict(features)
            mean += self.weights["process"] * of_process
            variance += deviation**2
            if self.trees is not None and self.weights["trees"]:
                seen = np.column_stack([features, of_process])
                mean += self.weights["trees"] * np.median(self.trees.predict(seen), axis=1)
        return mean, np.sqrt(variance)

    def tensors(self) -> dict[str, Tensor]:
        numbers = [self.width, self.noise, *(self.weights[name] for name in MEMBERS)]
        members = joined_tensors({"process": self.process, "trees": self.trees})
        return {"residual": torch.tensor(numbers, dtype=torch.float64), **members}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Read a residual; raise KeyError or ValueError for other tensors."""
        width, noise, *weights = tensors["residual"].tolist()
        process, trees = with_prefix(tensors, "process."), with_prefix(tensors, "trees.")
        return cls(
            width=int(width),
            process=GaussianProcess.from_tensors(process) if process else None,
            trees=Trees.from_tensors(trees) if trees else None,
            weights=dict(zip(MEMBERS, weights, strict=True)),
            noise=noise,
        )


def fit_residual(
    features: Array,
    log_residual: Array,
    groups: Sequence[str],
    generator: np.random.Generator,
    *,
    feature_groups: Sequence[int] | None = None,
    folds: IntArray | None = None,
    bounds: Array | None = None,
    label_errors: Array | None = None,
) -> tuple[Residual, FoldPredictions]:
    """Fit a residual to n labels; return it with its out-of-fold predictions.

    Args:
        features: Finite features (n, f).
        log_residual: log(measured) minus the prior's logarithm (n), best by a prior that was fitted
            without the label's fold; NaN where only a bound is known.
        groups: Architecture of each label (n).
        generator: Source of all randomness.
        feature_groups: Numbers of columns that the process scales together (default: all).
        folds: Folds of the prior (n; default: drawn here).
        bounds: Lower bounds of unknown values (n), NaN elsewhere.
        label_errors: Standard errors of the values (n; default: 0). They are part of the
            deviations that are returned, so that a noisy label widens no interval.

    Raises:
        InputError: Shapes differ, a value is not finite, or a label has neither value nor bound.
    """
    bounds = np.full(len(features), np.nan) if bounds is None else bounds
    noisy = np.zeros(len(features)) if label_errors is None else label_errors
    widths = (features.shape[-1],) if feature_groups is None else tuple(feature_groups)
    _check(features, log_residual, bounds, groups, widths)
    folds = grouped_folds(groups, FOLDS, generator) if folds is None else folds
    known = ~np.isnan(log_residual)
    unseen: dict[str, Array] = {}
    process, trees = None, None
    spread = np.zeros(len(features))
    if known.sum() >= LEAST_FOR_PROCESS and len(np.unique(folds[known])) > 1:
        process, by_process = fit_process(
            features, log_residual, widths, folds, generator, bounds, noisy
        )
        unseen["process"], spread = by_process.mean, by_process.deviation
    if known.sum() >= LEAST_FOR_TREES and process is not None:
        others = [grouped_folds(groups, FOLDS, generator) for _ in range(REPEATS - 1)]
        seen = np.column_stack([features, unseen["process"]])
        # A bound below the process's prediction teaches nothing.
        telling = known | (bounds > unseen["process"])
        values = np.where(known, log_residual, bounds)
        trees, unseen["trees"] = _grow_across(seen, values, telling, [folds, *others], generator)
    weights = _stack(unseen, log_residual, bounds)
    mean = _weighted(unseen, weights, len(features))
    noise = _noise((log_residual - mean)[known], noisy[known])
    residual = Residual(features.shape[1], process, trees, weights, noise)
    return residual, FoldPredictions(mean, np.hypot(np.hypot(spread, noise), noisy))


def _check(
    features: Array,
    log_residual: Array,
    bounds: Array,
    groups: Sequence[str],
    widths: Sequence[int],
) -> None:
    if features.ndim != 2 or not (
        log_residual.shape == bounds.shape == (len(groups),) == (len(features),)
    ):
        raise InputError(
            f"{features.shape} features, {log_residual.shape} values and {len(groups)} groups "
            "are not one of each for every label"
        )
    numbers = np.where(np.isnan(log_residual), bounds, log_residual)
    if not (np.isfinite(features).all() and np.isfinite(numbers).all()):
        raise InputError("a feature or a residual is not finite")
    if sum(widths) != features.shape[1]:
        raise InputError(f"groups of {widths} columns are not {features.shape[1]} features")


def _grow_across(
    features: Array,
    values: Array,
    telling: BoolArray,
    divisions: Sequence[IntArray],
    generator: np.random.Generator,
) -> tuple[Trees, Array]:
    """Return a model per fold of each division, and median out-of-fold predictions (n).

    Only `telling` labels (n) are learned from.
    """
    leaf = np.clip(LEAF_SHARE * len(values), LEAST_IN_LEAF, GROWTH.least_in_leaf)
    growth = replace(GROWTH, least_in_leaf=leaf)
    models, unseen = [], np.empty((len(divisions), len(values)))
    for number, folds in enumerate(divisions):
        for fold in np.unique(folds):
            out = folds == fold
            rows, seed = telling & ~out, int(generator.integers(2**31))
            models.append(grow(features[rows], values[rows], growth, seed))
            unseen[number, out] = models[-1].predict(features[out])[:, 0]
    return join(models), np.median(unseen, axis=0)


def _stack(unseen: Mapping[str, Array], values: Array, bounds: Array) -> dict[str, float]:
    """Return the weights, at most 1 together, with the least relative out-of-fold error."""

    def error(predicted: Array) -> float:
        above = np.minimum(predicted - bounds, 0.0)
        off = np.where(np.isnan(values), above, predicted - values)
        return float(np.abs(np.expm1(off)).sum())

    names = list(unseen)
    steps = round(1 / WEIGHT_STEP)
    best, lowest = (0,) * len(names), error(np.zeros(len(values)))
    cost = [CAUTION * WEIGHT_STEP * float(np.abs(unseen[name]).mean()) for name in names]
    for counts in itertools.product(range(steps + 1), repeat=len(names)):
        if sum(counts) > steps:
            continue
        shares = {name: n * WEIGHT_STEP for name, n in zip(names, counts, strict=True)}
        penalty = sum(n * c for n, c in zip(counts, cost, strict=True))
        loss = error(_weighted(unseen, shares, len(values))) + penalty
        if loss < lowest:
            best, lowest = counts, loss
    weights = {name: count * WEIGHT_STEP for name, count in zip(names, best, strict=True)}
    return {name: weights.get(name, 0.0) for name in MEMBERS}


def _weighted(unseen: Mapping[str, Array], weights: Mapping[str, float], n: int) -> Array:
    mean = np.zeros(n)
    for name, predicted in unseen.items():
        mean += weights[name] * predicted
    return mean


def _noise(errors: Array, noisy: Array) -> float:
    """Return the robust deviation of errors (n) in addition to the labels' own errors (n).

    Few are completed by `UNKNOWN_NOISE`.
    """
    count = len(errors)
    if not count:
        return UNKNOWN_NOISE
    deviation = max(robust_deviation(errors), LEAST_NOISE)
    shrunk = errors * (deviation / np.hypot(deviation, noisy))
    deviation = max(robust_deviation(shrunk), LEAST_NOISE)
    if count < LEAST_FOR_PROCESS:
        votes = count * deviation**2 + UNKNOWN_VOTES * UNKNOWN_NOISE**2
        return float(np.sqrt(votes / (count + UNKNOWN_VOTES)))
    return deviation
