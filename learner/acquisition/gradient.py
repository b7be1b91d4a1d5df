"""Strategies of deep batch active learning, on embeddings or on gradients of the heads.

LCMD (largest cluster, maximum distance; Holzmueller et al. 2023, "A Framework and Benchmark for
Deep Batch Active Learning for Regression", section 4.3), in its TP form: what is known are centres
too.
BADGE (Ash et al. 2020) draws by k-means++ on gradients, which are long where the heads are unsure.
"""

from __future__ import annotations

import numpy as np

from trappm.learner.acquisition.coverage import squared_distances
from trappm.learner.acquisition.request import (
    AcquisitionRequest,
    Array,
    FloatArray,
    IntArray,
    Pick,
    explained,
)
from trappm.learner.networks.dataset import Scaler

NEED_GRADIENTS = frozenset({"lcmd-gradients", "badge"})
"""Strategies that ask how the heads' outputs move with what they have learned."""


class Lcmd:
    """The farthest member of the cluster with the largest sum of squared distances."""

    def __init__(self, *, on_gradients: bool) -> None:
        self.name = "lcmd-gradients" if on_gradients else "lcmd"
        self._on_gradients = on_gradients

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        points = _vectors(request) if self._on_gradients else _scaled(request.embeddings)
        return explained(request, _lcmd(points, request))


def _lcmd(points: FloatArray, request: AcquisitionRequest) -> list[int]:
    n, known = len(points), request.known
    apart = _Distances(points)
    gaps = np.full(n, np.inf)
    owner = np.zeros(n, dtype=np.int64)
    for number, index in enumerate(known.tolist()):
        _join(apart.to(index), number, gaps, owner)
    open_ = np.zeros(n, dtype=bool)
    open_[request.open] = True
    chosen: list[int] = []
    for number in range(len(known), len(known) + request.count):
        if number == 0:
            best = int(np.argmax(np.where(open_, apart.squares, -1.0)))
        else:
            left = np.where(open_, gaps, 0.0)
            sizes = np.bincount(owner, left, number)
            # A cluster whose members are all taken has size 0 like one of copies only.
            there = np.bincount(owner[open_], minlength=number) > 0
            largest = int(np.argmax(np.where(there, sizes, -1.0)))
            best = int(np.argmax(np.where(open_ & (owner == largest), gaps, -1.0)))
        chosen.append(best)
        open_[best] = False
        _join(apart.to(best), number, gaps, owner)
    return chosen


class _Distances:
    """Squared distances from each point to one of them, without a copy of all points (n, c)."""

    def __init__(self, points: FloatArray) -> None:
        self._points = points - points.mean(axis=0)  # small numbers lose less in the difference
        self.squares: Array = np.einsum("nc,nc->n", points, points, dtype=np.float64)
        """From the origin (n)."""
        self._own: Array = np.einsum("nc,nc->n", self._points, self._points, dtype=np.float64)

    def to(self, index: int) -> Array:
        """(n)."""
        inner = self._points @ self._points[index]
        found: Array = np.maximum(self._own + self._own[index] - 2.0 * inner, 0.0)
        found[index] = 0.0
        return found


def _join(apart: Array, number: int, gaps: Array, owner: IntArray) -> None:
    """One more centre: those nearer to it than to any other become its own."""
    nearer = apart < gaps
    gaps[nearer] = apart[nearer]
    owner[nearer] = number


class Badge:
    """k-means++ on gradients, scaled by the uncertainty where it is known."""

    name = "badge"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        points = _vectors(request)
        if request.uncertainty is not None:
            points = points * request.uncertainty.astype(np.float32)[:, None]
        gaps = squared_distances(points, points[request.known]).astype(np.float64)
        distances = _Distances(points)
        if not len(request.known):
            gaps = distances.squares
        open_ = request.open
        taken = np.zeros(len(points), dtype=bool)
        chosen: list[int] = []
        for number in range(request.count):
            weight = np.where(taken[open_], 0.0, gaps[open_])
            if weight.sum() <= 0.0:
                weight = (~taken[open_]).astype(np.float64)
            best = int(request.generator.choice(open_, p=weight / weight.sum()))
            chosen.append(best)
            taken[best] = True
            apart = distances.to(best)
            first = number == 0 and not len(request.known)
            gaps = apart if first else np.minimum(gaps, apart)
        return explained(request, chosen)


def _vectors(request: AcquisitionRequest) -> FloatArray:
    if request.gradients is not None:
        return request.gradients
    if request.covariances:  # a process is linear in its features: they are its gradients
        parts = [c.features / max(float(c.deviation.mean()), 1e-9) for c in request.covariances]
        return np.hstack(parts).astype(np.float32)
    return request.points  # before there are purely learned heads, of which nothing is known


def _scaled(embeddings: FloatArray) -> FloatArray:
    return Scaler.fit(embeddings).apply(embeddings)
