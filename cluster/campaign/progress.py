"""Progress of a campaign: what its process tells the label store, and how others follow it there.

`trappm campaign launch` starts a campaign and follows it; `trappm campaign status --follow` only
follows. Neither asks the process itself, so it does not matter where it runs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trappm.cluster.campaign.ownership import runs
from trappm.cluster.spec import CampaignSpec
from trappm.cluster.training_report import TrainingReport
from trappm.profiler.errors import CampaignError
from trappm.profiler.records import Outcome
from trappm.store import CampaignRecord, CampaignState, Store
from trappm.store.records import Activity, AttemptRecord, Standing

POLL_S = 0.5
"""Seconds between two looks of somebody who follows."""


@dataclass(frozen=True)
class Progress:
    """Activity of a campaign and its news, for people to watch."""

    activity: Activity
    lines: tuple[str, ...] = ()
    """News since the last look, a line each."""


class Follower:
    """Reads what is new of a campaign from its label store; what was there before is left out."""

    def __init__(self, store: Store, campaign_id: str) -> None:
        self.id = campaign_id
        self._store = store
        self._event = self._attempt = 0
        self.news()

    def look(self) -> tuple[CampaignRecord, Progress]:
        """Return the campaign and its progress."""
        campaign = self._store.campaigns.get(self.id)  # first, so that no news of its end are lost
        has_ended = campaign.owner is None and campaign.state is not CampaignState.RUNNING
        activity = Activity(stage=str(campaign.state)) if has_ended else campaign.activity
        return campaign, Progress(activity, self.news())

    def news(self) -> tuple[str, ...]:
        """Return the events and attempts since the last look, a line each."""
        events = self._store.campaigns.events(self.id, after=self._event)
        attempts = self._store.campaigns.attempts(self.id, after=self._attempt)
        self._event = max((event.id for event in events), default=self._event)
        self._attempt = max((attempt.id for attempt in attempts), default=self._attempt)
        news = [(event.at, str(event.message.get("message", event.kind))) for event in events]
        news += [(attempt.at, attempt_line(attempt)) for attempt in attempts]
        return tuple(line for _, line in sorted(news, key=lambda each: each[0]))


def follow(
    follower: Follower,
    watch: Callable[[Progress], None],
    *,
    silent_s: float = 0.0,
    check: Callable[[], None] = lambda: None,
    until_begun: bool = False,
) -> CampaignRecord:
    """Follow a campaign until its process has ended, and return it.

    Args:
        follower: Reads the label store.
        watch: Called with the progress.
        silent_s: Seconds for which a process may be missing, as it starts or is started again.
        check: Called at each look; raises an error if the process is known to have failed.
        until_begun: Return once a process runs the campaign.

    Raises:
        CampaignError: No process runs it, although it is to run.
    """
    heard_at = time.monotonic()
    while True:
        campaign, progress = follower.look()
        watch(progress)
        if campaign.state is CampaignState.RUNNING and runs(campaign):
            heard_at = time.monotonic()
            if until_begun:
                return campaign
        elif campaign.state is not CampaignState.RUNNING and campaign.owner is None:
            return campaign
        elif time.monotonic() - heard_at > silent_s:
            raise CampaignError(
                f"no process has run campaign {follower.id} for {silent_s:.0f} s; nothing recorded "
                f"is lost, continue with: trappm campaign resume {follower.id}"
            )
        check()
        time.sleep(POLL_S)


def seconds_to_go(
    spec: CampaignSpec, standing: Standing, training_s: float, workers: Mapping[str, int]
) -> float | None:
    """Return the expected seconds to the end of a campaign; None before the first measurement.

    The time of a configuration is that of all its attempts, as many fail on a busy machine.
    """
    attempts = sum(standing.attempts.values())
    if not attempts:
        return None
    pending, planned = Counter[str](), Counter[str]()
    for part in standing.pending:
        pending[part.device] += part.waiting + part.leased
    for known in standing.rounds:
        planned.update(known.planned)
    ended = planned - pending
    overall_s = sum(standing.seconds.values()) / (ended.total() or attempts)
    total_s = 0.0
    for device in spec.devices.keys:
        count = ended[device] or standing.attempts.get(device)
        each_s = standing.seconds[device] / count if count else overall_s
        to_come = max(spec.budget(device) - planned[device], 0) + pending[device]
        total_s += each_s * to_come / max(1, workers.get(device, 0))
    open_rounds = 2 + spec.rounds.count - sum(known.is_closed for known in standing.rounds)
    return total_s + max(open_rounds - 1, 1) * training_s


def attempt_line(attempt: AttemptRecord) -> str:
    """Return one line for an attempt."""
    if attempt.step_time_ms is None:
        result = f"{attempt.outcome}: {attempt.message}"
    else:
        memory = attempt.memory_mib
        result = f"{attempt.step_time_ms:,.1f} ms"
        result += "" if memory is None else f", {memory:,.0f} MiB"
        result += "" if attempt.outcome is Outcome.OK else f"  {attempt.outcome}"
    return f"{attempt.device}  {attempt.configuration}  {result}"


def round_line(number: int, report: TrainingReport) -> str:
    """Return one line for a round whose heads have been judged."""
    parts = []
    for device, by_metric in report.devices.items():
        errors = [f"{metric} {e['mape']:.1f} %" for metric, e in by_metric.items()]
        parts.append(f"{device}: {', '.join(errors) or 'no label judges'}")
    return f"round {number}: error on held-out architectures: {'; '.join(parts)}"
