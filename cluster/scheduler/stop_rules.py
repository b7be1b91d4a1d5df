"""When a campaign has learned enough, spent enough, or learns no more; and when that will be.

Errors on the evaluation set are means over few architectures, so a target counts as reached only
when the upper bound of the mean is below it, by architectures, since batch sizes of one err alike.
What is still to come follows from the curve so far: errors fall about with a power of the number of
labels, labels come at the pace of the last rounds.

Targets and plateaus are asked after each training. Budgets are looked at before each measurement
(`allowance`), the clock once a second. Once a rule holds, nothing more begins.
"""

from __future__ import annotations

import contextlib
import datetime
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from trappm.profiler.errors import InputError
from trappm.profiler.records import METRICS

LEAST_ERROR = 1e-3
"""Percent; less counts as this."""
RESAMPLES = 1_000
DRAWS_OF_T = 50_000
"""Enough for its quantiles to a percent."""
LEAST_ROUNDS = 3
"""A curve of fewer rounds foretells nothing."""

Series = tuple[str, str]
"""A device and a metric."""


@dataclass(frozen=True, kw_only=True)
class StopRules:
    """The first of these that holds ends a campaign; None means that it never does.

    What is being measured then is still kept; what is only planned is left unmeasured.

    Raises:
        InputError: a limit that is not positive, an unknown metric, a confidence outside (0.5, 1).
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "allow_inf_nan": False}

    target_mape: Mapping[str, float] | None = None
    """By metric, in percent; on every device of the campaign all of them have to be reached."""
    confidence: float = 0.9
    """With which each mean error is below its target."""
    plateau_rounds: int | None = None
    """So many rounds in a row have to improve every error by less than `plateau_share`."""
    plateau_share: float = 0.02
    labels: int | None = None
    """On all devices, the evaluation set included."""
    gpu_hours: float | None = None
    """Of measuring, on whatever devices, failed attempts included."""
    money: float | None = None
    """In the currency of `price_per_gpu_hour`."""
    price_per_gpu_hour: float | None = None
    ends_at: datetime.datetime | None = None
    """The clock, with a time zone."""

    def __post_init__(self) -> None:
        for name in ("plateau_rounds", "labels", "gpu_hours", "money", "price_per_gpu_hour"):
            _check_positive(name, getattr(self, name))
        for metric, target in (self.target_mape or {}).items():
            if metric not in METRICS:
                raise InputError(f"no metric {metric!r} for a target; there are: "
                                 f"{', '.join(METRICS)}")  # fmt: skip
            _check_positive(f"target_mape of {metric}", target)
        if not 0.5 < self.confidence < 1.0:
            raise InputError(f"the confidence is {self.confidence}; give one between 0.5 and 1")
        if not 0.0 < self.plateau_share < 1.0:
            raise InputError(f"plateau_share is {self.plateau_share}; give one between 0 and 1")
        if self.money is not None and self.price_per_gpu_hour is None:
            raise InputError("a budget in money needs price_per_gpu_hour")
        if self.ends_at is not None and self.ends_at.tzinfo is None:
            raise InputError("ends_at needs a time zone, such as 2026-11-21T18:00+00:00")

    @property
    def have_budget(self) -> bool:
        """One of labels, of measuring time or of money."""
        return any(limit is not None for limit in (self.labels, self.gpu_hours, self.money))


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise InputError(f"the stop rule {name} is {value}; it must be positive")


@dataclass(frozen=True)
class Judged:
    """How a metric was predicted on a device, over the evaluation set."""

    errors: Sequence[float]
    """Absolute, in percent."""
    architectures: Sequence[str]
    """Of each."""

    @property
    def mape(self) -> float:
        return float(np.mean(self.errors))


@dataclass(frozen=True)
class RoundResult:
    """What was known and spent after a training."""

    labels: int
    """In all, so far."""
    gpu_seconds: float
    """In all, so far."""
    ended_at: datetime.datetime
    judged: Mapping[Series, Judged] = field(default_factory=dict)

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> RoundResult | None:
        """From a learner's report with what was spent; None for one that does not tell."""
        spent = report.get("spent")
        if spent is None:
            return None
        pairs: dict[Series, list[tuple[float, str]]] = defaultdict(list)
        for one in report["evaluation"]:
            error = 100.0 * abs(one["predicted"] / one["measured"] - 1.0)
            pairs[one["device"], one["metric"]].append((error, one["architecture"]))
        return cls(
            labels=spent["labels"],
            gpu_seconds=spent["gpu_seconds"],
            ended_at=datetime.datetime.fromisoformat(spent["at"]),
            judged={
                series: Judged([e for e, _ in found], [name for _, name in found])
                for series, found in pairs.items()
            },
        )


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
    rules: StopRules,
    rounds: Sequence[RoundResult],
    devices: Sequence[str],
    generator: np.random.Generator,
) -> Stop | None:
    """Whether errors end a campaign after its last training: their target, or their plateau."""
    if not rounds:
        return None
    last = rounds[-1]
    if told := _reached(rules, last, devices, generator):
        return Stop("target", told)
    if told := _stagnates(rules, rounds):
        return Stop("plateau", told)
    return None


def overspent(
    rules: StopRules, labels: int, gpu_seconds: float, more_labels: int, more_seconds: float
) -> Stop | None:
    """The first budget that is overrun if so much is spent on top of what was spent, if one is."""
    now = _budgets(rules, labels, gpu_seconds)
    then = _budgets(rules, labels + more_labels, gpu_seconds + more_seconds)
    for (rule, limit, spent), (_, _, expected) in zip(now, then, strict=True):
        if expected > limit * (1.0 + 1e-9):  # sums of seconds are not exact
            told = f"{spent:.4g} of {limit:g} {rule} are spent"
            if spent < limit:
                told += f", and one more measurement takes about {expected - spent:.2g}"
            return Stop(rule, told)
    return None


def past(rules: StopRules, now: datetime.datetime) -> Stop | None:
    """Whether the clock ends a campaign."""
    if rules.ends_at is None or now < rules.ends_at:
        return None
    return Stop("clock", f"it is past {_moment(rules.ends_at)}")


def foretold(rules: StopRules, rounds: Sequence[RoundResult], planned: int) -> Stop | None:
    """What will end a campaign first at the pace so far; None if nothing can be foretold.

    Args:
        rules: of the campaign.
        rounds: so far; the first may be the launch, with nothing.
        planned: labels that the campaign's rounds have in all, which end it in any case.
    """
    if len(rounds) < 2 or rounds[-1].labels <= rounds[0].labels:
        return None
    first, last = rounds[0], rounds[-1]
    seconds = (last.ended_at - first.ended_at).total_seconds() / (last.labels - first.labels)
    found = []

    def add(rule: str, at_labels: float, told: str) -> None:
        wait_s = max(at_labels - last.labels, 0.0) * seconds
        with contextlib.suppress(OverflowError):  # a limit so large that no calendar goes that far
            at = last.ended_at + datetime.timedelta(seconds=wait_s)
            found.append(Stop(rule, told, at_labels, at))

    target = labels_to(rules.target_mape or {}, rounds)
    if target is not None:
        add("target", target, "every target should be reached")
    for rule, limit, spent in _budgets(rules, last.labels, last.gpu_seconds):
        if spent > 0:
            add(rule, last.labels * limit / spent, f"{limit:g} {rule} will be spent")
    add("rounds", planned, f"the {planned} labels of all rounds will be there")
    if rules.ends_at is not None:
        left = max((rules.ends_at - last.ended_at).total_seconds(), 0.0)
        at = last.labels + left / seconds if seconds > 0 else float(last.labels)
        found.append(Stop("clock", f"it will be {_moment(rules.ends_at)}", at, rules.ends_at))
    return min(found, key=lambda stop: stop.at or last.ended_at, default=None)


def upper_bound(judged: Judged, confidence: float, generator: np.random.Generator) -> float:
    """Below which the mean error is with this confidence; infinite from one architecture alone.

    The larger of two bounds. Resampling architectures asks for no distribution, but is too sure
    with few of them (eight: it held 70 % of the time instead of 90). For these the errors are taken
    as log-normal, with Student's t for the mean (Cox's method; Zhou and Gao 1997).
    """
    names, number = np.unique(np.array(judged.architectures), return_inverse=True)
    if len(names) == 1:
        return np.inf
    sums = np.bincount(number, np.asarray(judged.errors), len(names))
    counts = np.bincount(number, minlength=len(names))
    drawn = generator.integers(len(names), size=(RESAMPLES, len(names)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    logs = np.log(np.maximum(sums / counts, LEAST_ERROR))
    spread, free = float(np.var(logs, ddof=1)), len(names) - 1
    error = np.sqrt(spread / len(names) + spread**2 / (2 * free))
    t = np.quantile(generator.standard_t(free, DRAWS_OF_T), confidence)
    log_normal = logs.mean() + spread / 2 + t * error
    return float(max(np.quantile(means, confidence), np.exp(min(log_normal, 50.0))))


def labels_to(targets: Mapping[str, float], rounds: Sequence[RoundResult]) -> float | None:
    """Labels at which all errors should reach their targets, by the power law of the rounds so far.

    None if one of them does not fall, or not within a hundred times the labels of today.
    """
    series = [s for s in rounds[-1].judged if s[1] in targets]
    needed = [_labels_of(s, targets[s[1]], rounds) for s in series]
    known = [labels for labels in needed if labels is not None]
    return max(known) if known and len(known) == len(needed) else None


def _labels_of(series: Series, target: float, rounds: Sequence[RoundResult]) -> float | None:
    curve = [(r.labels, r.judged[series].mape) for r in rounds if r.labels and series in r.judged]
    if len(curve) < LEAST_ROUNDS:
        return None
    x, y = np.log(np.array(curve)).T
    slope, level = np.polyfit(x, y, 1)
    if slope >= -1e-3:
        return None
    today = float(curve[-1][0])
    found = float(np.exp(min((np.log(target) - level) / slope, 50.0)))
    return max(found, today) if found < 100 * today else None


def _reached(
    rules: StopRules,
    last: RoundResult,
    devices: Sequence[str],
    generator: np.random.Generator,
) -> str | None:
    """That all targets are reached on all devices, for people; None as long as one is not."""
    told = []
    for metric, target in (rules.target_mape or {}).items():
        for device in devices:
            judged = last.judged.get((device, metric))
            if judged is None:
                return None
            bound = upper_bound(judged, rules.confidence, generator)
            if bound > target:
                return None
            told.append(
                f"{metric} on {device}: {judged.mape:.2f} %, with {rules.confidence:.0%} "
                f"confidence below {bound:.2f} % (target {target:g} %)"
            )
    return "; ".join(told) or None


def _stagnates(rules: StopRules, rounds: Sequence[RoundResult]) -> str | None:
    """That no error improves any more, for people; None as long as one does."""
    window = rules.plateau_rounds
    if window is None or len(rounds) <= window:
        return None
    told = []
    for series in rounds[-1].judged:
        if rules.target_mape is not None and series[1] not in rules.target_mape:
            continue
        errors = [[r.judged[series].mape for r in part if series in r.judged]
                  for part in (rounds[:-window], rounds[-window:])]  # fmt: skip
        if not errors[0]:
            return None  # it is judged for the first time
        before, since = (min(part) for part in errors)
        if since <= before * (1.0 - rules.plateau_share):
            return None
        told.append(f"{series[1]} on {series[0]} from {before:.2f} % to {since:.2f} %")
    if not told:
        return None
    return (
        f"{window} rounds improved no error by {rules.plateau_share:.0%} or more: {'; '.join(told)}"
    )


def _budgets(rules: StopRules, labels: int, gpu_seconds: float) -> list[tuple[str, float, float]]:
    """Rule, limit and what is spent of it."""
    hours = gpu_seconds / 3600
    price = rules.price_per_gpu_hour or 0.0
    asked = (
        ("labels", rules.labels, float(labels)),
        ("GPU-hours", rules.gpu_hours, hours),
        ("money", rules.money, hours * price),
    )
    return [(rule, float(limit), spent) for rule, limit, spent in asked if limit is not None]


def _moment(at: datetime.datetime) -> str:
    return f"{at.astimezone(datetime.UTC):%Y-%m-%d %H:%M} UTC"
