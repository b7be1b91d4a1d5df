"""How much the whole pool would learn from each configuration: the heart of our strategy.

Cohn (1996), "Neural network exploration using optimal experiment design", for a Gaussian process:
measuring j lowers the sum of the variances of the pool by `sum_t C_tj^2 / (C_jj + noise)`, C being
the posterior covariance. After each pick C is downdated, so a batch is diverse, batch sizes of one
architecture do not crowd it, and what is pending counts as known: which labels come back matters to
the mean only.

With features F of p columns (C = F A F^T) everything is kept in p x p and n: no n x n matrix. What
is known at first is taken into the features, so that A begins as the identity and nothing has to be
inverted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trappm.learner.acquisition.covariance import ROWS_AT_ONCE, Covariance, FloatArray
from trappm.learner.stats.student_t import backward_solved, cholesky

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Knowledge:
    """The posterior covariance of one metric over a pool of n."""

    def __init__(self, covariance: Covariance, known: IntArray, noise_factor: Array | None) -> None:
        """
        Args:
            covariance: without any label.
            known: indices that are labelled or will be.
            noise_factor: how many times the usual variance each measurement has (n).
        """
        features: FloatArray = np.ascontiguousarray(covariance.features, dtype=np.float32)
        n, p = features.shape
        self._noise = np.full(n, covariance.noise) * (1.0 if noise_factor is None else noise_factor)
        self._gram: Array = np.zeros((p, p))
        for start in range(0, n, ROWS_AT_ONCE):
            rows = features[start : start + ROWS_AT_ONCE]
            self._gram += rows.T @ rows
        self.total = max(float(np.trace(self._gram)), 1e-12)
        """Sum of the variances without any label."""
        if len(known):
            seen = features[known].astype(np.float64)
            factor = cholesky(np.eye(p) + seen.T @ (seen / self._noise[known, None]))
            root = backward_solved(factor, np.eye(p))  # whose square is the covariance of weights
            features, self._gram = features @ root.astype(np.float32), root.T @ self._gram @ root
        self._features = features
        self._inner: Array = np.eye(p)  # A
        self.variance = self._squares(self._inner)
        """C_jj (n)."""
        self._power = self._squares(np.asarray(self._inner @ self._gram @ self._inner))

    def gains(self) -> Array:
        """By how much a label of each configuration would lower the sum of the variances (n)."""
        gains: Array = self._power / (self.variance + self._noise)
        return gains

    def learn(self, index: int) -> None:
        """Adds a label: a rank-one downdate of A, and of the two vectors that depend on it."""
        row = self._features[index].astype(np.float64)
        direction = self._inner @ row
        denominator = float(row @ direction) + float(self._noise[index])
        image = self._inner @ (self._gram @ direction)
        both = self._features @ np.stack([direction, image], axis=1).astype(np.float32)
        column, crossed = both[:, 0].astype(np.float64), both[:, 1].astype(np.float64)
        weight = float(direction @ self._gram @ direction) / denominator**2
        self.variance = np.maximum(self.variance - column**2 / denominator, 0.0)
        change = weight * column**2 - 2.0 * column * crossed / denominator
        self._power = np.maximum(self._power + change, 0.0)
        self._inner -= np.outer(direction, direction) / denominator

    def _squares(self, matrix: Array) -> Array:
        """`f matrix f` for each row f of the features (n)."""
        squares = np.empty(len(self._features))
        narrowed = matrix.astype(np.float32)
        for start in range(0, len(squares), ROWS_AT_ONCE):
            rows = self._features[start : start + ROWS_AT_ONCE]
            squares[start : start + ROWS_AT_ONCE] = np.einsum("np,np->n", rows @ narrowed, rows)
        return np.maximum(squares, 0.0)
