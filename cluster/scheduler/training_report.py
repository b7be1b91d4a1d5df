"""What a training reports: errors on the evaluation set, and what had been spent until then.

A closed round keeps the report as JSON, which later versions and other commands read back.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean, stdev
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trappm.profiler.errors import CampaignError, one_line
from trappm.profiler.number_text import number_text


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A prediction beside what was measured, in the metric's unit."""

    device: str
    metric: str
    measured: float
    predicted: float
    architecture: str | None = None
    """None in reports of before 22 November 2026."""
    configuration_id: str | None = None
    low: float | None = None
    """The lower end of the predicted interval."""
    high: float | None = None


@dataclass(frozen=True)
class TransferErrors:
    """Mean absolute percentage errors of a target device's heads, by what they started from."""

    transferred: float
    from_scratch: float
    chance: float | None = None
    """How far apart chance alone may bring them, in percentage points; None where unknown."""

    def __str__(self) -> str:
        before, after = (number_text(e, 3) for e in (self.from_scratch, self.transferred))
        return f"{after} % against {before} % from scratch"


@dataclass(frozen=True)
class ErrorDifference:
    """How much the mean error of the same configurations differs between two trainings."""

    points: float
    """In percentage points: above 0 where the later one is worse."""
    chance: float | None
    """Two standard errors over architectures; None of fewer than two."""
    judged: int
    """Configurations."""


def difference_of(
    before: Sequence[Judgement], after: Sequence[Judgement], device: str, metric: str
) -> ErrorDifference:
    """Compares errors on what both were judged by."""

    def errors(judgements: Sequence[Judgement]) -> dict[str | None, tuple[float, str | None]]:
        return {
            j.configuration_id: (100 * abs(j.predicted / j.measured - 1), j.architecture)
            for j in judgements
            if (j.device, j.metric) == (device, metric) and j.configuration_id is not None
        }

    old, new = errors(before), errors(after)
    by_architecture: dict[str | None, list[float]] = {}
    for name in old.keys() & new.keys():
        gap = new[name][0] - old[name][0]
        by_architecture.setdefault(new[name][1], []).append(gap)
    gaps = [gap for group in by_architecture.values() for gap in group]
    means = [fmean(group) for group in by_architecture.values()]
    chance = 2 * stdev(means) / len(means) ** 0.5 if len(means) > 1 else None
    return ErrorDifference(fmean(gaps) if gaps else 0.0, chance, len(gaps))


@dataclass(frozen=True)
class LeftOut:
    """Labels that heads do not learn from, and are not judged by."""

    device: str
    fingerprint: str
    """Of the stack that they were measured on."""
    labels: int
    why: str

    def __str__(self) -> str:
        return (
            f"{self.device}: {self.labels} labels are left out of learning, since they are of "
            f"another device than most here: {self.why}"
        )


@dataclass(frozen=True)
class Spent:
    """What a campaign had spent at a moment."""

    labels: int
    gpu_seconds: float
    """Of measuring, failed attempts included."""
    at: datetime.datetime


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """The outcome of one training of a campaign's heads."""

    labels: Mapping[str, int] = field(default_factory=dict)
    """How many the heads learned from, by device."""
    devices: Mapping[str, Mapping[str, Mapping[str, float | None]]] = field(default_factory=dict)
    """Errors on the evaluation set by device and metric, as `learner.stats.errors.Accuracy`."""
    transfer: Mapping[str, Mapping[str, TransferErrors]] = field(default_factory=dict)
    """For devices other than the source, by metric."""
    evaluation: Sequence[Judgement] = ()
    left_out: Sequence[LeftOut] = ()
    spent: Spent | None = None
    """By the end of this training."""

    @classmethod
    def of(cls, stored: Mapping[str, Any] | None) -> TrainingReport | None:
        """What `to_json` gave; None of a round that was closed without a training.

        Raises:
            CampaignError: another version wrote it, in a form that this one cannot read.
        """
        if not stored:
            return None
        try:
            return _adapter().validate_python(stored)
        except ValidationError as error:
            raise CampaignError(
                f"the report of a round cannot be read ({one_line(error)}); go on with the version "
                "that wrote it"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the store."""
        values: dict[str, Any] = _adapter().dump_python(self, mode="json")
        return values


@cache
def _adapter() -> TypeAdapter[TrainingReport]:
    return TypeAdapter(TrainingReport)
