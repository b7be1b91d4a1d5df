"""When a campaign has learned enough, spent enough, or learns no more; and when that will be.

Errors on the evaluation set are means over few architectures, so a target counts as reached only
when the upper bound of the mean is below it: a bootstrap over architectures, since batch sizes of
one architecture err alike. What is still to come follows from the curve so far: errors fall about
with a power of the number of labels, labels come at the pace of the last rounds.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profiler.errors import InputError

Array = npt.NDArray[np.float64]

RESAMPLES = 1_000
LEAST_ROUNDS = 3
"""A curve of fewer rounds foretells nothing."""


@dataclass(frozen=True, kw_only=True)
class StopRules:
    """The first of these that holds ends a campaign; None means that it never does.

    Raises:
        InputError: a limit that is not positive, or a confidence outside (0.5, 1).
    """

    target_mape: float | None = None
    """In percent."""
    confidence: float = 0.9
    """With which the mean error is below the target."""
    plateau_rounds: int | None = None
    """So many rounds in a row have to improve the error by less than `plateau_share`."""
    plateau_share: float = 0.02
    labels: int | None = None
    gpu_hours: float | None = None
    money: float | None = None
    """In the currency of `price_per_gpu_hour`."""
    price_per_gpu_hour: float | None = None
    ends_at: datetime.datetime | None = None
    """The clock, with a time zone."""

    def __post_init__(self) -> None:
        for name in ("target_mape", "plateau_rounds", "labels", "gpu_hours", "money",
                     "price_per_gpu_hour"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"the stop rule {name} is {value}; it must be positive")
        if not 0.5 < self.confidence < 1.0:
            raise InputError(f"the confidence is {self.confidence}; give one between 0.5 and 1")
        if self.money is not None and self.price_per_gpu_hour is None:
            raise InputError("a budget in money needs price_per_gpu_hour")
        if self.ends_at is not None and self.ends_at.tzinfo is None:
            raise InputError("ends_at needs a time zone, such as 2026-11-21T18:00+00:00")


@dataclass(frozen=True)
class RoundResult:
    """What is known after a round."""

    labels: int
    """In all, so far."""
    gpu_seconds: float
    """In all, so far."""
    ended_at: datetime.datetime
    errors: Sequence[float]
    """Absolute errors in percent, one for each evaluation label."""
    groups: Sequence[str]
    """The architecture of each."""

    @property
    def mape(self) -> float:
        return float(np.mean(self.errors))


@dataclass(frozen=True)
class Stop:
    """A rule that holds, or the one that will hold first."""

    rule: str
    told: str
    """For people."""
    labels: float | None = None
    """At which it will hold, where it does not yet."""
    at: datetime.datetime | None = None
    """When it will hold at the pace so far."""


def stopped(
    rules: StopRules, rounds: Sequence[RoundResult], generator: np.random.Generator
) -> Stop | None:
    """The rule that ends a campaign after its last round, if one does."""
    if not rounds:
        return None
    last = rounds[-1]
    if rules.target_mape is not None and len(last.errors):
        bound = upper_bound(last, rules.confidence, generator)
        if bound <= rules.target_mape:
            return Stop(
                "target",
                f"the error is {last.mape:.2f} %, with {rules.confidence:.0%} confidence below "
                f"{bound:.2f} %; the target is {rules.target_mape:g} %",
            )
    if rules.plateau_rounds is not None and len(rounds) > rules.plateau_rounds:
        before = min(r.mape for r in rounds[: -rules.plateau_rounds])
        since = min(r.mape for r in rounds[-rules.plateau_rounds :])
        if since > before * (1.0 - rules.plateau_share):
            return Stop(
                "plateau",
                f"{rules.plateau_rounds} rounds improved the error from {before:.2f} % to "
                f"{since:.2f} %, by less than {rules.plateau_share:.0%}",
            )
    for rule, limit, spent in _budgets(rules, last):
        if spent >= limit:
            return Stop(rule, f"{spent:g} of {limit:g} {rule} are spent")
    if rules.ends_at is not None and last.ended_at >= rules.ends_at:
        return Stop(
            "clock", f"it is {last.ended_at:%H:%M}; the end was to be {rules.ends_at:%H:%M}"
        )
    return None


def foretold(rules: StopRules, rounds: Sequence[RoundResult]) -> Stop | None:
    """The rule that will end a campaign first at the pace so far; None if none can be foretold."""
    if len(rounds) < 2:
        return None
    first, last = rounds[0], rounds[-1]
    labels = max(last.labels - first.labels, 1)
    seconds = (last.ended_at - first.ended_at).total_seconds() / labels
    found = []

    def add(rule: str, at_labels: float, told: str) -> None:
        wait = datetime.timedelta(seconds=max(at_labels - last.labels, 0.0) * seconds)
        found.append(Stop(rule, told, at_labels, last.ended_at + wait))

    target = rules.target_mape and labels_to(rules.target_mape, rounds)
    if target:
        add("target", target, f"the error should reach {rules.target_mape:g} %")
    for rule, limit, spent in _budgets(rules, last):
        if spent > 0:
            add(rule, last.labels * limit / spent, f"{limit:g} {rule} will be spent")
    if rules.ends_at is not None:
        left = max((rules.ends_at - last.ended_at).total_seconds(), 0.0)
        at = last.labels + left / seconds if seconds > 0 else float(last.labels)
        found.append(Stop("clock", f"it will be {rules.ends_at:%H:%M}", at, rules.ends_at))
    return min(found, key=lambda stop: stop.at or last.ended_at, default=None)


def upper_bound(result: RoundResult, confidence: float, generator: np.random.Generator) -> float:
    """Below which the mean error is with this confidence, by resampling architectures."""
    names, number = np.unique(np.array(result.groups), return_inverse=True)
    sums = np.bincount(number, np.asarray(result.errors), len(names))
    counts = np.bincount(number, minlength=len(names))
    drawn = generator.integers(len(names), size=(RESAMPLES, len(names)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    return float(np.quantile(means, confidence))


def labels_to(target: float, rounds: Sequence[RoundResult]) -> float | None:
    """Labels at which the error should reach a target, by the power law of the rounds so far.

    None if it does not fall, or not within a hundred times the labels of today.
    """
    known = [r for r in rounds if r.labels > 0 and len(r.errors)]
    if len(known) < LEAST_ROUNDS:
        return None
    x, y = np.log([r.labels for r in known]), np.log([r.mape for r in known])
    slope, level = np.polyfit(x, y, 1)
    if slope >= -1e-3:
        return None
    found = float(np.exp(min((np.log(target) - level) / slope, 50.0)))
    return max(found, float(known[-1].labels)) if found < 100 * known[-1].labels else None


def _budgets(rules: StopRules, last: RoundResult) -> list[tuple[str, float, float]]:
    """Rule, limit and what is spent of it."""
    hours = last.gpu_seconds / 3600
    price = rules.price_per_gpu_hour or 0.0
    asked = (
        ("labels", rules.labels, float(last.labels)),
        ("GPU-hours", rules.gpu_hours, hours),
        ("money", rules.money, hours * price),
    )
    return [(rule, float(limit), spent) for rule, limit, spent in asked if limit is not None]
