"""Choices of a campaign: why configurations were measured, which would be next, and the pool's map.

Reasons are stored with the assignments. The next choices are made from the labels so far, by the
campaign's strategy and its cached encoder; nothing is measured.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trappm.profiler.errors import InputError
from trappm.store import AssignmentState
from trappm.store.records import Role
from trappm.terminal.plots import new_figure, point_map, save_png
from trappm.terminal.tables import print_line, print_table

if TYPE_CHECKING:
    from trappm.cluster.spec import CampaignSpec
    from trappm.profiler.records import Configuration
    from trappm.store import Assignment, CampaignRecord, Home, Store


class PointKind(enum.StrEnum):
    """Kind of a configuration on the map; later kinds cover earlier ones."""

    POOL = "pool"
    HELD_OUT = "held out"
    LABELLED = "labelled"
    PENDING = "pending"
    WANTED = "wanted"


BACKGROUND = {PointKind.POOL, PointKind.HELD_OUT}
_MARKS = dict(zip(PointKind, "·:o?X", strict=True))
_COLORS = dict(zip(PointKind, ("#cccccc", "#999999", "#1f77b4", "#ff7f0e", "#d62728"), strict=True))
_REASONS = {
    "predicted_step_time_ms": "step, ms",
    "probability_of_failure": "P(failure)",
    "variance_reduction": "teaches",
    "representation": "stands for",
    "uncertainty": "uncertainty",
    "distance_to_nearest_label": "distance",
    "rank_under_random": "random rank",
}
"""Reasons and their headings; a narrow terminal has no room for the last ones."""


@dataclass(frozen=True)
class Choice:
    """A configuration that was chosen or would be next, and why."""

    configuration: str
    reason: Mapping[str, Any]
    round: int | None = None
    """Round and state of a past choice; None of a next one."""
    state: str | None = None


@dataclass(frozen=True)
class MapPoint:
    """A configuration of the pool along the first two principal components of the embeddings."""

    configuration: str
    x: float
    y: float
    kind: PointKind


@dataclass(frozen=True)
class Explanation:
    """The choices of a campaign on one device; `chosen` has the latest first."""

    campaign: str
    device: str
    strategy: str
    chosen: Sequence[Choice]
    wanted: Sequence[Choice]
    map: Sequence[MapPoint]


def explain(
    store: Store, home: Home, campaign_id: str, *, device: str | None, count: int
) -> Explanation:
    """Return the choices of a campaign on one device with their reasons, and the map of its pool.

    Args:
        store: Label store with the campaign.
        home: Data folder with the campaign's encoder.
        campaign_id: Id of the campaign.
        device: A device of the campaign (default: its source).
        count: Number of next choices.

    Raises:
        InputError: The campaign has no such device, or has not encoded its pool yet.
    """
    from trappm.cluster.spec import CampaignSpec

    campaign = store.campaigns.get(campaign_id)
    spec = CampaignSpec.of(campaign)
    device = device or spec.devices.source
    if device not in spec.devices.keys:
        raise InputError(
            f"campaign {campaign.id} does not measure on {device!r}; "
            f"it does on: {', '.join(spec.devices.keys)}"
        )
    if not list((home.campaigns / campaign.id).glob("encoder-*.safetensors")):
        raise InputError(
            f"campaign {campaign.id} has not encoded its pool yet; ask again when it measures"
        )
    assigned = store.assignments.of_campaign(campaign.id, device=device)
    acquired = [a for a in assigned if a.role is Role.TRAIN]
    pool = store.campaigns.pool(campaign.id)
    by_id = {configuration.id: configuration for configuration, _ in pool}
    wanted, points = _next(store, home, campaign, spec, device, count)
    return Explanation(
        campaign=campaign.id,
        device=device,
        strategy=spec.strategy,
        chosen=[
            Choice(str(a.configuration), dict(a.reason), a.round_number, str(a.state))
            for a in sorted(acquired, key=lambda a: (-a.round_number, a.rank))
        ],
        wanted=[Choice(str(by_id[name]), reason) for name, reason in wanted.items()],
        map=_map(pool, assigned, wanted, points),
    )


def _next(
    store: Store, home: Home, campaign: CampaignRecord, spec: CampaignSpec, device: str, count: int
) -> tuple[dict[str, Mapping[str, Any]], Sequence[tuple[float, float]]]:
    """Return the reasons for the next choices by id, and the place of each configuration."""
    from trappm.cluster.campaign.history import training_labels
    from trappm.cluster.campaign.planner import Planner
    from trappm.cluster.learning.campaign_learner import CampaignLearner
    from trappm.cluster.profiles import StepCache
    from trappm.learner.acquisition.pool_covariance import principal_directions

    learner = CampaignLearner(
        preset=spec.learner,
        strategy=spec.strategy,
        source=spec.devices.source,
        seed=spec.seed,
        cache=home.campaigns / campaign.id,
    )
    planner = Planner(store, campaign.id, spec)
    traced = planner.known_steps(StepCache(home.step_profiles))
    learner.set_pool(*planner.learner_pool(traced))
    known = training_labels(store, campaign.id)
    if known.labels:
        learner.fit(known.labels)
    number = max((r.number for r in store.rounds.all(campaign.id)), default=0) + 1
    choices = learner.choose(planner.request(device, number, count))
    embeddings = learner.embeddings
    points = (embeddings - embeddings.mean(axis=0)) @ principal_directions(embeddings)[:, :2]
    points = np.hstack([points, np.zeros((len(points), 2 - points.shape[1]))])
    return (
        {c.configuration_id: dict(c.reason) for c in choices},
        [(round(float(x), 4), round(float(y), 4)) for x, y in points],
    )


def _map(
    pool: Sequence[tuple[Configuration, bool]],
    assigned: Sequence[Assignment],
    wanted: Collection[str],
    points: Sequence[tuple[float, float]],
) -> list[MapPoint]:
    """Return each configuration with its place and kind."""
    states = {a.configuration.id: a.state for a in assigned}

    def kind(configuration: Configuration, held_out: bool) -> PointKind:
        if held_out:  # also after it was measured, because its label judges the heads
            return PointKind.HELD_OUT
        if configuration.id in wanted:
            return PointKind.WANTED
        state = states.get(configuration.id)
        if state in {AssignmentState.OPEN, AssignmentState.LEASED}:
            return PointKind.PENDING
        return PointKind.LABELLED if state is AssignmentState.DONE else PointKind.POOL

    return [
        MapPoint(str(c), x, y, kind(c, held_out))
        for (c, held_out), (x, y) in zip(pool, points, strict=True)
    ]


def print_explanation(explanation: Explanation, most: int) -> None:
    """Print tables of past and next choices, and the map as text."""
    columns = ["configuration", "round", "state", *_REASONS.values()]
    rows = [[x.configuration, x.round, x.state, *_reasons(x)] for x in explanation.chosen[:most]]
    if rows:
        title = f"chosen on {explanation.device} by {explanation.strategy}"
        print_table(title, columns, rows)
    if explanation.wanted:
        rows = [[x.configuration, *_reasons(x)] for x in explanation.wanted]
        print_table("next choices", ["configuration", *_REASONS.values()], rows)
    points = {
        f"{_MARKS[kind]} {kind}": [(p.x, p.y) for p in explanation.map if p.kind == kind]
        for kind in PointKind
    }
    title = "the pool in the embedding space, first two principal components"
    print_line(point_map(points, title=title), soft_wrap=True)


def _reasons(choice: Choice) -> list[Any]:
    return [choice.reason.get(name) for name in _REASONS]


def draw_map(explanation: Explanation, path: Path) -> None:
    """Draw the map into a PNG file.

    Raises:
        InputError: The file cannot be written.
    """
    figure = new_figure(8, 6)
    axes = figure.subplots()
    for kind in PointKind:
        points_of_kind = [p for p in explanation.map if p.kind == kind]
        axes.scatter(
            [p.x for p in points_of_kind],
            [p.y for p in points_of_kind],
            s=10 if kind in BACKGROUND else 36,
            color=_COLORS[kind],
            label=f"{kind} ({len(points_of_kind)})",
        )
    axes.legend()
    axes.set_title(f"campaign {explanation.campaign} on {explanation.device}: embedding space")
    axes.set_xlabel("first principal component")
    axes.set_ylabel("second principal component")
    save_png(figure, path, dpi=130)
