"""Strategy `ours`: labels that lower the variance of the whole pool most, over all metrics.

The gain of a label is its reduction of the pool's variance (`pool_covariance.PoolPosterior`) times
the part of the pool that it represents in the embedding space (`strategies.Representation`), as in
information density (Settles and Craven 2008). Purely learned heads have no covariance, so
representation alone decides there.

- **Metrics** share one batch: their reductions are added, each relative to its initial variance.
- **Runs out of memory** give a bound instead of a value. Of a normal value seen only below a limit,
  one run removes the share `1 - P Var(y | y > limit) / Var(y)` of the variance on average
  (truncated normal, Johnson et al. 1994, section 13.10).
- **Cost**: with `cost`, the gain is divided by the predicted time of the measurement.
- **Second device**: the first device's labels leave open only how the constants of both differ,
  which all workloads share, so the reduction alone decides (docs/research/acquisition.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from trappm.learner.acquisition.embedding_space import embedding_covariance
from trappm.learner.acquisition.pool_covariance import PoolCovariance, PoolPosterior, narrow
from trappm.learner.acquisition.request import AcquisitionRequest, Pick, explain_picks
from trappm.learner.acquisition.strategies import Representation
from trappm.learner.interface import Array

FLOOR = 0.1
"""Least value of each factor, relative to its mean over the candidates (round number). The strategy
was chosen with it on splits of seeds 100 to 119 (docs/research/acquisition.md)."""
TINY = 1e-12
"""Keeps quotients finite."""

Measure = PoolPosterior | Representation
"""Gain of a label of each configuration, by one measure."""


class PoolReduction:
    """Greedy choice of the labels with the largest gain over the pool."""

    def __init__(
        self,
        name: str,
        *,
        guarded: bool = False,
        cost_power: float = 0.0,
        own_covariance: bool = True,
        represents: bool = False,
    ) -> None:
        """Set up a variant of the strategy.

        Args:
            name: Name of the strategy.
            guarded: Whether runs that may run out of memory count for less.
            cost_power: Power of the predicted time that gains are divided by.
            own_covariance: Whether to use the covariances of the request, where it has any, instead
                of the one over the embedding space.
            represents: Whether to multiply by the part of the pool that a label represents.
        """
        self.name = name
        self._guarded = guarded
        self._cost_power = cost_power
        self._own_covariance = own_covariance
        self._represents = represents

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        worth = self._worth(request)
        parts = self._measures(request)
        open_ = np.zeros(len(worth), dtype=bool)
        open_[request.open] = True
        chosen: list[int] = []
        reasons: dict[str, list[float]] = {name: [] for name in parts}
        for _ in range(request.count):
            shares = {
                name: np.mean([measure.gains() / measure.total for measure in measures], axis=0)
                for name, measures in parts.items()
            }
            # Where one factor is flat, as among copies, the other still counts.
            floored = [
                share + FLOOR * float(share[open_].mean()) + TINY for share in shares.values()
            ]
            wanted = worth * np.prod(floored, axis=0)
            best = int(np.argmax(np.where(open_, wanted, -np.inf)))
            chosen.append(best)
            open_[best] = False
            for name, measures in parts.items():
                reasons[name].append(float(shares[name][best]))
                for measure in measures:
                    measure.learn(best)
        return explain_picks(request, chosen, **reasons)

    def _worth(self, request: AcquisitionRequest) -> Array:
        """Return the factor of each configuration for cost and risk (n)."""
        worth = np.ones(len(request.embeddings))
        if self._guarded and request.failure is not None:
            worth *= taught_by_bounds(request.failure)
        if self._cost_power and request.predicted_cost is not None:
            typical = float(np.median(request.predicted_cost))
            worth *= (typical / np.maximum(request.predicted_cost, 1e-3 * typical)) ** (
                self._cost_power
            )
        return worth

    def _measures(self, request: AcquisitionRequest) -> dict[str, Sequence[Measure]]:
        """Return the measures by the name of the reason that they give."""
        parts: dict[str, Sequence[Measure]] = {}
        covariances = list(request.covariances) if self._own_covariance else []
        if not (covariances or self._represents):
            covariances = [embedding_covariance(request)]
        if covariances:
            narrowed = [PoolCovariance(narrow(c.features), c.noise) for c in covariances]
            parts["variance_reduction"] = [
                PoolPosterior(c, request.known, request.noise_factor) for c in narrowed
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


def taught_by_bounds(failure: Array) -> Array:
    """Return the share of a label's gain, for runs with this probability of failure (n)."""
    shares = np.empty(len(failure))
    normal = NormalDist()
    for row, probability in enumerate(np.clip(failure, 1e-9, 1 - 1e-9).tolist()):
        limit = normal.inv_cdf(1.0 - probability)
        ratio = normal.pdf(limit) / probability
        shares[row] = 1.0 - probability * (1.0 + limit * ratio - ratio**2)
    return np.clip(shares, 0.0, 1.0)


def ours(*, cost: bool = False) -> PoolReduction:
    """Return the default strategy; with `cost`, gains are per second of measuring."""
    return PoolReduction("ours", guarded=True, cost_power=float(cost), represents=True)


def variance() -> PoolReduction:
    """Return the strategy of the papers, over the embedding space."""
    return PoolReduction("variance", own_covariance=False)
