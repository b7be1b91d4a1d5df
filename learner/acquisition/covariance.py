"""The covariance of a metric's values over a pool, before they are measured.

As feature vectors whose inner products are covariances of the logarithm: a pool of n needs n x p
numbers and never n x n. `narrow` keeps p small: few directions carry almost all of the variance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

WIDTH = 320
"""Directions that are kept of more features."""
ROWS_AT_ONCE = 8192
"""Bounds the memory of one product, not its result."""


@dataclass(frozen=True, eq=False)
class Covariance:
    """The covariance of one metric on one device over a pool of n, as features."""

    features: FloatArray
    """(n, p): inner products are covariances of the metric's logarithm without labels."""
    noise: float
    """Variance of one label around what the features can explain."""

    @property
    def deviation(self) -> npt.NDArray[np.float64]:
        """Of each configuration without labels (n)."""
        squares = np.einsum("np,np->n", self.features, self.features, dtype=np.float64)
        return np.asarray(np.sqrt(squares))


def narrow(features: FloatArray, width: int = WIDTH) -> FloatArray:
    """The directions of features (n, p) with the most variance: (n, at most `width`)."""
    if features.shape[1] <= width:
        return features
    gram = np.zeros((features.shape[1],) * 2)
    for start in range(0, len(features), ROWS_AT_ONCE):
        rows = features[start : start + ROWS_AT_ONCE]
        gram += rows.T @ rows
    _, vectors = np.linalg.eigh(gram)
    leading = vectors[:, -width:].astype(np.float32)
    return features @ leading
