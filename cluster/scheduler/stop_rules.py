"""The rules that end a campaign early: errors low enough, no progress, a budget spent, the clock.

Errors on the evaluation set are means over few architectures, so a target counts as reached only
when the upper bound of the mean is below it, by architectures, since batch sizes of one err alike.

Targets and plateaus are checked after each training, budgets before each measurement (`spend`),
the clock once a second. Once a rule holds, nothing more begins. Which budget ends the campaign
first, and when, follows from the pace so far.
"""

from __future__ import annotations

import contextlib
import datetime
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from trappm.cluster.scheduler.training_report import Spent, TrainingReport
from trappm.profiler.errors import InputError
from trappm.profiler.number_text import number_text
from trappm.profiler.records import METRICS

SMALLEST_ERROR = 1e-3
"""Percent; less counts as this."""

Series = tuple[str, str]
"""A device and a metric."""


@dataclass(frozen=True, kw_only=True)
class StopRules:
    """The first of these that holds ends a campaign; None means that it never does.

    What is being measured then is still kept; what is only planned is left unmeasured.

    Raises:
        InputError: a limit that is not positive, an unknown metric, a confidence outside (0.5, 1).
    """

    __pydantic_config__: ClassVar[Any] = {
        "extra": "forbid",
        "allow_inf_nan": False,
        "use_attribute_docstrings": True,
    }

    target_mape: Mapping[str, float] | None = None
    """Target error by metric in percent; all must be reached on every device."""
    confidence: float = 0.9
    """Confidence with which each mean error is below its target."""
    plateau_rounds: int | None = None
    """Number of rounds in a row that improve every error by less than `plateau_share`."""
    plateau_share: float = 0.02
    """Relative improvement that counts as progress."""
    labels: int | None = None
    """Number of labels on all devices, the evaluation set included."""
    gpu_hours: float | None = None
    """Hours of measuring on all devices, failed attempts included."""
    money: float | None = None
    """Budget in the currency of `price_per_gpu_hour`."""
    price_per_gpu_hour: float | None = None
    """Price of a GPU for an hour, in any currency."""
    ends_at: datetime.datetime | None = None
    """Time at which the campaign ends, with a time zone."""

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


Result = Mapping[Series, Judged]
"""How a training's heads predicted."""


def result_of(report: TrainingReport) -> Result:
    pairs: dict[Series, list[tuple[float, str]]] = defaultdict(list)
    for judgement in report.evaluation:
        error = 100.0 * abs(judgement.predicted / judgement.measured - 1.0)
        pairs[judgement.device, judgement.metric].append((error, judgement.architecture or ""))
    return {series: Judged(*zip(*errors, strict=True)) for series, errors in pairs.items()}


@dataclass(frozen=True)
class Stop:
    """The stop rule that holds, with its reason."""

    rule: str
    reason: str
    """For people."""


@dataclass(frozen=True)
class Forecast:
    """The rule that will hold first at the pace so far."""

    rule: str
    reason: str
    """For people."""
    labels: float
    """At which it will hold."""
    at: datetime.datetime


def stopped(rules: StopRules, results: Sequence[Result], devices: Sequence[str]) -> Stop | None:
    """Whether errors end a campaign after its last training: their target, or their plateau."""
    if not results:
        return None
    if reason := _reached(rules, results[-1], devices):
        return Stop("target", reason)
    if reason := _stagnates(rules, results):
        return Stop("plateau", reason)
    return None


def overspent(
    rules: StopRules, labels: int, gpu_seconds: float, more_labels: int, more_seconds: float
) -> Stop | None:
    """The first budget that would be overrun by spending so much more; None if none would."""
    now = _budgets(rules, labels, gpu_seconds)
    then = _budgets(rules, labels + more_labels, gpu_seconds + more_seconds)
    for (rule, limit, spent), (_, _, expected) in zip(now, then, strict=True):
        if expected > limit * (1.0 + 1e-9):  # sums of seconds are not exact
            reason = f"{number_text(spent)} of {number_text(limit)} {rule} are spent"
            if spent < limit:
                reason += (
                    f", and one more measurement takes about {number_text(expected - spent, 2)}"
                )
            return Stop(rule, reason)
    return None


def past(rules: StopRules, now: datetime.datetime) -> Stop | None:
    """Whether the clock ends a campaign."""
    if rules.ends_at is None or now < rules.ends_at:
        return None
    return Stop("clock", f"it is past {_moment(rules.ends_at)}")


def forecast(rules: StopRules, begin: Spent, now: Spent, planned: int) -> Forecast | None:
    """What will end a campaign first at the pace so far; None if there is no pace yet.

    Targets and plateaus are not forecast: errors do not fall at a rate.

    Args:
        rules: of the campaign.
        begin: what was spent when the pace began, such as nothing at the launch.
        now: what is spent by now.
        planned: labels that the campaign's rounds have in all, which end it in any case.
    """
    labels = now.labels - begin.labels
    if labels <= 0:
        return None
    label_s = (now.at - begin.at).total_seconds() / labels
    ends = [("rounds", float(planned), f"the {planned} labels of all rounds will be there")]
    ends += [
        (rule, now.labels * limit / spent, f"{number_text(limit)} {rule} will be spent")
        for rule, limit, spent in _budgets(rules, now.labels, now.gpu_seconds)
        if spent > 0
    ]
    forecasts = []
    for rule, at_labels, reason in ends:
        wait_s = max(at_labels - now.labels, 0.0) * label_s
        with contextlib.suppress(OverflowError):  # a limit so large that no calendar goes that far
            at = now.at + datetime.timedelta(seconds=wait_s)
            forecasts.append(Forecast(rule, reason, at_labels, at))
    if rules.ends_at is not None:
        wait_s = max((rules.ends_at - now.at).total_seconds(), 0.0)
        at_labels = now.labels + (wait_s / label_s if label_s > 0 else 0.0)
        reason = f"it will be {_moment(rules.ends_at)}"
        forecasts.append(Forecast("clock", reason, at_labels, rules.ends_at))
    return min(forecasts, key=lambda forecast: forecast.at, default=None)


def upper_bound(judged: Judged, confidence: float) -> float:
    """Return the upper confidence bound of a mean error; infinite from one architecture alone.

    The errors of architectures are taken as log-normal (Cox's method with Student's t; Zhou and
    Gao 1997). Resampling needs no distribution, but its bound is too low with few architectures.
    """
    names, number = np.unique(np.array(judged.architectures), return_inverse=True)
    if len(names) == 1:
        return np.inf
    sums = np.bincount(number, np.asarray(judged.errors), len(names))
    counts = np.bincount(number, minlength=len(names))
    logs = np.log(np.maximum(sums / counts, SMALLEST_ERROR))
    spread, free = float(np.var(logs, ddof=1)), len(names) - 1
    error = np.sqrt(spread / len(names) + spread**2 / (2 * free))
    bound = logs.mean() + spread / 2 + stats.t.ppf(confidence, free) * error
    return float(np.exp(min(bound, 50.0)))


def _reached(rules: StopRules, last: Result, devices: Sequence[str]) -> str | None:
    """That all targets are reached on all devices, for people; None as long as one is not."""
    reasons = []
    for metric, target in (rules.target_mape or {}).items():
        for device in devices:
            judged = last.get((device, metric))
            if judged is None:
                return None
            bound = upper_bound(judged, rules.confidence)
            if bound > target:
                return None
            reasons.append(
                f"{metric} on {device}: {judged.mape:.2f} %, with {rules.confidence:.0%} "
                f"confidence below {bound:.2f} % (target {number_text(target)} %)"
            )
    return "; ".join(reasons) or None


def _stagnates(rules: StopRules, results: Sequence[Result]) -> str | None:
    """That no error improves any more, for people; None as long as one does."""
    window = rules.plateau_rounds
    if window is None or len(results) <= window:
        return None
    reasons = []
    for series in results[-1]:
        if rules.target_mape is not None and series[1] not in rules.target_mape:
            continue
        errors = [[result[series].mape for result in part if series in result]
                  for part in (results[:-window], results[-window:])]  # fmt: skip
        if not errors[0]:
            return None  # it is judged for the first time
        before, since = (min(part) for part in errors)
        if since <= before * (1.0 - rules.plateau_share):
            return None
        reasons.append(f"{series[1]} on {series[0]} from {before:.2f} % to {since:.2f} %")
    if not reasons:
        return None
    share = f"{rules.plateau_share:.0%}"
    return f"{window} rounds improved no error by {share} or more: {'; '.join(reasons)}"


def _budgets(rules: StopRules, labels: int, gpu_seconds: float) -> list[tuple[str, float, float]]:
    """Rule, limit and what is spent of it."""
    hours = gpu_seconds / 3600
    price = rules.price_per_gpu_hour or 0.0
    budgets = (
        ("labels", rules.labels, float(labels)),
        ("GPU-hours", rules.gpu_hours, hours),
        ("money", rules.money, hours * price),
    )
    return [(rule, float(limit), spent) for rule, limit, spent in budgets if limit is not None]


def _moment(at: datetime.datetime) -> str:
    return f"{at.astimezone(datetime.UTC):%Y-%m-%d %H:%M} UTC"
