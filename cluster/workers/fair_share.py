"""How many GPUs of a kind each of the campaigns that run side by side on a cluster may use.

Every campaign works this out by itself, from what all of them read in the label store: so nobody
has to agree with anybody, and none waits for one that has died.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from trappm.cluster.spec import budget_of
from trappm.profiler.errors import CampaignError
from trappm.store import AssignmentState, CampaignRecord, CampaignState, Store

LOOK_S = 10.0
"""How often the claims of others are read."""

SLICE_S = 300.0
"""For so long a turn lasts: a profiler takes seconds to start on a GPU."""

WINDOW_S = 3600.0
"""What was measured longer ago is forgotten."""


@dataclass(frozen=True)
class Claim:
    """What a campaign may ask for on one device."""

    priority: int
    wanted: int
    """So many GPUs it could keep busy."""
    used_s: float
    """So long it has measured lately, all GPUs together."""

    @property
    def turn(self) -> float:
        """The order of turns, smallest first, where there are fewer GPUs than campaigns."""
        return self.used_s / self.priority


def fair_shares(gpus: int, claims: Mapping[str, Claim]) -> dict[str, int]:
    """Divides GPUs in proportion to priorities; what a campaign does not want goes to the others.

    What does not come out even goes to those whose turn it is: over time all get their
    part in the course of time, even of a single GPU.

    Args:
        gpus: that there are of this kind.
        claims: by campaign.
    """
    unserved = dict(claims)
    shares: dict[str, int] = {}
    while True:
        total = sum(claim.priority for claim in unserved.values())
        content = [c for c in unserved if unserved[c].wanted * total <= gpus * unserved[c].priority]
        if not content:
            break
        shares |= {c: unserved.pop(c).wanted for c in content}
        gpus -= sum(shares[c] for c in content)
    shares |= {c: gpus * unserved[c].priority // total for c in unserved}
    gpus -= sum(shares[c] for c in unserved)
    for c in in_turn(unserved)[:gpus]:
        shares[c] += 1
    return shares


def in_turn(claims: Mapping[str, Claim]) -> list[str]:
    """The campaigns, the one that should get the next GPU first."""
    return sorted(claims, key=lambda c: (claims[c].turn, c))


class Claims:
    """What the campaigns of a cluster claim, as one of them reads it in the label store."""

    def __init__(self, store: Store, campaign_id: str) -> None:
        self._store = store
        self._id = campaign_id
        self._claims: dict[str, dict[str, Claim]] = {}
        self._looked_at = -LOOK_S

    def of(self, campaigns: Sequence[str]) -> Mapping[str, Mapping[str, Claim]]:
        """Current claims by device and campaign; none where this campaign is alone on the cluster.

        Args:
            campaigns: ids of those that are on the cluster.
        """
        if set(campaigns) <= {self._id}:
            return {}
        if time.monotonic() - self._looked_at >= LOOK_S:
            self._looked_at = time.monotonic()
            self._claims = self._look(campaigns)
        return self._claims

    def _look(self, campaigns: Sequence[str]) -> dict[str, dict[str, Claim]]:
        # All campaigns see the same turns, and keep them for a while.
        end = time.time() // SLICE_S * SLICE_S
        since, until = (datetime.fromtimestamp(t, UTC).isoformat() for t in (end - WINDOW_S, end))
        claims: dict[str, dict[str, Claim]] = defaultdict(dict)
        for record in self._store.campaigns.all():
            if record.id not in campaigns or record.state is not CampaignState.RUNNING:
                continue
            used_s = self._store.campaigns.measuring_seconds_by_device(
                record.id, since=since, until=until
            )
            priority, wanted = self._wanted(record)
            for device, count in wanted.items():
                claims[device][record.id] = Claim(priority, count, used_s.get(device, 0.0))
        return {device: by for device, by in claims.items() if len(by) > 1 and self._id in by}

    def _wanted(self, record: CampaignRecord) -> tuple[int, Mapping[str, int]]:
        """A campaign's priority, and how many measurements it has to come on each of its devices.

        A file that this version cannot read counts with the default priority, and with what the
        campaign has planned so far.
        """
        counts = self._store.assignments.counts(record.id)
        ended = {
            device: states.get(AssignmentState.DONE, 0) + states.get(AssignmentState.FAILED, 0)
            for device, states in counts.items()
        }
        try:
            budget = budget_of(record)
        except CampaignError:
            return 1, {d: sum(states.values()) - ended[d] for d, states in counts.items()}
        return budget.priority, {
            device: max(0, budget.budget(device) - ended.get(device, 0))
            for device in budget.devices.keys
        }
