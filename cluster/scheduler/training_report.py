"""What a training reports: errors on the evaluation set, and what had been spent until then.

A closed round keeps the report as JSON, which later versions and other commands read back.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trappm.profiler.errors import CampaignError, one_line


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
    """Errors on the evaluation set by device and metric, as `learner.bench.errors.Accuracy`."""
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
