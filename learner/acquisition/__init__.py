"""Acquisition strategies that a campaign can name, behind one interface.

The most uncertain configurations are not the most informative ones: they are often similar to each
other, or unlike the rest of the pool. `ours` reduces the variance of the whole pool instead.
docs/research/acquisition.md compares the strategies on recorded labels.
"""

from __future__ import annotations

from collections.abc import Sequence

from trappm.learner.acquisition.embedding_space import NOISE_VARIANCE, MostUncertain
from trappm.learner.acquisition.pool_covariance import PoolCovariance
from trappm.learner.acquisition.pool_variance import ours
from trappm.learner.acquisition.request import AcquisitionRequest, Pick, Strategy
from trappm.learner.acquisition.strategies import (
    Clusters,
    FacilityLocation,
    Lcmd,
    RandomChoice,
    Stratified,
)
from trappm.profiler.errors import InputError
from trappm.profiler.text import nearest

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
"""All names, the default first."""

__all__ = [
    "DEFAULT",
    "NOISE_VARIANCE",
    "STRATEGIES",
    "AcquisitionRequest",
    "Pick",
    "PoolCovariance",
    "Strategy",
    "cold_start",
    "strategy_named",
]


def cold_start(strategy: Strategy) -> Strategy:
    """Return the strategy for the first round: `clusters` for one that needs trained heads."""
    return _STRATEGIES["clusters"] if isinstance(strategy, MostUncertain) else strategy


def strategy_named(name: str, others: Sequence[Strategy] = ()) -> Strategy:
    """Return the strategy of this name.

    Args:
        name: Name of the strategy.
        others: Strategies to search in addition to those of campaigns.

    Raises:
        InputError: There is no such strategy.
    """
    known = _STRATEGIES | {strategy.name: strategy for strategy in others}
    if name in known:
        return known[name]
    raise InputError(f"no acquisition strategy {name!r}; {nearest(name, known)}")
