"""Training of a campaign's heads: the labels that its learner gets, and the report that it makes.

A closed round keeps the report as JSON, which later versions and other commands read.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AliasChoices, Field, TypeAdapter, ValidationError

from trappm.cluster.spec import runs_nothing
from trappm.profiler.devices.catalogue import card_name
from trappm.profiler.errors import CampaignError, one_line
from trappm.profiler.host.environment import stack_difference
from trappm.profiler.records import METRICS, Execution, Provenance, number_text
from trappm.store import Store
from trappm.store.records import Role

if TYPE_CHECKING:
    from trappm.learner.interface import CompiledPair, TrainingLabel


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
    budget_seconds: Annotated[
        float, Field(validation_alias=AliasChoices("budget_seconds", "gpu_seconds"))
    ]
    """Seconds of measuring that the stop rule `gpu_hours` limits, failed attempts included; in
    earlier stores under another name."""
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


def round_line(number: int, report: TrainingReport) -> str:
    """Return one line for a round whose heads have been judged."""
    parts = []
    for device, by_metric in report.devices.items():
        errors = [f"{metric} {e['mape']:.1f} %" for metric, e in by_metric.items()]
        parts.append(f"{device}: {', '.join(errors) or 'no label judges'}")
    return f"round {number}: error on held-out architectures: {'; '.join(parts)}"


def training_reports(store: Store, campaign_id: str) -> list[TrainingReport]:
    """Return the reports with which rounds were closed, in their order."""
    reports = [TrainingReport.of(r.report) for r in store.rounds.all(campaign_id)]
    return [report for report in reports if report is not None]


@dataclass(frozen=True)
class TrainingLabels:
    """Labels of a campaign's heads, of one software stack and card per device key."""

    labels: Sequence[TrainingLabel]
    left_out: Sequence[LeftOut]


def training_labels(store: Store, campaign_id: str) -> TrainingLabels:
    """Return the eager labels that a campaign can learn from, of one software stack per device key.

    The same key on another software stack or card is another device, which needs a head of its own.
    The stack with most labels counts; if two have as many, the one planned first.
    """
    from trappm.learner.interface import TrainingLabel  # imports torch

    eager_labels = [
        label for label in store.labels.of_campaign(campaign_id)
        if label.configuration.execution is Execution.EAGER
    ]  # fmt: skip
    stacks: dict[str, Counter[str]] = defaultdict(Counter)
    for label in eager_labels:
        stacks[label.device][label.fingerprint] += 1
    most = {device: counts.most_common(1)[0][0] for device, counts in stacks.items()}
    left_out, cards = [], {}
    for device, counts in sorted(stacks.items()):
        known = store.measurements.device_environments(device)
        here = known[most[device]]
        cards[device] = card_name(device, [here])
        for stack, count in counts.items():
            if stack != most[device]:
                why = stack_difference(known[stack], here) or f"stack {stack}"
                left_out.append(LeftOut(device, stack, count, why))
    errors = store.labels.step_time_errors(campaign_id)
    labels = [
        TrainingLabel(
            configuration_id=label.configuration.id,
            device=label.device,
            role=str(label.role),
            values=tuple(getattr(label, metric) for metric in METRICS),
            provenance=label.provenance,
            memory_above_mib=label.memory_above_mib,
            card=cards[label.device],
            step_time_error=errors.get(label.id),
        )
        for label in eager_labels
        if label.fingerprint == most[label.device]
    ]
    return TrainingLabels(labels, tuple(left_out))


def compiled_pairs(store: Store, campaign_id: str) -> list[CompiledPair]:
    """Return the labels of equal steps, eager and compiled, of one role and software stack."""
    from trappm.learner.interface import CompiledPair  # imports torch

    times_ms = {
        (x.device, x.fingerprint, x.role, x.configuration): x.step_time_ms
        for x in store.labels.of_campaign(campaign_id)
        if x.step_time_ms is not None
    }
    pairs = []
    for (device, stack, role, step), compiled_ms in times_ms.items():
        eager = replace(step, execution=Execution.EAGER)
        eager_ms = times_ms.get((device, stack, role, eager))
        if step.execution is Execution.COMPILE and eager_ms is not None:
            pairs.append(
                CompiledPair(
                    device=device,
                    phase=step.phase,
                    is_held_out=role == Role.EVALUATE,
                    eager=eager.id,
                    compiled=step.id,
                    log_ratio=math.log(compiled_ms / eager_ms),
                )
            )
    return pairs


def unfit_to_publish(labels: Iterable[TrainingLabel]) -> str | None:
    """Return why labels must not train a snapshot; None if they may."""
    simulated = Provenance.SIMULATED
    unfit = {x.device for x in labels if x.provenance == simulated or runs_nothing(x.device)}
    if not unfit:
        return None
    return f"the labels of {', '.join(sorted(unfit))} come from no device that was measured here"
