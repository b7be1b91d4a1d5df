"""A uniform draw, and the part of a pool that a batch of labels represents."""

from __future__ import annotations

import numpy as np

from trappm.learner.acquisition.request import AcquisitionRequest, Pick, explain_picks
from trappm.learner.gaussian_process import matern32
from trappm.learner.interface import Array, FloatArray, IntArray

MAX_TARGETS = 1_000
"""Configurations, drawn uniformly, that represent a larger pool."""
MAX_PAIRS = 50_000_000
"""Similarities of a target and a configuration that are stored."""
TARGETS_AT_ONCE = 64
"""Bounds the memory of one product."""


class RandomChoice:
    """A uniform draw, the baseline of every other strategy."""

    name = "random"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        chosen = request.generator.permutation(request.open)[: request.count]
        return explain_picks(request, chosen.tolist())


class Representation:
    """Sum over the pool of the similarity to the nearest known configuration.

    This is the objective of facility location (Nemhauser et al. 1978).
    """

    def __init__(
        self,
        points: FloatArray,
        known: IntArray,
        generator: np.random.Generator,
        *,
        noise_factor: Array | None = None,
    ) -> None:
        """Compute the similarities.

        Args:
            points: Configurations of the pool as points (n, c).
            known: Indices of labelled configurations.
            generator: Draws the targets of a large pool.
            noise_factor: Noise variance of each measurement relative to the usual one (n);
                gains are divided by it.
        """
        most = max(1, min(MAX_TARGETS, MAX_PAIRS // max(len(points), 1)))
        targets = points[at_most(len(points), most, generator)]
        self._likeness = np.empty((len(targets), len(points)), dtype=np.float32)
        self._gains = np.zeros(len(points), dtype=np.float64)
        served = np.zeros(len(targets), dtype=np.float32)
        for start in range(0, len(targets), TARGETS_AT_ONCE):
            rows = slice(start, start + TARGETS_AT_ONCE)
            likeness = matern32(targets[rows], points)
            if len(known):
                served[rows] = likeness[:, known].max(axis=1)
            self._gains += np.maximum(likeness - served[rows, None], 0.0).sum(axis=0)
            self._likeness[rows] = likeness
        self._served = served
        self._noise_factor = 1.0 if noise_factor is None else noise_factor
        self.total = float(len(targets))
        """Return the value when all labels are known."""

    def gains(self) -> Array:
        """Return what each configuration would add (n)."""
        return self._gains / self._noise_factor

    def learn(self, index: int) -> None:
        """Add a known configuration; only targets that it serves better change."""
        own = self._likeness[:, index]
        for target in np.flatnonzero(own > self._served).tolist():
            before, row = self._served[target], self._likeness[target]
            self._gains -= np.maximum(row - before, 0.0) - np.maximum(row - own[target], 0.0)
        np.maximum(self._gains, 0.0, out=self._gains)
        self._served = np.maximum(self._served, own)


def at_most(n: int, most: int, generator: np.random.Generator) -> IntArray:
    """Return at most `most` numbers below n, drawn and sorted."""
    if n <= most:
        return np.arange(n)
    chosen: IntArray = np.sort(generator.permutation(n)[:most]).astype(np.int64)
    return chosen
