"""Strategies that are judged and not offered: on recorded labels none has beaten a uniform draw.

docs/studies/choosing.md has the figures. Coreset is the greedy k-center of Sener and Savarese
(2018); density weighs its distances by the number of near configurations, so that outliers wait;
LCMD is on embeddings here (on gradients it is in `learner.acquisition.strategies`); BADGE (Ash
et al. 2020) draws by k-means++ on gradients, which are long where the heads are unsure;
`ours-conditioned` is `ours` with the covariance of the fitted learner; `ours-laplace` is `ours` for
purely learned heads, with the posterior of their last layers.

The reference peer is LCMD-TP as `bmdal-reg` computes it (Holzmueller et al. 2023, "A Framework and
Benchmark for Deep Batch Active Learning for Regression"): on sketched gradients of a trained
network, begun from a random draw, and on plain features.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from trappm.learner.acquisition import NOISE_VARIANCE, Strategy, strategy_named
from trappm.learner.acquisition.pool_covariance import PoolCovariance
from trappm.learner.acquisition.pool_variance import PoolReduction
from trappm.learner.acquisition.request import AcquisitionRequest, FloatArray, Pick, explained
from trappm.learner.acquisition.strategies import (
    MOST_TARGETS,
    Distances,
    Lcmd,
    RandomChoice,
    at_most,
    gradient_vectors,
    pairwise,
)
from trappm.learner.acquisition.strategies import NEED_GRADIENTS as OFFERED_NEED_GRADIENTS
from trappm.learner.gaussian_process import matern32
from trappm.learner.paper.graphs import Scaler
from trappm.learner.paper.training import torch_seeded
from trappm.profiler.errors import InputError

ROWS_AT_ONCE = 4096
SKETCH = 512
"""Width of the sketched gradients, as in the paper."""
WIDTH, EPOCHS, LEARNING_RATE = 128, 200, 3e-3
"""Network of two hidden layers, for hundreds of labels (the paper's has three of 512)."""
NEED_GRADIENTS = OFFERED_NEED_GRADIENTS | {"badge", "ours-laplace"}
CONDITIONED = frozenset({"ours-conditioned"})
"""Strategies that use the covariance of the learner as fitted so far."""
NEED_PREDICTIONS = frozenset({"ours-per-second", "uncertainty", "badge"})
"""Strategies that need the expected cost of runs, or its uncertainty."""


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
        center = np.average(points, axis=0, weights=weight)
        gaps = 1.0 / (1.0 + ((points - center) ** 2).sum(axis=1))
        gaps = (gaps * weight).astype(np.float32)

    def choose(gaps: FloatArray, is_taken: NDArray[np.bool_]) -> int:
        return int(np.argmax(np.where(is_taken, -1.0, np.sqrt(gaps) * weight[request.open])))

    return _greedy(request, gaps, choose, lambda at: ((points - points[at]) ** 2).sum(axis=1))


def _greedy(
    request: AcquisitionRequest,
    gaps: NDArray[Any],
    choose: Callable[[NDArray[Any], NDArray[np.bool_]], int],
    distances_to: Callable[[int], NDArray[Any]],
) -> list[Pick]:
    """Pick candidates one by one by their distances to everything known or picked.

    Args:
        request: What is asked for.
        gaps: Squared distances of all points to the nearest known one, shape (n,).
        choose: Returns a place among open points from their distances and which are taken.
        distances_to: Returns squared distances to a point, shape (n,).
    """
    open_, chosen = request.open, []
    is_taken = np.zeros(len(open_), dtype=bool)
    for number in range(request.count):
        place = choose(gaps[open_], is_taken)
        is_taken[place] = True
        chosen.append(int(open_[place]))
        apart = distances_to(chosen[-1])
        gaps = apart if number == 0 and not len(request.known) else np.minimum(gaps, apart)
    return explained(request, chosen)


def squared_distances(points: FloatArray, known: FloatArray) -> FloatArray:
    """Return squared distances to the nearest known point, shape (n,); infinite without any.

    Args:
        points: Shape (n, c).
        known: Shape (m, c).
    """
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

        def choose(gaps: FloatArray, is_taken: NDArray[np.bool_]) -> int:
            weight = np.where(is_taken, 0.0, gaps)
            if weight.sum() <= 0.0:
                weight = (~is_taken).astype(np.float64)
            return int(request.generator.choice(len(weight), p=weight / weight.sum()))

        return _greedy(request, gaps, choose, distances.to)


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
    """Return the covariance of outputs that are linear in these gradients, shape (n, g).

    Weights are independent; the mean variance over the pool is 1, as that of scaled labels.
    """
    centred = gradients - gradients.mean(axis=0)
    scale = np.sqrt((centred**2).sum(axis=1).mean())
    return PoolCovariance(centred / max(scale, np.float32(1e-9)), NOISE_VARIANCE)


class BmdalLcmd:
    """LCMD-TP, as `bmdal_reg` computes it."""

    def __init__(self, *, on_gradients: bool) -> None:
        self.name = "bmdal-lcmd-gradients" if on_gradients else "bmdal-lcmd"
        self._on_gradients = on_gradients

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        """Choose a batch.

        Raises:
            InputError: `bmdal-reg` is not installed, or labels' values are missing.
        """
        if not len(request.known):
            return RandomChoice().select(request)
        if not request.count:
            return []
        try:
            from bmdal_reg.bmdal.algorithms import select_batch
            from bmdal_reg.bmdal.feature_data import TensorFeatureData
        except ImportError as error:
            raise InputError(
                f"{self.name} needs bmdal-reg ({error}); install it with: pip install bmdal-reg"
            ) from error
        if not hasattr(np, "Inf"):  # bmdal-reg 3.0.2 was written before NumPy 2 dropped this name
            np.Inf = np.inf  # type: ignore[attr-defined]
        points = torch.from_numpy(request.points)
        models: list[nn.Module] = [nn.Identity()]
        if self._on_gradients:
            models = [_network(points, request)]
        with torch_seeded(request.generator):
            chosen, _ = select_batch(
                batch_size=request.count,
                models=models,
                data={
                    "train": TensorFeatureData(points[request.known]),
                    "pool": TensorFeatureData(points[request.open]),
                },
                y_train=None,
                base_kernel="grad" if self._on_gradients else "linear",
                kernel_transforms=[("rp", [SKETCH])] if self._on_gradients else [],
                selection_method="lcmd",
                sel_with_train=True,
            )
        return explained(request, request.open[chosen.numpy()].tolist())


def _network(points: torch.Tensor, request: AcquisitionRequest) -> nn.Module:
    """Train a network on the standardized logarithms of the labels."""
    if request.log_values is None:
        raise InputError("a network of the peer needs the labels' values")
    known = np.isfinite(request.log_values)
    rows = torch.from_numpy(request.labelled[known])
    values = torch.from_numpy(request.log_values[known]).float()
    values = (values - values.mean()) / values.std().clamp(min=1e-6)
    with torch_seeded(request.generator):
        network = nn.Sequential(
            nn.Linear(points.shape[1], WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 1),
        )
        optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            loss = ((network(points[rows])[:, 0] - values) ** 2).mean()
            loss.backward()
            optimizer.step()
    return network


PEERS = (BmdalLcmd(on_gradients=False), BmdalLcmd(on_gradients=True))


def check_installed(strategies: Collection[str]) -> None:
    """Raise InputError if a peer is among the strategies and its library is missing."""
    wanted = [peer.name for peer in PEERS if peer.name in strategies]
    if wanted and find_spec("bmdal_reg") is None:
        raise InputError(
            f"{', '.join(wanted)}: this needs bmdal-reg, which is not installed; leave it out, "
            "or install it with: pip install bmdal-reg"
        )


JUDGED: tuple[Strategy, ...] = (
    Coreset(),
    DensityCoreset(),
    LcmdOnEmbeddings(),
    Badge(),
    PoolReduction("ours-conditioned", guarded=True, represents=True),
    LastLayers(),
    *PEERS,
)
"""Strategies that are judged in addition to those of a campaign."""


def named_strategy(name: str) -> Strategy:
    """Return a strategy of a campaign, or one that is only judged.

    Raises:
        InputError: There is none of this name.
    """
    return strategy_named(name, JUDGED)
