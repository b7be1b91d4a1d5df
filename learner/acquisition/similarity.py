"""How alike configurations are: their points in the embedding space, and covariances of these.

A Gaussian process over the log of a cost: a smooth part (Matern 3/2 over embedding and static
features, two groups with equal say) and a linear part over the static features, which stands for
what the physical prior has yet to learn. The full covariance of a large pool would not fit into
memory, so configurations get feature vectors whose inner products approximate it (Nystrom,
Williams and Seeger 2001); up to `LANDMARKS` configurations they reproduce it exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trappm.learner.stats.kernels import matern32, nystroem_root

FloatArray = npt.NDArray[np.float32]

# Round numbers; with them strategies were compared on splits of seeds 100 to 119
# (docs/studies/choosing.md).
LANDMARKS = 256
COMPONENTS = 16
"""Principal components of the embedding that are kept."""
LINEAR_SHARE = 0.3
"""Variance of the linear part beside the smooth part's 1."""


def embedding_points(embeddings: FloatArray, static: npt.NDArray[Any]) -> FloatArray:
    """Configurations as points (n, c): components of the embedding, then static features.

    Each group is scaled over the pool to a mean squared norm of one, so that neither the width
    of the embedding nor its unit matters.
    """
    from trappm.learner.networks.dataset import Scaler  # brings torch

    scaled = Scaler.fit(embeddings).apply(embeddings).astype(np.float64)
    groups = (scaled @ _leading(scaled), Scaler.fit(static).apply(static).astype(np.float64))
    return np.hstack([_unit_norm(group) for group in groups]).astype(np.float32)


def principal_directions(embeddings: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Directions that map embeddings (n, d) to principal components: (d, at most COMPONENTS)."""
    values = embeddings.astype(np.float64)
    deviation = values.std(axis=0)
    scale = np.where(deviation < 1e-9, np.inf, deviation)
    directions = _leading((values - values.mean(axis=0)) / scale)
    return np.asarray(directions / scale[:, None])


def _leading(scaled: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    covariance = scaled.T @ scaled / max(len(scaled), 1)
    values, vectors = np.linalg.eigh(covariance)
    leading = vectors[:, np.argsort(values)[::-1][:COMPONENTS]]
    # An eigenvector's sign is arbitrary; fixing it makes results equal on all machines.
    signs = np.sign(leading[np.argmax(np.abs(leading), axis=0), np.arange(leading.shape[1])])
    return np.asarray(leading * signs)


def embedding_features(
    embeddings: FloatArray, static: npt.NDArray[Any], generator: np.random.Generator
) -> FloatArray:
    """Feature vectors (n, p) whose inner products approximate the covariance of the pool.

    Args:
        embeddings: of the pool (n, d).
        static: logarithms of the static features (n, s).
        generator: draws the landmarks of a large pool.
    """
    points = embedding_points(embeddings, static)
    n = len(points)
    chosen = np.arange(n) if n <= LANDMARKS else np.sort(generator.permutation(n)[:LANDMARKS])
    landmarks = points[chosen]
    inner = matern32(landmarks, landmarks).astype(np.float64)
    root = nystroem_root(inner, least_share=1e-6).astype(np.float32)
    smooth = np.empty((n, root.shape[1]), dtype=np.float32)
    for start in range(0, n, 4096):
        smooth[start : start + 4096] = matern32(points[start : start + 4096], landmarks) @ root
    linear = points[:, -static.shape[1] :] * np.float32(np.sqrt(LINEAR_SHARE))
    return np.hstack([smooth, linear])


def _unit_norm(group: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    mean_square = float((group**2).sum(axis=1).mean()) if len(group) else 0.0
    return group / np.sqrt(mean_square) if mean_square > 0 else group
