"""Acquisition strategies that a campaign can name, behind one interface.

The most uncertain configurations are not the most informative ones: they are often similar to each
other, or unlike the rest of the pool. `ours` reduces the variance of the whole pool instead.
docs/research/acquisition.md compares the strategies on recorded labels.
"""

from __future__ import annotations

from trappm.learner.acquisition.embedding_space import NOISE_VARIANCE, MostUncertain
from trappm.learner.acquisition.pool_covariance import PoolCovariance
from trappm.learner.acquisition.pool_variance import ours, variance
from trappm.learner.acquisition.request import AcquisitionRequest, Pick, Strategy
from trappm.learner.acquisition.strategies import RandomChoice
from trappm.profiler.errors import InputError, nearest

DEFAULT = "ours"

_STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy for strategy in (ours(), variance(), MostUncertain(), RandomChoice())
}

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
    """Return the strategy for the first round: `ours` for one that needs trained heads."""
    return _STRATEGIES[DEFAULT] if isinstance(strategy, MostUncertain) else strategy


def strategy_named(name: str, *, cost: bool = False) -> Strategy:
    """Return the strategy of this name.

    Args:
        name: Name of the strategy.
        cost: Whether gains are per second of measuring, which only `ours` knows.

    Raises:
        InputError: There is no such strategy, or it does not know cost.
    """
    if name not in _STRATEGIES:
        paid = " and cost: true" if name == "ours-per-second" else ""
        advice = nearest(name, STRATEGIES, otherwise=f"write strategy: {DEFAULT}{paid}")
        raise InputError(f"strategy {name!r} is not offered; {advice}")
    if cost and name != DEFAULT:
        raise InputError(f"cost: true needs strategy: {DEFAULT}, not {name}")
    return ours(cost=True) if cost else _STRATEGIES[name]
