"""Residual of a prior in the logarithm of a metric: one model from two labels to thousands.

A Gaussian process with Student-t noise (`learner.gaussian_process`), with the weight that has the
least relative error of out-of-fold predictions (stacking, Wolpert 1992); it may be 0. A run out of
memory has only a lower bound: a prediction above it has no error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from trappm.learner.gaussian_process import (
    MIN_NOISE,
    FoldPredictions,
    GaussianProcess,
    fit_process,
)
from trappm.learner.interface import Array, IntArray, join_tensors, with_prefix
from trappm.learner.stats.folds import grouped_folds
from trappm.learner.stats.student_t import robust_deviation
from trappm.profiler.errors import InputError

FOLDS = 5
"""Folds of architectures; the usual number."""
# Round numbers, as all below, judged by `python -m research evaluate` (docs/research/accuracy.md).
MIN_FOR_PROCESS = 6
"""Least number of labels for a process."""
CAUTION = 5.0
"""Weight of the prior guess that the process has no weight, as a number of labels."""
WEIGHT_STEP = 0.1
"""Step between the weights that are tried."""
UNKNOWN_NOISE, UNKNOWN_VOTES = 0.2, 0.5
"""Deviation of the logarithm without labels, between memory's and step time's, and its weight as a
number of labels next to fewer than `MIN_FOR_PROCESS`."""


@dataclass(frozen=True, eq=False)
class Residual:
    """A fitted residual."""

    width: int
    """Number of features."""
    noise: float
    """Robust deviation of the out-of-fold errors."""
    process: GaussianProcess | None = None
    """None with few labels."""
    weight: float = 0.0
    """Weight of the process."""

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Return mean of the residual and deviation of a label (n each) for features (n, f).

        Raises:
            InputError: The number of features differs from training.
        """
        if features.ndim != 2 or features.shape[1] != self.width:
            raise InputError(f"features have shape {features.shape}, not (n, {self.width})")
        if self.process is None or not len(features):
            return np.zeros(len(features)), np.full(len(features), self.noise)
        mean, deviation = self.process.predict(features)
        return self.weight * mean, np.hypot(deviation, self.noise)

    def tensors(self) -> dict[str, Tensor]:
        numbers = torch.tensor([self.width, self.noise, self.weight], dtype=torch.float64)
        return {"residual": numbers, **join_tensors({"process": self.process})}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Read a residual; raise KeyError or ValueError for other tensors."""
        width, noise, weight = tensors["residual"].tolist()
        process = with_prefix(tensors, "process.")
        fitted = GaussianProcess.from_tensors(process) if process else None
        return cls(int(width), noise, fitted, weight)


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
    count = len(features)
    bounds = np.full(count, np.nan) if bounds is None else bounds
    noisy = np.zeros(count) if label_errors is None else label_errors
    widths = (features.shape[-1],) if feature_groups is None else tuple(feature_groups)
    _check(features, log_residual, bounds, groups, widths)
    folds = grouped_folds(groups, FOLDS, generator) if folds is None else folds
    known = ~np.isnan(log_residual)
    process, weight = None, 0.0
    mean, spread = np.zeros(count), np.zeros(count)
    if known.sum() >= MIN_FOR_PROCESS and len(np.unique(folds[known])) > 1:
        process, unseen = fit_process(
            features, log_residual, widths, folds, generator, bounds, noisy
        )
        weight = _weight(unseen.mean, log_residual, bounds)
        mean, spread = weight * unseen.mean, unseen.deviation
    noise = _noise((log_residual - mean)[known], noisy[known])
    residual = Residual(features.shape[1], noise, process, weight)
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


def _weight(unseen: Array, values: Array, bounds: Array) -> float:
    """Return the weight from 0 to 1 of the predictions (n) with the least relative error."""
    cost = CAUTION * float(np.abs(unseen).mean())

    def loss(weight: float) -> float:
        predicted = weight * unseen
        above = np.minimum(predicted - bounds, 0.0)
        off = np.where(np.isnan(values), above, predicted - values)
        return float(np.abs(np.expm1(off)).sum()) + weight * cost

    return min((step * WEIGHT_STEP for step in range(round(1 / WEIGHT_STEP) + 1)), key=loss)


def _noise(errors: Array, noisy: Array) -> float:
    """Return the robust deviation of errors (n) in addition to the labels' own errors (n).

    Few are completed by `UNKNOWN_NOISE`.
    """
    count = len(errors)
    if not count:
        return UNKNOWN_NOISE
    deviation = max(robust_deviation(errors), MIN_NOISE)
    shrunk = errors * (deviation / np.hypot(deviation, noisy))
    deviation = max(robust_deviation(shrunk), MIN_NOISE)
    if count < MIN_FOR_PROCESS:
        votes = count * deviation**2 + UNKNOWN_VOTES * UNKNOWN_NOISE**2
        return float(np.sqrt(votes / (count + UNKNOWN_VOTES)))
    return deviation
