"""Acquisition of the papers: labels chosen over the embedding space by ensemble uncertainty.

    k(i, j)   covariance of two configurations: Matern 3/2 over embedding and static features, plus
              a linear part over the static features
    s_i       ensemble spread of configuration i relative to the pool's median, damped
    C         posterior covariance of s_i s_j k(i, j), given the labels

`variance` picks the label that lowers the sum of the variances C_ii over the pool most, and again
with that label known. `uncertainty` picks the largest spreads, so its picks may be near-copies.
"""

from __future__ import annotations

import numpy as np

from trappm.learner.acquisition.pool_covariance import (
    LANDMARKS,
    LINEAR_SHARE,
    ROWS_AT_ONCE,
    PoolCovariance,
    embedding_points,
)
from trappm.learner.acquisition.request import AcquisitionRequest, Pick, explain_picks
from trappm.learner.gaussian_process import matern32, nystroem_root
from trappm.learner.interface import Array, FloatArray
from trappm.profiler.errors import InputError

NOISE_VARIANCE = 0.05
"""Variance of one label relative to the variance without labels (round number)."""
SPREAD_RANGE = (0.5, 2.0)
"""Bounds of s_i (round numbers): five networks estimate a deviation to about a factor of two."""


class MostUncertain:
    """Return the configurations with the largest ensemble spread."""

    name = "uncertainty"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        if request.uncertainty is None:
            raise InputError("uncertainty needs trained heads; begin with another strategy")
        order = np.argsort(-request.uncertainty[request.open], kind="stable")
        return explain_picks(request, request.open[order[: request.count]].tolist())


def embedding_covariance(request: AcquisitionRequest) -> PoolCovariance:
    """Return the covariance over the embedding space, scaled by the ensemble's spread."""
    features = embedding_features(
        request.embeddings, np.log1p(request.static_features), request.generator
    )
    features *= relative_spread(request.uncertainty, len(features))[:, None]
    return PoolCovariance(features, NOISE_VARIANCE)


def relative_spread(uncertainty: Array | None, n: int) -> FloatArray:
    """Return s_i of n configurations; 1 without an ensemble."""
    if uncertainty is None or not np.median(uncertainty) > 0:
        return np.ones(n, dtype=np.float32)
    ratio = np.sqrt(uncertainty / np.median(uncertainty))
    return np.clip(ratio, *SPREAD_RANGE).astype(np.float32)


def embedding_features(
    embeddings: FloatArray, static: Array, generator: np.random.Generator
) -> FloatArray:
    """Return feature vectors (n, p) whose inner products are k.

    Nystroem features approximate k beyond `LANDMARKS` configurations.

    Args:
        embeddings: Graph embeddings of the pool (n, d).
        static: Logarithms of the static features (n, s).
        generator: Draws the landmarks of a large pool.
    """
    points = embedding_points(embeddings, static)
    n = len(points)
    chosen = np.arange(n) if n <= LANDMARKS else np.sort(generator.permutation(n)[:LANDMARKS])
    landmarks = points[chosen]
    inner = matern32(landmarks, landmarks).astype(np.float64)
    root = nystroem_root(inner, least_share=1e-6).astype(np.float32)
    smooth = np.empty((n, root.shape[1]), dtype=np.float32)
    for start in range(0, n, ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        smooth[rows] = matern32(points[rows], landmarks) @ root
    linear = points[:, -static.shape[1] :] * np.float32(np.sqrt(LINEAR_SHARE))
    return np.hstack([smooth, linear])
