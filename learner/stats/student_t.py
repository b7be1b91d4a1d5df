"""Student-t errors, as weighted squares: some runs surprise everybody, and should move little.

A Student-t error is a normal one of unknown precision, so most probable parameters come from
reweighted least squares (Lange, Little and Taylor 1989); with a Gaussian process behind the values,
the expected square of an error also holds the variance of the process itself (Tipping and Lawrence
2005, "Variational inference for Student-t models").

torch, which takes a second, is imported by what computes with it: strategies are named without.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[np.float64]
ArrayOrTensor = TypeVar("ArrayOrTensor", Array, "Tensor")

DEGREES_OF_FREEDOM = 4.0
"""Fixed, as Lange, Little and Taylor (1989) advise where few errors could tell them."""
PSEUDO_LABELS = 2.0
"""So many labels' worth of belief stand behind the guess of a scale."""
GAMMA_NODES = 60
"""Of the quadrature over precisions, which is then right to three digits."""
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
    factor: Array
    """Of the labels' covariance with their noise, by Cholesky: lower triangular (n, n)."""
    precision: Array
    """Of each label's noise (n)."""
    noise: float
    """Scale of the noise."""

    def explained(self, across: Array) -> Array:
        """The variance that labels take away of m points with these covariances (m, n): (m)."""
        squares: Array = (forward_solved(self.factor, across.T) ** 2).sum(axis=0)
        return squares

    def unseen(self, rows: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """Errors and variances of some labels by the others alone (k) each, noise included.

        These are blocks of the inverse (Rasmussen and Williams 2006, section 5.4.2), solved from
        its factor: the k columns of it, and the block of k.
        """
        columns = forward_solved(self.factor, np.eye(len(self.factor))[:, rows])
        block = cholesky(columns.T @ columns)
        errors = backward_solved(block, forward_solved(block, self.weights[rows]))
        spread: Array = (forward_solved(block, np.eye(len(rows))) ** 2).sum(axis=0)
        return errors, spread


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
        steps: of reweighting; each is one factorisation.
        least_noise: a smaller scale is not believed.
        guess: of the scale, worth `PSEUDO_LABELS`; by default that of the step before.
    """
    precision = np.full(len(values), 1.0 / noise**2)
    weights, factor = values, covariance
    for _ in range(steps):
        factor = cholesky(covariance + np.diag(1.0 / precision))
        weights = backward_solved(factor, forward_solved(factor, values))
        # Errors of the fit and their variance, which is what is left of the process.
        squares = (weights / precision) ** 2
        left = np.diag(covariance) - (forward_solved(factor, covariance) ** 2).sum(axis=0)
        squares += np.maximum(left, 0.0)
        noise = fitted_scale(squares, noise, guess=guess or noise, lowest=least_noise)
        precision = precisions(squares, noise)
    return SolvedLabels(weights, factor, precision, noise)


def cholesky(matrix: Array) -> Array:
    """The lower factor of a positive definite matrix."""
    import torch

    factor: Array = torch.linalg.cholesky(torch.from_numpy(matrix)).numpy()
    return factor


def forward_solved(factor: Array, right: Array) -> Array:
    """x with `factor @ x = right`, for right sides (n) or (n, m)."""
    return _triangular(factor, right, upper=False)


def backward_solved(factor: Array, right: Array) -> Array:
    """x with `factor.T @ x = right`, for right sides (n) or (n, m)."""
    return _triangular(factor.T, right, upper=True)


def _triangular(factor: Array, right: Array, *, upper: bool) -> Array:
    import torch

    columns = torch.from_numpy(right if right.ndim == 2 else right[:, None])
    solved = torch.linalg.solve_triangular(torch.from_numpy(factor), columns, upper=upper)
    shaped: Array = solved.numpy().reshape(right.shape)
    return shaped


def half_widths(variances: Array, scale: float, coverage: float) -> Array:
    """Half the width of the interval that so large a share of new values lies in (n).

    A new value is a normal one of this variance (n) with a Student-t error of this scale: normal
    where the process knows little, and with heavy tails where only the error is left.
    """
    deviation = np.sqrt(variances + scale**2)
    widths: Array = deviation * np.interp((scale / deviation) ** 2, *_half_widths(coverage))
    return widths


@cache
def _half_widths(coverage: float) -> tuple[Array, Array]:
    """Of sums of variance 1 before tails, by the share of it that is the error's: (33) each."""
    import torch

    shares = np.linspace(0.0, 1.0, 33)
    # A Student-t error is a normal one of a precision that is gamma distributed.
    nodes, weights = np.polynomial.laguerre.laggauss(GAMMA_NODES)
    weights = weights * nodes ** (DEGREES_OF_FREEDOM / 2 - 1)
    precision = nodes / (DEGREES_OF_FREEDOM / 2)
    deviations = torch.from_numpy(np.sqrt(1.0 - shares[:, None] + shares[:, None] / precision))
    low, high = np.full(len(shares), 0.0), np.full(len(shares), 100.0)
    for _ in range(60):
        middle = (low + high) / 2
        inside = torch.special.erf(torch.from_numpy(middle)[:, None] / (2**0.5 * deviations))
        enough = (inside.numpy() * weights).sum(axis=1) / weights.sum() > coverage
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return shares, high
