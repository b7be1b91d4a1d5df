"""Covariances between points: Matern 3/2, the scale of its features, and Nystroem's features.

Every Gaussian process of the learner stands on these: that of residuals (`gaussian_process`), the
quick learner (`learner.acquisition.joint`) and that of the embedding space
(`learner.acquisition.similarity`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Float = TypeVar("Float", np.float32, np.float64)

CLIP = 5.0
"""Features stay within so many deviations of the training mean: a round number, so that a graph
unlike all others lies at the edge and not beyond every length scale."""


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Maps features to points: columns are scaled, in groups that each have a mean norm of 1."""

    middle: Array
    scale: Array
    groups: tuple[int, ...]
    """Number of columns of each group, in order."""

    @classmethod
    def fit(cls, features: Array, groups: Sequence[int]) -> Self:
        middle = features.mean(axis=0) if len(features) else np.zeros(features.shape[1])
        deviation = features.std(axis=0) if len(features) else np.zeros(features.shape[1])
        # A column that never varied is left out: what differs there later must not run away.
        scale = np.where(deviation < 1e-9, np.inf, deviation * group_norms(groups))
        return cls(middle, scale, tuple(groups))

    def apply(self, features: Array) -> Array:
        bound = CLIP / group_norms(self.groups)
        scaled: Array = np.clip((features - self.middle) / self.scale, -bound, bound)
        return scaled


def group_norms(groups: Sequence[int]) -> Array:
    """For each column, the norm of its group's columns when each of them has deviation 1."""
    return np.repeat(np.sqrt(np.maximum(groups, 1)), groups)


def matern32(first: npt.NDArray[Float], second: npt.NDArray[Float]) -> npt.NDArray[Float]:
    """Matern 3/2 covariance of variance and length 1 of points (n, c) and (m, c): (n, m)."""
    squares = (first**2).sum(axis=1)[:, None] + (second**2).sum(axis=1)[None, :]
    distance: npt.NDArray[Any] = np.sqrt(3.0 * np.maximum(squares - 2.0 * first @ second.T, 0.0))
    covariance: npt.NDArray[Float] = ((1.0 + distance) * np.exp(-distance)).astype(first.dtype)
    return covariance


def nystroem_root(inner: Array, least_share: float = 1e-9) -> Array:
    """Turns covariances with m landmarks into features whose products are covariances (m, p).

    Williams and Seeger 2001, "Using the Nystroem method to speed up kernel machines".

    Args:
        inner: covariance of the landmarks (m, m).
        least_share: directions with less than this share of the largest eigenvalue are rounding.
    """
    values, vectors = np.linalg.eigh(inner)
    keep = values > least_share * max(float(values[-1]), 1e-12)
    root: Array = vectors[:, keep] / np.sqrt(values[keep])
    return root
