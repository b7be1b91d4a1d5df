"""Campaigns from Python: launch one and wait for its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from trappm.cluster.campaign.process import Progress
    from trappm.cluster.spec import CampaignSpec


@dataclass(frozen=True, kw_only=True)
class CampaignResult:
    """Result of a campaign."""

    id: str
    state: str
    """`finished`, `paused` or `cancelled`."""
    labels: Mapping[str, int]
    """Number of labels by device."""
    snapshot: str | None
    """Id of the published snapshot; None if none was published."""


@dataclass(frozen=True)
class Campaign:
    """A campaign file, ready to run.

    >>> campaign = Campaign.from_preset("laptop")
    >>> campaign.spec.devices.target
    'cpu-1t'

    `campaign.run()` runs it to its end, and returns its snapshot.
    """

    spec: CampaignSpec

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a campaign file.

        Raises:
            InputError: The file cannot be read or has faults.
        """
        from trappm.cluster.spec import load_spec

        return cls(load_spec(Path(path)))

    @classmethod
    def from_preset(cls, name: str) -> Self:
        """Read a campaign file that ships with TraPPM, such as `laptop`.

        Raises:
            InputError: There is no such preset.
        """
        from trappm.cluster.spec import load_preset

        return cls(load_preset(name))

    def run(
        self,
        *,
        address: str | None = None,
        watch: Callable[[Progress], None] = lambda progress: None,
    ) -> CampaignResult:
        """Run the campaign to its end; an unfinished campaign of the same file continues.

        Args:
            address: Address of a running Ray cluster, such as "auto"; None starts Ray here.
            watch: Called with the progress whenever it changes.

        Raises:
            InputError: The campaign cannot be run, such as on a device that is not here.
            CampaignError: The campaign failed; nothing recorded is lost, and `run` continues.
        """
        from trappm.cluster.campaign.planner import with_whole_pool
        from trappm.cluster.launch import check_spec, open_store, run_campaign, start_or_continue
        from trappm.store import Home

        home = Home.open()
        with open_store(home) as store:
            spec = with_whole_pool(self.spec, store)
            check_spec(store, spec, address)
            record, spec = start_or_continue(store, spec)
        run_campaign(home, record.id, spec, address=address, watch=watch)
        with open_store(home) as store:
            ended = store.campaigns.get(record.id)
            return CampaignResult(
                id=ended.id,
                state=str(ended.state),
                labels=Counter(x.device for x in store.labels.of_campaign(ended.id)),
                snapshot=ended.snapshot,
            )
