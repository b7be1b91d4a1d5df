"""Strategies that campaigns offer next to pool variance: draws, coverage, LCMD."""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np
from scipy.cluster.vq import kmeans2  # type: ignore[import-untyped]

from trappm.learner.acquisition.request import AcquisitionRequest, Pick, explained
from trappm.learner.gaussian_process import matern32, pairwise
from trappm.learner.workload import Array, FloatArray, IntArray
from trappm.profiler.errors import InputError

MOST_TARGETS = 1_000
"""Configurations, drawn uniformly, that represent a larger pool."""
MOST_PAIRS = 50_000_000
"""Similarities of a target and a configuration that are stored."""
TARGETS_AT_ONCE = 64
"""Bounds the memory of one product."""
NEED_GRADIENTS = frozenset({"lcmd-gradients"})
"""Strategies that need the derivatives of the heads' outputs by their weights."""


class RandomChoice:
    """A uniform draw, the baseline of every other strategy."""

    name = "random"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        chosen = request.generator.permutation(request.open)[: request.count]
        return explained(request, chosen.tolist())


class Stratified:
    """A draw that gives every family its share of the pool, counting known configurations."""

    name = "stratified"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        if request.families is None:
            raise InputError("stratified needs the families of the pool")
        families = np.array(request.families)
        shares = Counter(families[np.union1d(request.open, request.known)].tolist())
        total = shares.total()
        had = Counter(families[request.known].tolist())
        remaining: dict[str, list[int]] = {}
        for index in request.generator.permutation(request.open).tolist():
            remaining.setdefault(str(families[index]), []).append(index)
        chosen: list[int] = []
        for _ in range(request.count):
            after = had.total() + 1
            owed = {name: shares[name] / total * after - had[name] for name in sorted(remaining)}
            name = max(owed, key=owed.__getitem__)
            chosen.append(remaining[name].pop())
            had[name] += 1
            if not remaining[name]:
                del remaining[name]
        return explained(request, chosen)


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


class FacilityLocation:
    """Greedy maximum of `Representation`."""

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
    """Return the configuration nearest to each of `count` cluster centers, by family."""

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
            chosen += _medoids(request.points, members, count, request.generator)
        order = request.generator.permutation(len(chosen))
        return explained(request, [chosen[i] for i in order])


def _medoids(
    points: FloatArray, members: IntArray, count: int, generator: np.random.Generator
) -> list[int]:
    """Return the members nearest to the centers of `count` k-means clusters, each once."""
    if count == 0:
        return []
    own = points[members].astype(np.float64)
    first = own[generator.permutation(len(own))[:count]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an empty cluster keeps its center
        centers, _ = kmeans2(own, first, iter=20, minit="matrix")
    apart = pairwise(own, centers)
    chosen: list[int] = []
    for number in range(count):
        best = int(apart[:, number].argmin())
        apart[best] = np.inf
        chosen.append(int(members[best]))
    return chosen


class Lcmd:
    """Largest cluster, maximum distance, on gradients of the heads.

    Holzmueller et al. 2023, "A Framework and Benchmark for Deep Batch Active Learning for
    Regression", section 4.3, in its TP form: labelled configurations are centers, too.
    """

    name = "lcmd-gradients"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        points = gradient_vectors(request)
        apart = Distances(points)
        gaps = np.full(len(points), np.inf)
        owner = np.zeros(len(points), dtype=np.int64)

        def join(index: int, number: int) -> None:
            """Add a center, with all points that are nearer to it than to any other."""
            distances = apart.to(index)
            nearer = distances < gaps
            gaps[nearer], owner[nearer] = distances[nearer], number

        for number, index in enumerate(request.known.tolist()):
            join(index, number)
        open_ = np.zeros(len(points), dtype=bool)
        open_[request.open] = True
        chosen: list[int] = []
        for number in range(len(request.known), len(request.known) + request.count):
            if number == 0:
                best = int(np.argmax(np.where(open_, apart.squares, -1.0)))
            else:
                sizes = np.bincount(owner, np.where(open_, gaps, 0.0), number)
                # A cluster without open members has size 0, like one of copies only.
                there = np.bincount(owner[open_], minlength=number) > 0
                largest = int(np.argmax(np.where(there, sizes, -1.0)))
                best = int(np.argmax(np.where(open_ & (owner == largest), gaps, -1.0)))
            chosen.append(best)
            open_[best] = False
            join(best, number)
        return explained(request, chosen)


class Distances:
    """Squared distances of n points to single ones of them, without a copy of all (n, c)."""

    def __init__(self, points: FloatArray) -> None:
        self._points = points - points.mean(axis=0)  # small numbers lose less in the difference
        self.squares: Array = np.einsum("nc,nc->n", points, points, dtype=np.float64)
        """Return the distances from the origin (n)."""
        self._own: Array = np.einsum("nc,nc->n", self._points, self._points, dtype=np.float64)

    def to(self, index: int) -> Array:
        """Return the squared distances of all points to one of them (n)."""
        inner = self._points @ self._points[index]
        apart: Array = np.maximum(self._own + self._own[index] - 2.0 * inner, 0.0)
        apart[index] = 0.0
        return apart


def gradient_vectors(request: AcquisitionRequest) -> FloatArray:
    """Return gradients of the heads (n, g), or features of the covariances before there are any."""
    if request.gradients is not None:
        return request.gradients
    if request.covariances:  # a process is linear in its features: they are its gradients
        parts = [c.features / max(float(c.deviation.mean()), 1e-9) for c in request.covariances]
        return np.hstack(parts).astype(np.float32)
    return request.points


def at_most(n: int, most: int, generator: np.random.Generator) -> IntArray:
    """Return at most `most` numbers below n, drawn and sorted."""
    if n <= most:
        return np.arange(n)
    chosen: IntArray = np.sort(generator.permutation(n)[:most]).astype(np.int64)
    return chosen
