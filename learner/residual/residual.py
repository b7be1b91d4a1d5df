"""What a prior leaves of a metric, in the logarithm: one model from two labels to thousands.

Two members explain it: a Gaussian process with Student-t noise (`gaussian_process`), which
is best at few labels, and boosted trees with absolute error (`trees`), which are best at
many and see what the process says as one more feature. Each says what it would of every label
without the label's fold (folds hold whole architectures), and the weights with the least relative
error of these out-of-fold words are how much of each to take (stacking, Wolpert 1992). All weights
may be 0: a residual that knows nothing stays silent. Of a label that is only known to lie above a
bound, what is said above it is no error. Nothing here knows the metric.
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

from trappm.learner.residual.trees import Growth, Trees, grow, join
from trappm.learner.stats.gaussian_process import (
    LEAST_NOISE,
    FoldPredictions,
    GaussianProcess,
    fit_process,
)
from trappm.profiler.errors import InputError

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

FOLDS = 5
REPEATS = 2
"""Trees are grown on so many divisions into folds: the median of several is better than one."""
GROWTH = Growth(rounds=300, max_depth=5, learning_rate=0.05, least_in_leaf=30.0)
LEAF_SHARE = 0.02
"""A leaf of few labels holds this share of them, at least 5 and at most as `GROWTH` says."""
LEAST_FOR_PROCESS = 6
LEAST_FOR_TREES = 40
"""With fewer labels a member is not tried."""
MEMBERS = ("process", "trees")
CAUTION = 5.0
"""The weights start from nothing, a guess that weighs as much as so many labels."""
WEIGHT_STEP = 0.1
UNKNOWN_NOISE = 0.2
"""Deviation of the logarithm where there are no labels: between memory's and step time's."""
UNKNOWN_VOTES = 0.5
"""Of so many labels, beside fewer than `LEAST_FOR_PROCESS`: that one or two agree says little."""


@dataclass(frozen=True, eq=False)
class Residual:
    """A fitted model of what a prior leaves."""

    width: int
    """Number of features."""
    process: GaussianProcess | None
    trees: Trees | None
    """Models over the features and the process's word; none at few labels."""
    weights: Mapping[str, float]
    """How much of the word of each of `MEMBERS` to take."""
    noise: float
    """Robust deviation of the errors on folds not seen."""

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Mean of the residual for n rows of features, and the deviation of a new label (n) each.

        Raises:
            InputError: another number of features than in training.
        """
        if features.ndim != 2 or features.shape[1] != self.width:
            raise InputError(f"features have shape {features.shape}, not (n, {self.width})")
        mean, variance = np.zeros(len(features)), np.full(len(features), self.noise**2)
        if self.process is not None and len(features):
            word, deviation = self.process.predict(features)
            mean += self.weights["process"] * word
            variance += deviation**2
            if self.trees is not None and self.weights["trees"]:
                seen = np.column_stack([features, word])
                mean += self.weights["trees"] * np.median(self.trees.predict(seen), axis=1)
        return mean, np.sqrt(variance)

    def tensors(self) -> dict[str, Tensor]:
        numbers = [self.width, self.noise, *(self.weights[name] for name in MEMBERS)]
        found = {"residual": torch.tensor(numbers, dtype=torch.float64)}
        if self.process is not None:
            found |= {f"process.{k}": v for k, v in self.process.tensors().items()}
        if self.trees is not None:
            found |= {f"trees.{k}": v for k, v in self.trees.tensors().items()}
        return found

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Raises KeyError or ValueError for tensors that are not those of a residual."""

        def within(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        width, noise, *weights = tensors["residual"].tolist()
        process, trees = within("process."), within("trees.")
        return cls(
            width=int(width),
            process=GaussianProcess.from_tensors(process) if process else None,
            trees=Trees.from_tensors(trees) if trees else None,
            weights=dict(zip(MEMBERS, weights, strict=True)),
            noise=noise,
        )


def grouped_folds(groups: Sequence[str], count: int, generator: np.random.Generator) -> IntArray:
    """The fold of each label (n): architectures dealt out at random, none divided.

    Labels of one single architecture are dealt out one by one: near-copies are better than nothing.
    """
    names, number = np.unique(np.array(groups), return_inverse=True)
    if len(names) == 1:
        number = np.arange(len(groups))
    order = generator.permutation(int(number.max()) + 1)
    found: IntArray = (order[number] % min(count, len(order))).astype(np.int64)
    return found


def fit_residual(
    features: Array,
    log_residual: Array,
    groups: Sequence[str],
    generator: np.random.Generator,
    *,
    feature_groups: Sequence[int] | None = None,
    folds: IntArray | None = None,
    least: Array | None = None,
) -> tuple[Residual, FoldPredictions]:
    """A residual of n labels, and what it says of each label without its architecture.

    Args:
        features: (n, f), finite.
        log_residual: log(measured) less the prior's logarithm (n); best by a prior that was fitted
            without the label's fold. NaN where only a bound is known.
        groups: the architecture of each label (n).
        generator: all randomness comes from it.
        feature_groups: numbers of columns that the process scales together, in order (sum f); by
            default all in one.
        folds: those of the prior (n); by default drawn here.
        least: lower bounds of the values that are not known (n), NaN elsewhere.

    Raises:
        InputError: shapes that differ, values that are not finite, or neither a value nor a bound.
    """
    n = len(features)
    bounds = np.full(n, np.nan) if least is None else least
    if features.ndim != 2 or not log_residual.shape == bounds.shape == (len(groups),) == (n,):
        raise InputError(
            f"{features.shape} features, {log_residual.shape} values and {len(groups)} groups "
            "are not one of each for every label"
        )
    known = ~np.isnan(log_residual)
    if not (
        np.isfinite(features).all() and np.isfinite(np.where(known, log_residual, bounds)).all()
    ):
        raise InputError("a feature or a residual is not finite")
    widths = (features.shape[1],) if feature_groups is None else tuple(feature_groups)
    if sum(widths) != features.shape[1]:
        raise InputError(f"groups of {widths} columns are not {features.shape[1]} features")
    if folds is None:
        folds = grouped_folds(groups, FOLDS, generator) if n else np.zeros(0, np.int64)
    words: dict[str, Array] = {}
    process, trees = None, None
    spread = np.zeros(n)
    count = np.count_nonzero(known)
    if count >= LEAST_FOR_PROCESS and len(np.unique(folds[known])) > 1:
        process, unseen = fit_process(features, log_residual, widths, folds, generator, bounds)
        words["process"], spread = unseen.mean, unseen.deviation
    if count >= LEAST_FOR_TREES and process is not None:
        divisions = [folds]
        divisions += [grouped_folds(groups, FOLDS, generator) for _ in range(REPEATS - 1)]
        growth = replace(GROWTH, least_in_leaf=np.clip(LEAF_SHARE * n, 5, GROWTH.least_in_leaf))
        seen = np.column_stack([features, words["process"]])
        # A bound below the process's word says nothing that trees could learn.
        telling = known | (bounds > words["process"])
        values = np.where(known, log_residual, bounds)
        trees, words["trees"] = _grow_across(seen, values, telling, divisions, growth, generator)
    weights = _stack(words, log_residual, bounds)
    mean = np.zeros(n)
    for name, word in words.items():
        mean += weights[name] * word
    noise = _robust_deviation((log_residual - mean)[known])
    residual = Residual(features.shape[1], process, trees, weights, noise)
    return residual, FoldPredictions(mean, np.hypot(spread, noise))


def _grow_across(
    features: Array,
    values: Array,
    telling: npt.NDArray[np.bool_],
    divisions: Sequence[IntArray],
    growth: Growth,
    generator: np.random.Generator,
) -> tuple[Trees, Array]:
    """A model for each fold of each division, and the median word on labels not seen (n).

    Only `telling` labels (n) are learned from.
    """
    models = []
    unseen = np.empty((len(divisions), len(values)))
    for number, folds in enumerate(divisions):
        for fold in np.unique(folds):
            out = folds == fold
            rows = telling & ~out
            models.append(grow(features[rows], values[rows], growth, generator))
            unseen[number, out] = models[-1].predict(features[out])[:, 0]
    return join(models), np.median(unseen, axis=0)


def _stack(words: Mapping[str, Array], values: Array, bounds: Array) -> dict[str, float]:
    """Weights, at most 1 together, with the least relative error of words on labels not seen."""

    def error(said: Array) -> float:
        off = np.where(np.isnan(values), np.minimum(said - bounds, 0.0), said - values)
        return float(np.abs(np.expm1(off)).sum())

    names = list(words)
    steps = round(1 / WEIGHT_STEP)
    best, least = (0,) * len(names), error(np.zeros(len(values)))
    cost = [CAUTION * WEIGHT_STEP * float(np.abs(words[name]).mean()) for name in names]
    for tried in itertools.product(range(steps + 1), repeat=len(names)):
        if sum(tried) > steps:
            continue
        said = np.zeros(len(values))
        for t, name in zip(tried, names, strict=True):
            said += t * WEIGHT_STEP * words[name]
        loss = error(said) + sum(t * c for t, c in zip(tried, cost, strict=True))
        if loss < least:
            best, least = tried, loss
    found = {name: t * WEIGHT_STEP for name, t in zip(names, best, strict=True)}
    return {name: found.get(name, 0.0) for name in MEMBERS}


def _robust_deviation(values: Array) -> float:
    """Deviation of the middle half, as of a normal distribution around zero."""
    count = len(values)
    if not count:
        return UNKNOWN_NOISE
    found = max(1.4826 * float(np.median(np.abs(values))), LEAST_NOISE)
    if count < LEAST_FOR_PROCESS:
        votes = count * found**2 + UNKNOWN_VOTES * UNKNOWN_NOISE**2
        return float(np.sqrt(votes / (count + UNKNOWN_VOTES)))
    return found
