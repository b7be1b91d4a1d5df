"""Student-t errors, as weighted squares: some runs surprise everybody, and should move little.

A Student-t error is a normal one of unknown precision, so most probable parameters come from
reweighted least squares (Lange, Little and Taylor 1989); with a Gaussian process behind the values,
the expected square of an error also holds the variance of the process itself (Tipping and Lawrence
2005, "Variational inference for Student-t models").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]
ArrayOrTensor = TypeVar("ArrayOrTensor", Array, Tensor)

DEGREES_OF_FREEDOM = 4.0
"""Fixed, as Lange, Little and Taylor (1989) advise where few errors could tell them."""
PSEUDO_LABELS = 2.0
"""So many labels' worth of belief stand behind the guess of a scale."""
TO_NORMAL = 1.4826
"""Deviation of a normal distribution over its median absolute deviation: 1 / 0.6745."""


def robust_deviation(values: Array) -> float:
    """Deviation of the middle half of values around zero (n), as of a normal distribution."""
    return TO_NORMAL * float(np.median(np.abs(values)))


def precisions(
    squares: ArrayOrTensor, scale: float, degrees: float = DEGREES_OF_FREEDOM
) -> ArrayOrTensor:
    """Precision of the normal errors that pull as Student-t errors with these squares do (n)."""
    return (degrees + 1.0) / (degrees * scale**2 + squares)


def losses(errors: Array, scale: Array | float) -> Array:
    """Negative log density of errors (n) of this scale, one or (n), up to a constant (n)."""
    degrees = DEGREES_OF_FREEDOM
    tails = 0.5 * (degrees + 1.0) * np.log1p((errors / scale) ** 2 / degrees)
    negative_logs: Array = np.log(scale) + tails
    return negative_logs


def fitted_scale(squares: Array, scale: float, *, guess: float, lowest: float) -> float:
    """The scale of Student-t errors, one step on from `scale`, from expected squares (n)."""
    weights = precisions(squares, scale) * scale**2
    total = float((weights * squares).sum()) + PSEUDO_LABELS * guess**2
    return max(float(np.sqrt(total / (len(squares) + PSEUDO_LABELS))), lowest)


@dataclass(frozen=True, eq=False)
class SolvedLabels:
    """A Gaussian process with Student-t noise, as n labels determine it."""

    weights: Array
    """The inverse covariance times the labels (n)."""
    inverse: Array
    """Of the labels' covariance with their noise (n, n)."""
    precision: Array
    """Of each label's noise (n)."""
    noise: float
    """Scale of the noise."""


def solve(
    covariance: Array,
    values: Array,
    noise: float,
    *,
    steps: int,
    least_noise: float,
    guess: float | None = None,
) -> SolvedLabels:
    """The process of n labels, their noise found by reweighting.

    Args:
        covariance: of the labels without noise (n, n).
        values: the labels (n).
        noise: the scale to start from.
        steps: of reweighting; each is one inversion.
        least_noise: a smaller scale is not believed.
        guess: of the scale, worth `PSEUDO_LABELS`; by default that of the step before.
    """
    precision = np.full(len(values), 1.0 / noise**2)
    weights, inverse = values, covariance
    for _ in range(steps):
        inverse = inverted(covariance + np.diag(1.0 / precision))
        weights = inverse @ values
        # Errors of the fit and their variance (Rasmussen and Williams 2006, section 5.4.2).
        squares = (weights / precision) ** 2
        squares += (1.0 - np.diag(inverse) / precision) / precision
        noise = fitted_scale(squares, noise, guess=guess or noise, lowest=least_noise)
        precision = precisions(squares, noise)
    return SolvedLabels(weights, inverse, precision, noise)


def inverted(matrix: Array) -> Array:
    """The inverse of a positive definite matrix."""
    factor = torch.linalg.cholesky(torch.from_numpy(matrix))
    inverse: Array = torch.cholesky_inverse(factor).numpy()
    return inverse
