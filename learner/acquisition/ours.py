"""Our strategy: what the whole pool learns for each second of measuring, over all metrics.

`learner.acquisition.reduction` computes by how much a label would lower the variance of the pool,
for learners that state a covariance, as those with physics do. What physics leaves open is alike
for neighbours in the embedding space, so the reduction is multiplied by the part of the pool that a
label represents there (`learner.acquisition.coverage.Representation`), as information density does
(Settles and Craven 2008). Purely learned heads state no covariance: there representation alone
decides. Four more things take part:

- **Metrics** are served by one batch: the sum of their reductions, each as a share of what the pool
  did not know at first.
- **Runs that die** leave a bound instead of a value. Of a normal value that is seen only below a
  limit, the share of the variance that one run removes on average is
  `1 - P Var(y | y > limit) / Var(y)` (truncated normal, Johnson et al. 1994, section 13.10):
  nothing where it surely dies, all where it surely lives, and something between, so a borderline
  run is bought for what it teaches.
- **Cost**: the reduction is divided by a power of the predicted time of measuring.
- **Another device** has taught the most of it: what is left is how the constants of both differ,
  and all workloads share these. So the reduction alone decides there; replayed on two pairs of
  devices, the product with the part represented was no better (docs/studies/second_device.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Protocol

import numpy as np

from trappm.learner.acquisition.covariance import Covariance, narrow
from trappm.learner.acquisition.coverage import Representation
from trappm.learner.acquisition.reduction import Array, Knowledge
from trappm.learner.acquisition.request import AcquisitionRequest, Pick, explained
from trappm.learner.acquisition.similarity import embedding_features

NOISE_VARIANCE = 0.05
"""Of one measurement, where the variance before any measurement is about 1. A round number: a label
leaves a fifth of the deviation."""
AMPLITUDE_RANGE = (0.5, 2.0)
"""How far disagreement may lower or raise the deviation of a configuration. A round number: five
heads know a deviation to about a factor of two."""
FLOOR = 0.1
"""What each factor is at least, in its mean over the candidates: neither has a veto. A round
number; with it the strategy was chosen on splits of seeds 100 to 119 (docs/studies/choosing.md)."""
TINY = 1e-12
"""Keeps logarithms and quotients finite; smaller than any share that matters."""


class _Belief(Protocol):
    """What a label of each configuration adds to what is known of the pool, by one measure."""

    total: float
    """If everything were known."""

    def gains(self) -> Array: ...

    def learn(self, index: int) -> None: ...


class PoolReduction:
    """Greedy choice of what the whole pool learns most from."""

    def __init__(
        self,
        name: str,
        *,
        guarded: bool = False,
        cost_power: float = 0.0,
        own_covariance: bool = True,
        represents: bool = False,
    ) -> None:
        """
        Args:
            name: of the strategy.
            guarded: whether runs that may die count for less.
            cost_power: 0 where labels are what is scarce, 1 where seconds are.
            own_covariance: use that of the heads where the request has one; otherwise always that
                of embeddings and static features.
            represents: whether it counts for how much of the pool a label stands, too; on a device
                that another one's labels have taught it does not.
        """
        self.name = name
        self._guarded = guarded
        self._cost_power = cost_power
        self._own_covariance = own_covariance
        self._represents = represents

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        worth = self._worth(request)
        parts = self._beliefs(request)
        open_ = np.zeros(len(worth), dtype=bool)
        open_[request.open] = True
        chosen: list[int] = []
        reasons: dict[str, list[float]] = {name: [] for name in parts}
        for _ in range(request.count):
            shares = {
                name: np.mean([belief.gains() / belief.total for belief in beliefs], axis=0)
                for name, beliefs in parts.items()
            }
            # Where one factor is flat, as among copies, the other still counts.
            floored = [
                share + FLOOR * float(share[open_].mean()) + TINY for share in shares.values()
            ]
            wanted = worth * np.prod(floored, axis=0)
            best = int(np.argmax(np.where(open_, wanted, -np.inf)))
            chosen.append(best)
            open_[best] = False
            for name, beliefs in parts.items():
                reasons[name].append(float(shares[name][best]))
                for belief in beliefs:
                    belief.learn(best)
        return explained(request, chosen, **reasons)

    def _worth(self, request: AcquisitionRequest) -> Array:
        """What a label of each configuration is worth, beside what it teaches (n)."""
        worth = np.ones(len(request.embeddings))
        if self._guarded and request.failure is not None:
            worth *= taught_by_bounds(request.failure)
        if self._cost_power and request.predicted_cost is not None:
            typical = float(np.median(request.predicted_cost))
            worth *= (typical / np.maximum(request.predicted_cost, 1e-3 * typical)) ** (
                self._cost_power
            )
        return worth

    def _beliefs(self, request: AcquisitionRequest) -> dict[str, Sequence[_Belief]]:
        """By the name of the reason that they give."""
        parts: dict[str, Sequence[_Belief]] = {}
        covariances = list(request.covariances) if self._own_covariance else []
        if not (covariances or self._represents):
            covariances = [_of_embeddings(request)]
        if covariances:
            narrowed = [Covariance(narrow(c.features), c.noise) for c in covariances]
            parts["variance_reduction"] = [
                Knowledge(c, request.known, request.noise_factor) for c in narrowed
            ]
        if self._represents and not (covariances and request.taught):
            parts["representation"] = [
                Representation(
                    request.points,
                    request.known,
                    request.generator,
                    noise_factor=request.noise_factor,
                )
            ]
        return parts


def _of_embeddings(request: AcquisitionRequest) -> Covariance:
    features = embedding_features(
        request.embeddings, np.log1p(request.static_features), request.generator
    )
    features *= _amplitude(request.uncertainty, len(features))[:, None]
    return Covariance(features, NOISE_VARIANCE)


def _amplitude(uncertainty: Array | None, n: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """What to scale each configuration's deviation by (n): its uncertainty beside the typical one.

    The square root and the bounds keep a wrong guess of the heads from ruling the choice.
    """
    if uncertainty is None or not np.median(uncertainty) > 0:
        return np.ones(n, dtype=np.float32)
    ratio = np.sqrt(uncertainty / np.median(uncertainty))
    return np.clip(ratio, *AMPLITUDE_RANGE).astype(np.float32)


def taught_by_bounds(failure: Array) -> Array:
    """The share of a label's worth that a run has which dies with this probability (n)."""
    shares = np.empty(len(failure))
    normal = NormalDist()
    for row, probability in enumerate(np.clip(failure, 1e-9, 1 - 1e-9).tolist()):
        limit = normal.inv_cdf(1.0 - probability)
        ratio = normal.pdf(limit) / probability
        shares[row] = 1.0 - probability * (1.0 + limit * ratio - ratio**2)
    return np.clip(shares, 0.0, 1.0)


def ours() -> Sequence[PoolReduction]:
    """The default, and its sisters that are compared with it."""
    return (
        PoolReduction("ours", guarded=True, represents=True),
        PoolReduction("ours-per-second", guarded=True, cost_power=1.0, represents=True),
        PoolReduction("variance", own_covariance=False),
        PoolReduction("variance-heads"),
    )
