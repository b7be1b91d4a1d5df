"""Report of a training: errors on the evaluation set, and what had been spent until then.

A closed round keeps the report as JSON, which later versions and other commands read.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trappm.profiler.errors import CampaignError, one_line
from trappm.profiler.records import number_text


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A prediction and the measured value, in the metric's unit."""

    device: str
    metric: str
    measured: float
    predicted: float
    architecture: str | None = None

    @property
    def error_percent(self) -> float:
        return 100.0 * abs(self.predicted / self.measured - 1.0)


@dataclass(frozen=True)
class TransferErrors:
    """Mean absolute percentage errors of a target device's heads, with and without transfer."""

    transferred: float
    from_scratch: float

    def __str__(self) -> str:
        before, after = (number_text(e, 3) for e in (self.from_scratch, self.transferred))
        return f"{after} % against {before} % from scratch"


@dataclass(frozen=True)
class LeftOut:
    """Labels that heads neither learn from nor are judged by."""

    device: str
    fingerprint: str
    """Software stack that they were measured on."""
    labels: int
    why: str

    def __str__(self) -> str:
        return (
            f"{self.device}: {self.labels} labels are left out of learning, since they are of "
            f"another device than most here: {self.why}"
        )


@dataclass(frozen=True)
class Spent:
    """Amounts that a campaign had spent at a moment."""

    labels: int
    gpu_seconds: float
    """Seconds of measuring, failed attempts included."""
    at: datetime.datetime


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """Outcome of one training of a campaign's heads."""

    labels: Mapping[str, int] = field(default_factory=dict)
    """Number of training labels by device."""
    devices: Mapping[str, Mapping[str, Mapping[str, float | None]]] = field(default_factory=dict)
    """Errors on the evaluation set by device and metric, as `learner.stats.errors.Accuracy`."""
    transfer: Mapping[str, Mapping[str, TransferErrors]] = field(default_factory=dict)
    """Errors by device other than the source, and by metric."""
    evaluation: Sequence[Judgement] = ()
    left_out: Sequence[LeftOut] = ()
    spent: Spent | None = None
    """Amounts spent by the end of this training."""

    @classmethod
    def of(cls, stored: Mapping[str, Any] | None) -> TrainingReport | None:
        """Return the report that `to_json` made; None for a round closed without a training.

        Raises:
            CampaignError: Another version wrote it in a form that this one cannot read.
        """
        if not stored:
            return None
        try:
            return _adapter().validate_python(stored)
        except ValidationError as error:
            raise CampaignError(
                f"the report of a round cannot be read ({one_line(error)}); continue with the "
                "version that wrote it"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return plain values for the store."""
        values: dict[str, Any] = _adapter().dump_python(self, mode="json")
        return values


@cache
def _adapter() -> TypeAdapter[TrainingReport]:
    return TypeAdapter(TrainingReport)
