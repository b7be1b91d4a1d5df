"""Covariance of a metric over a pool, and how labels reduce it.

The covariance of the metric's logarithm is stored as feature vectors F (n, p) whose inner products
are covariances, so a pool of n configurations needs no n x n matrix. `PoolPosterior` computes by
how much each label would lower the variance of the whole pool (Cohn 1996, "Neural network
exploration using optimal experiment design"): measuring j lowers the sum of the variances by
`sum_t C_tj^2 / (C_jj + noise)`, with the posterior covariance C = F A F^T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trappm.learner.interface import Array, FloatArray, IntArray

WIDTH = 320
"""Largest number of features."""
ROWS_AT_ONCE = 8192
"""Bounds the memory of one product."""
# Round numbers; strategies were compared with them on splits of seeds 100 to 119
# (docs/research/acquisition.md).
LANDMARKS = 256
COMPONENTS = 16
"""Principal components of the embedding."""
LINEAR_SHARE = 0.3
"""Variance of the linear part relative to the smooth part."""
CLIP = 6.0
"""Largest distance of a scaled feature from the mean, in standard deviations."""


@dataclass(frozen=True, eq=False)
class PoolCovariance:
    """Covariance of one metric on one device over a pool of n configurations."""

    features: FloatArray
    """(n, p): inner products are covariances of the metric's logarithm without labels."""
    noise: float
    """Variance of one label around what the features explain."""

    @property
    def deviation(self) -> Array:
        """Standard deviation of each configuration without labels (n)."""
        squares = np.einsum("np,np->n", self.features, self.features, dtype=np.float64)
        return np.asarray(np.sqrt(squares))


def narrow(features: FloatArray, width: int = WIDTH) -> FloatArray:
    """Return the directions of features (n, p) with the most variance: (n, at most `width`)."""
    if features.shape[1] <= width:
        return features
    _, vectors = np.linalg.eigh(_gram(features))
    leading = vectors[:, -width:].astype(np.float32)
    return features @ leading


def _gram(features: FloatArray) -> Array:
    """Return F^T F (p, p)."""
    gram = np.zeros((features.shape[1],) * 2)
    for start in range(0, len(features), ROWS_AT_ONCE):
        rows = features[start : start + ROWS_AT_ONCE]
        gram += rows.T @ rows
    return gram


class PoolPosterior:
    """Posterior covariance of one metric over a pool, one label after the other."""

    def __init__(
        self, covariance: PoolCovariance, known: IntArray, noise_factor: Array | None
    ) -> None:
        """Condition on labelled configurations.

        Args:
            covariance: Covariance without any label.
            known: Indices of labelled configurations.
            noise_factor: Noise variance of each measurement relative to the usual one (n).
        """
        features = np.ascontiguousarray(covariance.features, dtype=np.float32)
        n, p = features.shape
        self._noise = np.full(n, covariance.noise) * (1.0 if noise_factor is None else noise_factor)
        self._gram = _gram(features)
        self.total = max(float(np.trace(self._gram)), 1e-12)
        """Sum of the variances without any label."""
        if len(known):  # moved into the features, so that A begins as the identity
            seen = features[known].astype(np.float64)
            precision = np.eye(p) + seen.T @ (seen / self._noise[known, None])
            root = np.linalg.inv(np.linalg.cholesky(precision)).T
            features, self._gram = features @ root.astype(np.float32), root.T @ self._gram @ root
        self._features = features
        self._inner: Array = np.eye(p)
        """A (p, p)."""
        self.variance = self._squares(self._inner)
        """C_jj (n)."""
        self._power = self._squares(self._gram)
        """sum_t C_tj^2 (n)."""

    def gains(self) -> Array:
        """Return by how much a label of each configuration lowers the sum of variances (n)."""
        gains: Array = self._power / (self.variance + self._noise)
        return gains

    def learn(self, index: int) -> None:
        """Add a label: a rank-one downdate of A and of both vectors that depend on it."""
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
        """Return `f matrix f` for each row f of the features (n)."""
        squares = np.empty(len(self._features))
        narrowed = matrix.astype(np.float32)
        for start in range(0, len(squares), ROWS_AT_ONCE):
            rows = self._features[start : start + ROWS_AT_ONCE]
            squares[start : start + ROWS_AT_ONCE] = np.einsum("np,np->n", rows @ narrowed, rows)
        return np.maximum(squares, 0.0)


def embedding_points(embeddings: FloatArray, static: npt.NDArray[Any]) -> FloatArray:
    """Return configurations as points (n, c): principal components, then static features.

    Each group is scaled over the pool to a mean squared norm of one.
    """
    scaled = _standardize(embeddings)
    groups = (scaled @ _leading_eigenvectors(scaled), _standardize(static))
    return np.hstack([_unit_norm(group) for group in groups]).astype(np.float32)


def _standardize(values: npt.NDArray[Any]) -> Array:
    """Return standardized columns of values (n, d), in single precision before widening."""
    deviation = values.std(axis=0, dtype=np.float64)
    deviation[deviation < 1e-6] = 1.0
    centred = values - values.mean(axis=0, dtype=np.float64).astype(np.float32)
    scaled = np.clip(centred / deviation.astype(np.float32), -CLIP, CLIP)
    return np.asarray(scaled.astype(np.float32).astype(np.float64))


def _leading_eigenvectors(scaled: Array) -> Array:
    """Return the leading eigenvectors of the covariance of centred rows (n, d)."""
    covariance = scaled.T @ scaled / max(len(scaled), 1)
    values, vectors = np.linalg.eigh(covariance)
    leading = vectors[:, np.argsort(values)[::-1][:COMPONENTS]]
    # An eigenvector's sign is arbitrary; fixing it makes results equal on all machines.
    signs = np.sign(leading[np.argmax(np.abs(leading), axis=0), np.arange(leading.shape[1])])
    return np.asarray(leading * signs)


def _unit_norm(group: Array) -> Array:
    mean_square = float((group**2).sum(axis=1).mean()) if len(group) else 0.0
    return group / np.sqrt(mean_square) if mean_square > 0 else group
