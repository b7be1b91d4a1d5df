"""Rules that end a campaign early: target error, labels, GPU-hours, deadline.

A target is checked after each training, budgets before each measurement, the deadline once per
second. Once a rule holds, nothing more begins.
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from trappm.cluster.training_report import Judgement, Spent
from trappm.profiler.records import METRICS, number_text

SMALLEST_ERROR = 1e-3
"""Errors below this percentage count as this."""


class StopRules(BaseModel):
    """The first of these that holds ends a campaign; None means that it never does.

    What is being measured then is still kept; what is only planned is left unmeasured.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    target_mape: Mapping[str, PositiveFloat] | None = None
    """Target error by metric in percent; all must be reached on every device."""
    confidence: float = Field(default=0.9, gt=0.5, lt=1.0)
    """Confidence with which each mean error is below its target."""
    labels: PositiveInt | None = None
    """Number of labels on all devices, the evaluation set included."""
    gpu_hours: PositiveFloat | None = None
    """Hours of measuring on all devices, failed attempts included."""
    price_per_gpu_hour: PositiveFloat | None = None
    """Price of a GPU for an hour, in any currency; only reported."""
    ends_at: AwareDatetime | None = None
    """Time at which the campaign ends, with a time zone."""

    @field_validator("target_mape")
    @classmethod
    def _of_metrics(cls, targets: Mapping[str, float] | None) -> Mapping[str, float] | None:
        if unknown := sorted(set(targets or ()) - set(METRICS)):
            raise ValueError(f"no metric {unknown[0]!r}; there are: {', '.join(METRICS)}")
        return targets

    def budgets(self, labels: int, gpu_seconds: float) -> list[tuple[str, float, float]]:
        """Return name, limit and amount spent of each budget."""
        known = (
            ("labels", self.labels, float(labels)),
            ("GPU-hours", self.gpu_hours, gpu_seconds / 3600),
        )
        return [(name, float(limit), spent) for name, limit, spent in known if limit is not None]


@dataclass(frozen=True)
class Stop:
    """The stop rule that holds, with its reason."""

    rule: str
    reason: str
    """One line for people."""


@dataclass(frozen=True, kw_only=True)
class CampaignEnd(Stop):
    """Stop rule that ended a campaign, or that will end it first at the present rate."""

    holds: bool
    """True if it has ended the campaign."""
    unmeasured: int | None = None
    """Number of configurations that were planned and not measured, if the rule holds."""
    labels: int | None = None
    """Number of labels at which it will hold, if it does not yet."""
    at: datetime.datetime | None = None
    """Time at which it will hold, in UTC."""


def stop_by_target(
    rules: StopRules, evaluation: Sequence[Judgement], devices: Sequence[str]
) -> Stop | None:
    """Return a stop if all targets are reached on all devices with the wanted confidence."""
    reasons = []
    for metric, target in (rules.target_mape or {}).items():
        for device in devices:
            judged = [j for j in evaluation if (j.device, j.metric) == (device, metric)]
            bound = upper_bound(judged, rules.confidence)
            if bound > target:
                return None
            mape = fmean(judgement.error_percent for judgement in judged)
            reasons.append(
                f"{metric} on {device}: {mape:.2f} %, with {rules.confidence:.0%} "
                f"confidence below {bound:.2f} % (target {number_text(target)} %)"
            )
    return Stop("target", "; ".join(reasons)) if reasons else None


def upper_bound(judged: Sequence[Judgement], confidence: float) -> float:
    """Return the upper confidence bound of a mean error; infinite below two architectures.

    Batch sizes of one architecture have similar errors, so the bound is over architectures.
    Their errors are taken as log-normal (Cox's method with Student's t; Zhou and Gao 1997).
    Resampling needs no distribution, but its bound is too low with few architectures.
    """
    errors: dict[str | None, list[float]] = defaultdict(list)
    for judgement in judged:
        errors[judgement.architecture].append(judgement.error_percent)
    free = len(errors) - 1
    if free < 1:
        return np.inf
    logs = np.log(np.maximum([fmean(group) for group in errors.values()], SMALLEST_ERROR))
    spread = float(np.var(logs, ddof=1))
    error = np.sqrt(spread / len(errors) + spread**2 / (2 * free))
    from scipy import stats  # type: ignore[import-untyped]  # half a second, for few campaigns

    bound = logs.mean() + spread / 2 + stats.t.ppf(confidence, free) * error
    return float(np.exp(min(bound, 50.0)))


def stop_by_deadline(rules: StopRules, now: datetime.datetime) -> Stop | None:
    """Return a stop if the deadline has passed."""
    if rules.ends_at is None or now < rules.ends_at:
        return None
    return Stop("clock", f"it is past {_time_text(rules.ends_at)}")


def forecast(rules: StopRules, begin: Spent, now: Spent, planned: int) -> CampaignEnd | None:
    """Return what will end a campaign first at the pace so far; None if there is no pace yet.

    The pace is that since `begin`, such as the launch, and the `planned` labels of all rounds end
    the campaign in any case. Targets are not forecast: errors do not fall at a rate.
    """
    labels, pace_s = now.labels - begin.labels, (now.at - begin.at).total_seconds()
    if labels <= 0 or pace_s <= 0:
        return None
    label_s = pace_s / labels
    ends = [(float(planned), "rounds", f"the {planned} labels of all rounds will be there")]
    ends += [
        (now.labels * limit / spent, rule, f"{number_text(limit)} {rule} will be spent")
        for rule, limit, spent in rules.budgets(now.labels, now.gpu_seconds)
        if spent > 0
    ]
    if rules.ends_at is not None:
        at_labels = now.labels + (rules.ends_at - now.at).total_seconds() / label_s
        ends.append((at_labels, "clock", f"it will be {_time_text(rules.ends_at)}"))
    at_labels, rule, reason = min(ends, key=lambda end: end[0])
    at_labels = max(at_labels, now.labels)
    wait = datetime.timedelta(seconds=(at_labels - now.labels) * label_s)
    return CampaignEnd(rule, reason, holds=False, labels=round(at_labels), at=now.at + wait)


def _time_text(at: datetime.datetime) -> str:
    return f"{at.astimezone(datetime.UTC):%Y-%m-%d %H:%M} UTC"
