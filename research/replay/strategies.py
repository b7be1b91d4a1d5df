"""Strategies that are judged and not offered: on recorded labels none has beaten a uniform draw.

docs/studies/choosing.md has the figures. Coreset is the greedy k-centre of Sener and Savarese
(2018); density weighs its distances by how many configurations are near, so that loners wait; LCMD
stands here on embeddings (on gradients it is offered, `learner.acquisition.strategies`); BADGE (Ash
et al. 2020) draws by k-means++ on gradients, which are long where the heads are unsure; `ours-
conditioned` is `ours` with the covariance of the fitted learner: the prior linearised at its
constants, and amplitude, lengths and noise of the residual as labels have them; `ours-laplace` is
`ours` for purely learned heads, with what their last layers leave open.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from research.replay.peers import PEERS
from trappm.learner.acquisition import NOISE_VARIANCE, Strategy, strategy_named
from trappm.learner.acquisition.pool_covariance import PoolCovariance
from trappm.learner.acquisition.pool_variance import PoolReduction
from trappm.learner.acquisition.request import AcquisitionRequest, FloatArray, Pick, explained
from trappm.learner.acquisition.strategies import (
    MOST_TARGETS,
    Distances,
    Lcmd,
    at_most,
    gradient_vectors,
    pairwise,
)
from trappm.learner.acquisition.strategies import NEED_GRADIENTS as OFFERED_NEED_GRADIENTS
from trappm.learner.gaussian_process import matern32
from trappm.learner.paper.graphs import Scaler

ROWS_AT_ONCE = 4096
NEED_GRADIENTS = OFFERED_NEED_GRADIENTS | {"badge", "ours-laplace"}
CONDITIONED = frozenset({"ours-conditioned"})
"""Strategies for which what is known of the pool is what the learner believes as fitted by then."""
NEED_PREDICTIONS = frozenset({"ours-per-second", "uncertainty", "badge"})
"""Strategies that need the expected cost of runs, or how sure that is."""


class Coreset:
    """The candidate farthest from everything known or picked, again and again."""

    name = "coreset"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        return _farthest(request, np.ones(len(request.embeddings), dtype=np.float32))


class DensityCoreset:
    """As `Coreset`, with distances weighed by the density of the pool there."""

    name = "density"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        points = request.points
        sample = points[at_most(len(points), MOST_TARGETS, request.generator)]
        density = np.empty(len(points), dtype=np.float32)
        for start in range(0, len(points), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            density[rows] = matern32(points[rows], sample).mean(axis=1)
        return _farthest(request, density)


def _farthest(request: AcquisitionRequest, weight: FloatArray) -> list[Pick]:
    points = request.points
    gaps = squared_distances(points, points[request.known])
    if not len(request.known):  # the first pick is the most central one
        centre = np.average(points, axis=0, weights=weight)
        gaps = 1.0 / (1.0 + ((points - centre) ** 2).sum(axis=1))
        gaps = (gaps * weight).astype(np.float32)
    chosen: list[int] = []
    open_ = request.open
    taken = np.zeros(len(points), dtype=bool)
    for number in range(request.count):
        wanted = np.where(taken[open_], -1.0, np.sqrt(gaps[open_]) * weight[open_])
        best = int(open_[np.argmax(wanted)])
        chosen.append(best)
        taken[best] = True
        apart = ((points - points[best]) ** 2).sum(axis=1)
        first = number == 0 and not len(request.known)
        gaps = apart if first else np.minimum(gaps, apart)
    return explained(request, chosen)


def squared_distances(points: FloatArray, known: FloatArray) -> FloatArray:
    """To the nearest of the known (m, c) for each point (n, c): (n); infinite without any."""
    apart = np.full(len(points), np.inf, dtype=np.float32)
    for start in range(0, len(points), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        if len(known):
            apart[rows] = pairwise(points[rows], known).min(axis=1)
    return apart


class LcmdOnEmbeddings(Lcmd):
    """LCMD with distances between embeddings."""

    name = "lcmd"

    def vectors(self, request: AcquisitionRequest) -> FloatArray:
        return Scaler.fit(request.embeddings).apply(request.embeddings)


class Badge:
    """k-means++ on gradients, scaled by the uncertainty where it is known."""

    name = "badge"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        points = gradient_vectors(request)
        if request.uncertainty is not None:
            points = points * request.uncertainty.astype(np.float32)[:, None]
        gaps = squared_distances(points, points[request.known]).astype(np.float64)
        distances = Distances(points)
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


class LastLayers(PoolReduction):
    """As `ours`, with the posterior of the last layers of the heads: a Laplace approximation there
    (Snoek et al. 2015). Before there are gradients, coverage decides alone."""

    def __init__(self) -> None:
        super().__init__("ours-laplace", guarded=True, represents=True)

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        gradients = request.gradients
        covariances = [] if gradients is None else [last_layers(gradients)]
        return super().select(replace(request, covariances=covariances))


def last_layers(gradients: FloatArray) -> PoolCovariance:
    """The covariance of outputs that are linear in these gradients (n, g) with independent weights.

    Its mean variance over the pool is 1, as that of scaled labels, whose mean is known.
    """
    centred = gradients - gradients.mean(axis=0)
    scale = np.sqrt((centred**2).sum(axis=1).mean())
    return PoolCovariance(centred / max(scale, np.float32(1e-9)), NOISE_VARIANCE)


JUDGED: tuple[Strategy, ...] = (
    Coreset(),
    DensityCoreset(),
    LcmdOnEmbeddings(),
    Badge(),
    PoolReduction("ours-conditioned", guarded=True, represents=True),
    LastLayers(),
    *PEERS,
)
"""What is judged beside the strategies of a campaign."""


def named_strategy(name: str) -> Strategy:
    """A strategy of a campaign, or one that is only judged.

    Raises:
        InputError: there is none of this name.
    """
    return strategy_named(name, JUDGED)
