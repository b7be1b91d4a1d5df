"""LCMD on gradients of the heads, a strategy of deep batch active learning.

Largest cluster, maximum distance: Holzmueller et al. 2023, "A Framework and Benchmark for Deep
Batch Active Learning for Regression", section 4.3. In its TP form, labelled and pending
configurations are centres too.
"""

from __future__ import annotations

import numpy as np

from trappm.learner.acquisition.request import (
    AcquisitionRequest,
    Array,
    FloatArray,
    IntArray,
    Pick,
    explained,
)

NEED_GRADIENTS = frozenset({"lcmd-gradients"})
"""Strategies that need the derivatives of the heads' outputs by what the heads have learned."""


class Lcmd:
    """The farthest member of the cluster with the largest sum of squared distances."""

    name = "lcmd-gradients"

    def vectors(self, request: AcquisitionRequest) -> FloatArray:
        """What distances are taken between (n, g)."""
        return gradient_vectors(request)

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        return explained(request, _lcmd(self.vectors(request), request))


def _lcmd(points: FloatArray, request: AcquisitionRequest) -> list[int]:
    n, known = len(points), request.known
    apart = Distances(points)
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
            sizes = np.bincount(owner, np.where(open_, gaps, 0.0), number)
            # A cluster whose members are all taken has size 0 like one of copies only.
            there = np.bincount(owner[open_], minlength=number) > 0
            largest = int(np.argmax(np.where(there, sizes, -1.0)))
            best = int(np.argmax(np.where(open_ & (owner == largest), gaps, -1.0)))
        chosen.append(best)
        open_[best] = False
        _join(apart.to(best), number, gaps, owner)
    return chosen


class Distances:
    """Squared distances of n points to single ones of them, without a copy of all (n, c)."""

    def __init__(self, points: FloatArray) -> None:
        self._points = points - points.mean(axis=0)  # small numbers lose less in the difference
        self.squares: Array = np.einsum("nc,nc->n", points, points, dtype=np.float64)
        """From the origin (n)."""
        self._own: Array = np.einsum("nc,nc->n", self._points, self._points, dtype=np.float64)

    def to(self, index: int) -> Array:
        """Squared distances of all points to one of them (n)."""
        inner = self._points @ self._points[index]
        apart: Array = np.maximum(self._own + self._own[index] - 2.0 * inner, 0.0)
        apart[index] = 0.0
        return apart


def _join(apart: Array, number: int, gaps: Array, owner: IntArray) -> None:
    """One more centre: those nearer to it than to any other become its own."""
    nearer = apart < gaps
    gaps[nearer] = apart[nearer]
    owner[nearer] = number


def gradient_vectors(request: AcquisitionRequest) -> FloatArray:
    """Gradients of the heads (n, g), or what stands for them before there are any."""
    if request.gradients is not None:
        return request.gradients
    if request.covariances:  # a process is linear in its features: they are its gradients
        parts = [c.features / max(float(c.deviation.mean()), 1e-9) for c in request.covariances]
        return np.hstack(parts).astype(np.float32)
    return request.points  # before there are purely learned heads, of which nothing is known
