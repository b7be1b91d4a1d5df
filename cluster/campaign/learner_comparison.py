"""Errors of a campaign's learner and of another one by the number of labels.

Both learn from the labels that the campaign's learner had in each training, in the order in which
they were recorded, and are judged by the evaluation set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from trappm.cluster.campaign.learner import CampaignLearner
from trappm.cluster.campaign.planner import Planner
from trappm.cluster.campaign.training import TrainingReport, training_labels
from trappm.cluster.spec import CampaignSpec
from trappm.learner.interface import TrainingLabel
from trappm.learner.paper.presets import preset_named
from trappm.profiler.errors import InputError
from trappm.profiler.records import METRICS, Watch
from trappm.store import CampaignRecord, Home, Store
from trappm.store.records import Role


@dataclass(frozen=True, kw_only=True)
class ErrorPoint:
    """Errors of both learners with the labels of one round, for a metric on a device."""

    round: int
    device: str
    metric: str
    labels: int
    """Number of training labels of the device."""
    judged_on: int
    """Number of labels of architectures held out."""
    errors: Mapping[str, Sequence[float]]
    """MAPE in percent by learner, one per seed."""
    from_scratch: Mapping[str, Sequence[float]]
    """The same without the source's heads to start from; empty for the source."""


@dataclass(frozen=True, kw_only=True)
class LearnerComparison:
    """Errors of a campaign's learner and of another one, round by round."""

    campaign: str
    source: str
    learners: Sequence[str]
    """The campaign's learner and the other one."""
    seeds: Sequence[int]
    points: Sequence[ErrorPoint]
    remarks: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class _Round:
    """A round of a campaign, with the report and all labels of its training."""

    number: int
    report: TrainingReport
    labels: Sequence[TrainingLabel]


def compare_learners(
    store: Store,
    home: Home,
    campaign_id: str,
    learner: str,
    *,
    seeds: int = 1,
    watch: Watch = lambda done, total, what: None,
) -> LearnerComparison:
    """Train another learner on the labels of each training of a campaign.

    The campaign's learner has the errors that the campaign reported. For all seeds but the first
    one, it and its encoder are trained again.

    Args:
        store: Label store with the campaign.
        home: Data folder, in which trained encoders are kept.
        campaign_id: Id of the campaign.
        learner: Learner to train, such as `laptop`.
        seeds: Number of seeds, the campaign's first. A seed decides all that is random in training,
            not which labels there are.
        watch: Called before each training.

    Raises:
        InputError: It is the campaign's own or an unknown learner, or nothing was trained yet.
    """
    campaign = store.campaigns.get(campaign_id)
    spec = CampaignSpec.of(campaign)
    name = preset_named(learner).name
    if name == spec.learner:
        raise InputError(f"{name} is the learner of campaign {campaign.id} itself; name another")
    rounds = _rounds(store, campaign)
    if not rounds:
        raise InputError(
            f"campaign {campaign.id} has not trained on the labels of a round yet; see: "
            f"trappm campaign status {campaign.id}"
        )
    pool = Planner(store, campaign.id, spec).learner_pool()
    reports: dict[str, list[list[TrainingReport]]] = {
        spec.learner: [[one.report for one in rounds]],
        name: [],
    }
    plan = [(name, 0), *((one, at) for at in range(1, seeds) for one in (spec.learner, name))]
    total = len(plan) * len(rounds)
    for number, (one, at) in enumerate(plan):
        what = f"training {one}" + (f", seed {at + 1} of {seeds}" if seeds > 1 else "")
        watch(number * len(rounds), total, what)
        heads = _new_learner(spec, home, campaign, one, campaign.seed + at)
        heads.set_pool(*pool)
        own = []
        for done, played in enumerate(rounds):
            watch(number * len(rounds) + done, total, what)
            own.append(heads.fit(played.labels))
        reports[one].append(own)
    return LearnerComparison(
        campaign=campaign.id,
        source=spec.devices.source,
        learners=[*reports],
        seeds=[campaign.seed + at for at in range(seeds)],
        points=[
            point
            for at, one in enumerate(rounds)
            for point in _points(one, {k: [own[at] for own in v] for k, v in reports.items()})
        ],
        remarks=[
            f"round {one.number}: {name} learned from {_counts(other)}, {spec.learner} from "
            f"{_counts(one.report)}, as some labels were replaced or came during the training"
            for one, other in zip(rounds, reports[name][0], strict=True)
            if _counts(other) != _counts(one.report)
        ],
    )


def _counts(report: TrainingReport) -> str:
    """Return the number of training labels by device, and of labels that judge."""
    parts = []
    for device, count in sorted(report.labels.items()):
        judging = [errors["count"] or 0 for errors in report.devices.get(device, {}).values()]
        parts.append(f"{count} labels of {device} (judged by {max(judging, default=0):.0f})")
    return ", ".join(parts)


def _rounds(store: Store, campaign: CampaignRecord) -> list[_Round]:
    """Return the rounds with a report and the labels of its training.

    Those are as many of each device as the report says, the first that were recorded. Labels of
    earlier campaigns count from the round in which they were planned.
    """
    planned = {
        (a.device, a.configuration.id): a.round_number
        for a in store.assignments.of_campaign(campaign.id)
    }
    made = {
        (label.device, label.configuration.id): datetime.fromisoformat(label.created_at)
        for label in store.labels.of_campaign(campaign.id)
    }
    labels = sorted(
        training_labels(store, campaign.id).labels,
        key=lambda label: made[label.device, label.configuration_id],
    )
    began = datetime.fromisoformat(campaign.created_at)
    rounds = []
    for one in store.rounds.all(campaign.id):
        report = TrainingReport.of(one.report)
        if report is None or not report.devices:
            continue
        until = None if report.spent is None else report.spent.at
        left = Counter(report.labels)
        had = []
        for label in labels:
            key = label.device, label.configuration_id
            is_late = until is not None and made[key] > until
            is_empty = label.memory_above_mib is None and not any(label.values)
            if is_late or is_empty or (made[key] < began and planned[key] > one.number):
                continue
            if label.role == Role.TRAIN:
                if not left[label.device]:
                    continue
                left[label.device] -= 1
            had.append(label)
        rounds.append(_Round(number=one.number, report=report, labels=had))
    return rounds


def _new_learner(
    spec: CampaignSpec, home: Home, campaign: CampaignRecord, name: str, seed: int
) -> CampaignLearner:
    return CampaignLearner(
        preset=name,
        strategy=spec.learner_strategy,
        source=spec.devices.source,
        seed=seed,
        cache=home.campaigns / campaign.id,
    )


def _points(one: _Round, reports: Mapping[str, Sequence[TrainingReport]]) -> list[ErrorPoint]:
    """Return the points of a round, given a report per seed of each learner."""
    points = []
    for device, by_metric in one.report.devices.items():
        for metric in METRICS:
            errors = {
                name: [m for r in own if (m := _mape(r, device, metric)) is not None]
                for name, own in reports.items()
            }
            if not all(errors.values()):
                continue
            scratch = {
                name: [
                    r.transfer[device][metric].from_scratch
                    for r in own
                    if metric in r.transfer.get(device, {})
                ]
                for name, own in reports.items()
            }
            points.append(
                ErrorPoint(
                    round=one.number,
                    device=device,
                    metric=metric,
                    labels=one.report.labels.get(device, 0),
                    judged_on=int(by_metric[metric]["count"] or 0),
                    errors=errors,
                    from_scratch={name: values for name, values in scratch.items() if values},
                )
            )
    return points


def _mape(report: TrainingReport, device: str, metric: str) -> float | None:
    return report.devices.get(device, {}).get(metric, {}).get("mape")
