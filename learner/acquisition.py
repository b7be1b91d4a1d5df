"""What to measure next: the strategies behind one small interface.

The most uncertain configurations are not the most instructive ones: they are often alike, or alike
nothing else in the pool. `variance` asks how much the *whole pool* would become certain instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from learner.kernel import coordinates, pool_features
from profiler.errors import InputError

Array = npt.NDArray[np.float64]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

NOISE_VARIANCE = 0.05
"""Of one measurement, where the variance before any measurement is about 1."""

AMPLITUDE_RANGE = (0.5, 2.0)
"""How far disagreement may lower or raise the deviation of a configuration."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AcquisitionRequest:
    """A pool of n configurations, what is known of it, and how many to pick.

    Raises:
        InputError: arrays that do not belong to one pool, or more picks than candidates.
    """

    embeddings: FloatArray
    """By the frozen encoder (n, d)."""
    static_features: Array
    """As they are, not scaled (n, s)."""
    labelled: IntArray
    """Indices of configurations that the heads were trained on."""
    candidates: IntArray
    """Indices that may be picked; those labelled or pending are left out."""
    count: int
    """How many to pick."""
    generator: np.random.Generator
    pending: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Indices of configurations that are being measured; they count as if already known."""
    uncertainty: Array | None = None
    """Disagreement among the heads' members, on any scale (n); None before there are heads."""
    predicted_cost: Array | None = None
    """Predicted step time in milliseconds (n), told with the reasons."""

    def __post_init__(self) -> None:
        n = len(self.embeddings)
        for name in ("static_features", "uncertainty", "predicted_cost"):
            values = getattr(self, name)
            if values is not None and len(values) != n:
                raise InputError(f"{name} has {len(values)} rows for a pool of {n}")
        for name in ("labelled", "pending", "candidates"):
            indices = getattr(self, name)
            if len(indices) and not (indices.min() >= 0 and indices.max() < n):
                raise InputError(f"{name} points outside the pool of {n} configurations")
        if self.count < 0 or self.count > len(self.open):
            raise InputError(
                f"{self.count} configurations were asked for, and {len(self.open)} of the "
                "candidates are neither labelled nor pending"
            )

    @property
    def known(self) -> IntArray:
        """Labelled or pending, sorted, each once."""
        return np.unique(np.concatenate([self.labelled, self.pending])).astype(np.int64)

    @property
    def open(self) -> IntArray:
        """Candidates that are neither labelled nor pending, sorted, each once."""
        return np.setdiff1d(self.candidates, self.known).astype(np.int64)


@dataclass(frozen=True)
class Pick:
    """A configuration to measure, by its index in the pool, and why."""

    index: int
    reason: Mapping[str, Any] = field(default_factory=dict)


class Strategy(Protocol):
    """Chooses what to measure next."""

    name: str

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        """The picks, the most wanted first."""
        ...


class RandomChoice:
    """A uniform draw: what every other strategy has to beat."""

    name = "random"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        chosen = request.generator.permutation(request.open)[: request.count]
        return _explained(request, chosen.tolist())


class VarianceReduction:
    """Greedy reduction of the average posterior variance over the whole pool.

    Cohn (1996), "Neural network exploration using optimal experiment design", for a Gaussian
    process: measuring j lowers the sum of variances by `sum_t C_tj^2 / (C_jj + noise)`, C being
    the posterior covariance. Picks are conditioned on one by one, so a batch is diverse; the
    disagreement of the heads scales C, so it leans to where they are unsure.

    With features F of p columns (C = F A F^T) everything is kept in p x p and n: no n x n matrix.
    """

    name = "variance"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        features = pool_features(
            request.embeddings, np.log1p(request.static_features), request.generator
        )
        features *= _amplitude(request.uncertainty, len(features))[:, None]
        p = features.shape[1]
        gram = (features.T @ features).astype(np.float64)
        known = features[request.known].astype(np.float64)
        inner = np.linalg.inv(np.eye(p) + known.T @ known / NOISE_VARIANCE)  # A
        variance = np.einsum("np,np->n", features @ inner.astype(np.float32), features)
        variance = variance.astype(np.float64)  # C_jj
        through = inner @ gram @ inner
        power = np.einsum("np,np->n", features @ through.astype(np.float32), features)
        power = power.astype(np.float64)  # sum_t C_tj^2
        open_ = np.zeros(len(features), dtype=bool)
        open_[request.open] = True
        chosen: list[int] = []
        gains: list[float] = []
        for _ in range(request.count):
            gain = np.where(open_, power / (variance + NOISE_VARIANCE), -np.inf)
            best = int(np.argmax(gain))
            chosen.append(best)
            gains.append(float(gain[best]) / len(features))
            open_[best] = False
            # Rank-one downdate of A, and of the two vectors that depend on it.
            direction = inner @ features[best].astype(np.float64)
            denominator = float(features[best] @ direction) + NOISE_VARIANCE
            image = inner @ (gram @ direction)
            column = features @ direction.astype(np.float32)  # C_tj before the downdate
            crossed = features @ image.astype(np.float32)
            weight = float(direction @ gram @ direction) / denominator**2
            variance = np.maximum(variance - column**2 / denominator, 0.0)
            power = np.maximum(power - 2 * column * crossed / denominator + weight * column**2, 0.0)
            inner -= np.outer(direction, direction) / denominator
        return _explained(request, chosen, gains)


_STRATEGIES: Mapping[str, Callable[[], Strategy]] = {
    "random": RandomChoice,
    "variance": VarianceReduction,
}


def strategy_named(name: str) -> Strategy:
    """Raises InputError for a name that is no strategy."""
    if name in _STRATEGIES:
        return _STRATEGIES[name]()
    near = difflib.get_close_matches(name, list(_STRATEGIES), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(_STRATEGIES)}"
    raise InputError(f"no acquisition strategy {name!r}; {hint}")


def _amplitude(uncertainty: Array | None, n: int) -> FloatArray:
    """What to scale each configuration's deviation by (n): its uncertainty beside the typical one.

    The square root and the bounds keep a wrong guess of the heads from ruling the choice.
    """
    if uncertainty is None or not np.median(uncertainty) > 0:
        return np.ones(n, dtype=np.float32)
    ratio = np.sqrt(uncertainty / np.median(uncertainty))
    return np.clip(ratio, *AMPLITUDE_RANGE).astype(np.float32)


def _explained(
    request: AcquisitionRequest,
    chosen: Sequence[int],
    gains: Sequence[float] | None = None,
) -> list[Pick]:
    """Picks with their reasons; the distance is that to the nearest label when they were picked."""
    points = coordinates(request.embeddings, np.log1p(request.static_features))
    known = points[request.known]
    picks = []
    for rank, index in enumerate(chosen):
        reason: dict[str, Any] = {"rank": rank}
        if len(known):
            gaps = ((known - points[index]) ** 2).sum(axis=1)
            reason["distance_to_nearest_label"] = round(float(np.sqrt(gaps.min())), 4)
        if request.uncertainty is not None:
            reason["uncertainty"] = round(float(request.uncertainty[index]), 4)
        if request.predicted_cost is not None:
            reason["predicted_step_time_ms"] = round(float(request.predicted_cost[index]), 3)
        if gains is not None:
            reason["variance_reduction"] = round(gains[rank], 6)
        picks.append(Pick(index, reason))
    return picks
