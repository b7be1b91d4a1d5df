"""What a prior leaves of a metric, in the logarithm: one model from two labels to thousands.

Two members explain it: a Gaussian process with Student-t noise (`learner.gaussian_process`),
which is best at few labels, and boosted trees with absolute error (`trees`), which are best at many
and see the prediction of the process as one more feature. Both predict every label without its fold
(folds hold whole architectures), and their weights are those with the least relative error of these
out-of-fold predictions (stacking, Wolpert 1992). All weights may be 0: a residual that has learned
nothing adds nothing. Of a run that died only a lower bound is known: a prediction above it is no
error. Nothing here depends on the metric.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trappm.learner.gaussian_process import (
    LEAST_NOISE,
    FoldPredictions,
    GaussianProcess,
    fit_process,
)
from trappm.learner.residual.trees import Growth, Trees, grow, join
from trappm.learner.stats.folds import grouped_folds
from trappm.learner.stats.student_t import robust_deviation
from trappm.learner.tensors import with_prefix
from trappm.profiler.errors import InputError

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

FOLDS = 5
"""Of architectures, for out-of-fold errors; the usual number."""
REPEATS = 2
"""Trees are grown on so many divisions into folds: the median of several is better than one."""
# Round numbers: `python -m research evaluate` tells what heads reach with them (docs/accuracy.md).
GROWTH = Growth(rounds=300, max_depth=5, learning_rate=0.05, least_in_leaf=30.0)
LEAF_SHARE = 0.02
"""A leaf holds this share of the labels, at least `LEAST_IN_LEAF` and at most as `GROWTH` says."""
LEAST_IN_LEAF = 5.0
"""A round number: the mean of fewer labels is mostly noise."""
# Where members begin, and how cautious weights are, are round numbers: what heads reach from 10
# labels on, `python -m research evaluate --label-counts` tells (docs/accuracy.md).
LEAST_FOR_PROCESS = 6
LEAST_FOR_TREES = 40
"""With fewer labels a member is not tried."""
MEMBERS = ("process", "trees")
CAUTION = 5.0
"""The weights start from nothing, a guess that weighs as much as so many labels."""
WEIGHT_STEP = 0.1
"""Weights that are tried lie so far apart."""
UNKNOWN_NOISE = 0.2
"""Deviation of the logarithm where there are no labels: between memory's and step time's."""
UNKNOWN_VOTES = 0.5
"""The guess counts as so many labels beside fewer than `LEAST_FOR_PROCESS`: one or two labels that
agree prove little."""


@dataclass(frozen=True, eq=False)
class Residual:
    """A fitted model of what a prior leaves."""

    width: int
    """Number of features."""
    process: GaussianProcess | None
    trees: Trees | None
    """Models over the features and the process's prediction; none at few labels."""
    weights: Mapping[str, float]
    """How much of the prediction of each of `MEMBERS` is taken."""
    noise: float
    """Robust deviation of the errors on folds not seen."""

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Mean of the residual for n rows of features (n), and the deviation of a new label (n).

        Raises:
            InputError: another number of features than in training.
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
        tensors = {"residual": torch.tensor(numbers, dtype=torch.float64)}
        for name, member in (("process", self.process), ("trees", self.trees)):
            if member is not None:
                tensors |= {f"{name}.{k}": v for k, v in member.tensors().items()}
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Raises KeyError or ValueError for tensors that are not those of a residual."""
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
) -> tuple[Residual, FoldPredictions]:
    """Fits a residual to n labels; beside it, its predictions of each without its architecture.

    Args:
        features: (n, f), finite.
        log_residual: log(measured) less the prior's logarithm (n); best by a prior that was fitted
            without the label's fold. NaN where only a bound is known.
        groups: the architecture of each label (n).
        generator: all randomness comes from it.
        feature_groups: numbers of columns that the process scales together, in order (sum f); by
            default all in one.
        folds: those of the prior (n); by default drawn here.
        bounds: lower bounds of the values that are not known (n), NaN elsewhere.

    Raises:
        InputError: shapes that differ, values that are not finite, or neither a value nor a bound.
    """
    bounds = np.full(len(features), np.nan) if bounds is None else bounds
    widths = (features.shape[-1],) if feature_groups is None else tuple(feature_groups)
    _check(features, log_residual, bounds, groups, widths)
    folds = grouped_folds(groups, FOLDS, generator) if folds is None else folds
    known = ~np.isnan(log_residual)
    unseen: dict[str, Array] = {}
    process, trees = None, None
    spread = np.zeros(len(features))
    if known.sum() >= LEAST_FOR_PROCESS and len(np.unique(folds[known])) > 1:
        process, by_process = fit_process(features, log_residual, widths, folds, generator, bounds)
        unseen["process"], spread = by_process.mean, by_process.deviation
    if known.sum() >= LEAST_FOR_TREES and process is not None:
        others = [grouped_folds(groups, FOLDS, generator) for _ in range(REPEATS - 1)]
        seen = np.column_stack([features, unseen["process"]])
        # A bound below the process's prediction has nothing that trees could learn.
        telling = known | (bounds > unseen["process"])
        values = np.where(known, log_residual, bounds)
        trees, unseen["trees"] = _grow_across(seen, values, telling, [folds, *others], generator)
    weights = _stack(unseen, log_residual, bounds)
    mean = _weighted(unseen, weights, len(features))
    noise = _noise((log_residual - mean)[known])
    residual = Residual(features.shape[1], process, trees, weights, noise)
    return residual, FoldPredictions(mean, np.hypot(spread, noise))


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
    telling: npt.NDArray[np.bool_],
    divisions: Sequence[IntArray],
    generator: np.random.Generator,
) -> tuple[Trees, Array]:
    """A model for each fold of each division; the median prediction of labels not seen (n).

    Only `telling` labels (n) are learned from.
    """
    leaf = np.clip(LEAF_SHARE * len(values), LEAST_IN_LEAF, GROWTH.least_in_leaf)
    growth = replace(GROWTH, least_in_leaf=leaf)
    parts = [
        (number, folds == fold, int(generator.integers(2**31)))
        for number, folds in enumerate(divisions)
        for fold in np.unique(folds)
    ]

    def grown(part: tuple[int, npt.NDArray[np.bool_], int]) -> Trees:
        _, out, seed = part
        rows = telling & ~out
        return grow(features[rows], values[rows], growth, seed)

    models = [grown(part) for part in parts]
    unseen = np.empty((len(divisions), len(values)))
    for (number, out, _), model in zip(parts, models, strict=True):
        unseen[number, out] = model.predict(features[out])[:, 0]
    return join(models), np.median(unseen, axis=0)


def _stack(unseen: Mapping[str, Array], values: Array, bounds: Array) -> dict[str, float]:
    """Weights, at most 1 together, with the least relative error of out-of-fold predictions."""

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


def _noise(errors: Array) -> float:
    """Robust deviation of errors; few of them are completed by `UNKNOWN_NOISE`."""
    count = len(errors)
    if not count:
        return UNKNOWN_NOISE
    deviation = max(robust_deviation(errors), LEAST_NOISE)
    if count < LEAST_FOR_PROCESS:
        votes = count * deviation**2 + UNKNOWN_VOTES * UNKNOWN_NOISE**2
        return float(np.sqrt(votes / (count + UNKNOWN_VOTES)))
    return deviation
