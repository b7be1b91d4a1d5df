"""Strategies that cover the pool by distances, without labels.

`facility` maximises the sum over the pool of the likeness to the nearest pick (facility location,
Nemhauser et al. 1978); `clusters` takes the middle of each k-means cluster within each family, the
classic start without labels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trappm.learner.acquisition.request import (
    AcquisitionRequest,
    FloatArray,
    IntArray,
    Pick,
    explained,
)
from trappm.learner.stats.kernels import matern32
from trappm.profiler.errors import InputError

Array = npt.NDArray[np.float64]

MOST_TARGETS = 1_000
"""Configurations, drawn uniformly, that stand for the pool where all pairs would be too many."""
MOST_PAIRS = 50_000_000
"""Of a target and a configuration, whose likeness is kept."""
KMEANS_STEPS = 20
"""Of Lloyd's algorithm: a round number."""
TARGETS_AT_ONCE = 64
"""Bounds the memory of one product, not its result."""


class Representation:
    """How well the configurations that are known stand for the whole pool (n).

    The sum over the pool of the likeness to the nearest of them: facility location. Each one more
    adds less, and what is like nothing known adds most.
    """

    def __init__(
        self,
        points: FloatArray,
        known: IntArray,
        generator: np.random.Generator,
        *,
        noise_factor: Array | None = None,
    ) -> None:
        """
        Args:
            points: of the pool (n, c).
            known: indices that are labelled or will be.
            generator: draws the targets of a large pool.
            noise_factor: how many times the usual variance each measurement has (n): what is to be
                measured so often adds the less.
        """
        most = max(1, min(MOST_TARGETS, MOST_PAIRS // max(len(points), 1)))
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
        """What would be reached if everything were known."""

    def gains(self) -> Array:
        """What each configuration would add (n)."""
        return self._gains / self._noise_factor

    def learn(self, index: int) -> None:
        """One more that is known; only the targets that it serves better change anything."""
        own = self._likeness[:, index]
        for target in np.flatnonzero(own > self._served).tolist():
            before, row = self._served[target], self._likeness[target]
            self._gains -= np.maximum(row - before, 0.0) - np.maximum(row - own[target], 0.0)
        np.maximum(self._gains, 0.0, out=self._gains)
        self._served = np.maximum(self._served, own)


class FacilityLocation:
    """Greedy maximum of the likeness of each configuration of the pool to its nearest pick."""

    name = "facility"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        pool = Representation(request.points, request.known, request.generator)
        wanted = np.zeros(len(request.points), dtype=bool)
        wanted[request.open] = True
        chosen: list[int] = []
        for _ in range(request.count):
            best = int(np.argmax(np.where(wanted, pool.gains(), -1.0)))
            wanted[best] = False
            chosen.append(best)
            pool.learn(best)
        return explained(request, chosen)


class Clusters:
    """The configuration nearest to the centre of each of `count` clusters, family by family."""

    name = "clusters"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        if request.families is None:
            raise InputError("clusters needs the families of the pool")
        families = np.array(request.families)[request.open]
        names, sizes = np.unique(families, return_counts=True)
        # Largest remainders: every family gets its share of the picks, rounded.
        exact = request.count * sizes / max(sizes.sum(), 1)
        quota = np.floor(exact).astype(np.int64)
        for number in np.argsort(-(exact - quota), kind="stable")[: request.count - quota.sum()]:
            quota[number] += 1
        chosen: list[int] = []
        for name, count in zip(names, quota.tolist(), strict=True):
            members = request.open[families == name]
            chosen += _middles(request.points, members, count, request.generator)
        order = request.generator.permutation(len(chosen))
        return explained(request, [chosen[i] for i in order])


def _middles(
    points: FloatArray, members: IntArray, count: int, generator: np.random.Generator
) -> list[int]:
    """The members next to the centres of `count` k-means clusters (Lloyd), each once."""
    if count == 0:
        return []
    own = points[members]
    centres = own[generator.permutation(len(own))[:count]]
    for _ in range(KMEANS_STEPS):
        nearest = pairwise(own, centres).argmin(axis=1)
        centres = np.stack(
            [
                own[nearest == k].mean(axis=0) if (nearest == k).any() else centres[k]
                for k in range(count)
            ]
        )
    apart = pairwise(own, centres)
    chosen: list[int] = []
    for k in range(count):
        best = int(apart[:, k].argmin())
        apart[best] = np.inf
        chosen.append(int(members[best]))
    return chosen


def pairwise(points: FloatArray, others: FloatArray) -> FloatArray:
    """Squared distances of points (n, c) and (m, c): (n, m)."""
    squares = (points**2).sum(axis=1)[:, None] + (others**2).sum(axis=1)[None, :]
    apart: FloatArray = np.maximum(squares - 2.0 * points @ others.T, 0.0)
    return apart


def at_most(n: int, most: int, generator: np.random.Generator) -> IntArray:
    """At most so many of the numbers below n, rising."""
    if n <= most:
        return np.arange(n)
    chosen: IntArray = np.sort(generator.permutation(n)[:most]).astype(np.int64)
    return chosen
