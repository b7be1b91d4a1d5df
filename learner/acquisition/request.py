"""Requests for configurations to measure, the interface of all strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from trappm.learner.acquisition.pool_covariance import PoolCovariance, embedding_points
from trappm.learner.interface import Array, FloatArray, IntArray
from trappm.profiler.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class AcquisitionRequest:
    """A pool of n configurations, what is known of it, and how many to pick.

    Only the first group of fields is required; a strategy that needs more raises an error without.

    Raises:
        InputError: An array has a NaN, or there are more picks than candidates.
    """

    embeddings: FloatArray
    """Embeddings of the frozen encoder (n, d)."""
    static_features: Array
    """Unscaled features (n, s)."""
    labelled: IntArray
    """Indices of configurations that the heads were trained on."""
    candidates: IntArray
    """Indices that may be picked; labelled ones are left out."""
    count: int
    """Number of configurations to pick."""
    generator: np.random.Generator

    covariances: Sequence[PoolCovariance] = ()
    """One per metric."""
    uncertainty: Array | None = None
    """Disagreement among the heads' members, on any scale (n); None before there are heads."""
    predicted_cost: Array | None = None
    """Predicted step time in milliseconds, to which the time of measuring is in proportion (n)."""
    failure: Array | None = None
    """Probability that a run dies of the device's memory (n)."""
    noise_factor: Array | None = None
    """Noise variance relative to a usual measurement (n); above 1 for unstable runs."""
    taught: bool = False
    """True if covariances are of what another device's labels leave open on this one."""

    def __post_init__(self) -> None:
        by_row = {
            name: getattr(self, name)
            for name in (
                "embeddings", "static_features", "uncertainty", "predicted_cost", "failure",
                "noise_factor",
            )
        }  # fmt: skip
        by_row |= {f"covariances[{i}]": c.features for i, c in enumerate(self.covariances)}
        for name, values in by_row.items():
            if values is not None and np.isnan(values).any():
                row = int(np.argwhere(np.isnan(values))[0][0])
                # A NaN compares with nothing: picks would follow the order of the pool.
                raise InputError(f"{name} has no number for configuration {row} of the pool")
        if self.count < 0 or self.count > len(self.open):
            raise InputError(
                f"{self.count} configurations were asked for, and {len(self.open)} of the "
                "candidates have no label"
            )

    @cached_property
    def known(self) -> IntArray:
        """Labelled configurations, sorted, each once."""
        return np.unique(self.labelled).astype(np.int64)

    @cached_property
    def open(self) -> IntArray:
        """Candidates without a label, sorted, each once."""
        return np.setdiff1d(self.candidates, self.known).astype(np.int64)

    @cached_property
    def points(self) -> FloatArray:
        """Return the configurations as points for distance-based strategies (n, c)."""
        return embedding_points(self.embeddings, np.log1p(self.static_features))


@dataclass(frozen=True)
class Pick:
    """A configuration to measure, by its index in the pool, and why."""

    index: int
    reason: Mapping[str, Any] = field(default_factory=dict)


class Strategy(Protocol):
    """Chooses what to measure next."""

    name: str

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        """Return the picks, most valuable first.

        Raises:
            InputError: The request lacks what the strategy needs.
        """


def explain_picks(
    request: AcquisitionRequest, chosen: Sequence[int], **reasons: Sequence[float]
) -> list[Pick]:
    """Return picks with their reasons.

    Every pick has its rank, its rank in a uniform draw of the same candidates, and the distance to
    the nearest label when the batch was chosen.

    Args:
        request: The request.
        chosen: Indices, the most wanted first.
        reasons: More numbers of each pick, in the order of `chosen`, by the name of the reason.
    """
    known = request.points[request.known]
    drawn = np.empty(len(request.embeddings), dtype=np.int64)
    drawn[np.random.default_rng(len(request.known)).permutation(request.open)] = np.arange(
        len(request.open)
    )
    picks = []
    for rank, index in enumerate(chosen):
        reason: dict[str, Any] = {"rank": rank, "rank_under_random": int(drawn[index])}
        if len(known):
            gaps = ((known - request.points[index]) ** 2).sum(axis=1)
            reason["distance_to_nearest_label"] = round(float(np.sqrt(gaps.min())), 4)
        for name, values in (
            ("uncertainty", request.uncertainty),
            ("predicted_step_time_ms", request.predicted_cost),
            ("probability_of_failure", request.failure),
        ):
            if values is not None:
                reason[name] = round(float(values[index]), 4)
        reason |= {name: round(float(values[rank]), 6) for name, values in reasons.items()}
        picks.append(Pick(int(index), reason))
    return picks
