"""Choices of a campaign: what was chosen, and the reasons that are stored with the assignments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trappm.profiler.errors import InputError
from trappm.store.records import Role
from trappm.terminal.tables import print_line, print_table

if TYPE_CHECKING:
    from trappm.store import Store

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
class ReportedChoice:
    """A configuration that was chosen, and why."""

    configuration: str
    reason: Mapping[str, Any]
    round: int
    state: str


@dataclass(frozen=True)
class Choices:
    """The choices of a campaign on one device, the latest round first."""

    campaign: str
    device: str
    chosen: Sequence[ReportedChoice]


def choices_of(store: Store, campaign_id: str, *, device: str | None, count: int) -> Choices:
    """Return the latest choices of a campaign on one device with their reasons.

    Args:
        store: Label store with the campaign.
        campaign_id: Id of the campaign.
        device: A device of the campaign (default: its source).
        count: Maximum number of choices.

    Raises:
        InputError: The campaign has no such device.
    """
    from trappm.cluster.spec import CampaignBudget

    campaign = store.campaigns.get(campaign_id)
    devices = CampaignBudget.of(campaign).devices
    device = device or devices.source
    if device not in devices.keys:
        raise InputError(
            f"campaign {campaign.id} does not measure on {device!r}; "
            f"it does on: {', '.join(devices.keys)}"
        )
    assigned = store.assignments.of_campaign(campaign.id, device=device)
    acquired = [a for a in assigned if a.role is Role.TRAIN]
    acquired.sort(key=lambda a: (-a.round_number, a.rank))
    return Choices(
        campaign.id,
        device,
        [
            ReportedChoice(str(a.configuration), dict(a.reason), a.round_number, str(a.state))
            for a in acquired[:count]
        ],
    )


def print_choices(choices: Choices) -> None:
    """Print a table of choices."""
    if not choices.chosen:
        print_line(f"campaign {choices.campaign} has not chosen anything on {choices.device} yet")
        return
    columns = ["configuration", "round", "state", *_REASONS.values()]
    rows = [
        [x.configuration, x.round, x.state, *map(x.reason.get, _REASONS)] for x in choices.chosen
    ]
    print_table(f"chosen on {choices.device}", columns, rows)
