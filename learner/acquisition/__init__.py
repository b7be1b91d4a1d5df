"""What to measure next: the strategies that a campaign can name, behind one small interface.

The most uncertain configurations are not the most instructive ones: they are often alike, or alike
nothing else in the pool. `ours` asks how much the *whole pool* would become certain instead.
docs/studies/choosing.md compares them on recorded labels, with others that `learner.bench` only
judges.
"""

from __future__ import annotations

from collections.abc import Sequence

from trappm.learner.acquisition.covariance import Covariance
from trappm.learner.acquisition.coverage import Clusters, FacilityLocation
from trappm.learner.acquisition.draws import MostUncertain, RandomChoice, Stratified
from trappm.learner.acquisition.gradient import Lcmd
from trappm.learner.acquisition.ours import NOISE_VARIANCE, ours
from trappm.learner.acquisition.request import AcquisitionRequest, Pick, Strategy
from trappm.profiler.errors import InputError
from trappm.profiler.nearest import nearest

DEFAULT = "ours"

_ALL: tuple[Strategy, ...] = (
    *ours(),
    RandomChoice(),
    Stratified(),
    MostUncertain(),
    FacilityLocation(),
    Clusters(),
    Lcmd(),
)
_STRATEGIES = {strategy.name: strategy for strategy in _ALL}

STRATEGIES = tuple(_STRATEGIES)
"""All names, ours first."""

__all__ = [
    "DEFAULT",
    "NOISE_VARIANCE",
    "STRATEGIES",
    "AcquisitionRequest",
    "Covariance",
    "Pick",
    "Strategy",
    "cold_start",
    "strategy_named",
]


def cold_start(strategy: Strategy) -> Strategy:
    """The strategy that chooses before any label: itself, or the middles of clusters of embeddings
    within families for one that needs trained heads."""
    return _STRATEGIES["clusters"] if isinstance(strategy, MostUncertain) else strategy


def strategy_named(name: str, others: Sequence[Strategy] = ()) -> Strategy:
    """The strategy of this name, among those of campaigns and these others.

    Raises:
        InputError: there is none of this name.
    """
    known = _STRATEGIES | {strategy.name: strategy for strategy in others}
    if name in known:
        return known[name]
    raise InputError(f"no acquisition strategy {name!r}; {nearest(name, known)}")
