"""A campaign's stop rules while it runs: whether one holds, and when one is likely to.

The rule that holds is recorded as an event at once, so that it still holds after a restart. What
was spent is written into the training's report, which a closed round keeps. Budgets are checked by
the state machine itself (`scheduler.spend`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from trappm.cluster.scheduler.stop_rules import (
    Stop,
    StopRules,
    forecast,
    past,
    result_of,
    stopped,
)
from trappm.cluster.scheduler.training_report import Spent, TrainingReport
from trappm.cluster.spec import CampaignBudget, CampaignSpec
from trappm.store import AssignmentState, CampaignRecord, Store

ENOUGH = "enough"
"""The kind of event that records which rule held."""


class StopCheck:
    """The stop rules of one campaign, and whether one of them has held."""

    def __init__(self, store: Store, campaign_id: str, spec: CampaignSpec) -> None:
        self._store = store
        self._id = campaign_id
        self._spec = spec
        self.holds = False
        """A rule held, and nothing more is to begin."""

    def recall(self) -> None:
        """Reads back whether a rule held before a restart."""
        self.holds = rule_held(self._store, self._id) is not None

    def record(self, stop: Stop) -> str:
        """Records that a rule holds, and returns a line of news about it."""
        line = f"enough ({stop.rule}): {stop.reason}"
        event = {"message": line, "rule": stop.rule, "told": stop.reason}
        self._store.campaigns.log_event(self._id, ENOUGH, event)
        self.holds = True
        return line

    def check_clock(self) -> str | None:
        """One line for people if the time is up, and was not before."""
        rules = self._spec.stop
        if self.holds or rules is None:
            return None
        stop = past(rules, datetime.now(UTC))
        return None if stop is None else self.record(stop)

    def check_errors(self, report: TrainingReport) -> tuple[TrainingReport, str | None]:
        """Adds to a training's report what was spent, and checks targets and plateau.

        Returns:
            The report, and one line for people if a rule holds for the first time.
        """
        labels = self._store.campaigns.label_counts(self._id).get(self._id, 0)
        seconds = sum(self._store.campaigns.measuring_seconds_by_device(self._id).values())
        report = replace(report, spent=Spent(labels, seconds, datetime.now(UTC)))
        rules = self._spec.stop
        if self.holds or rules is None:
            return report, None
        reports = [*training_reports(self._store, self._id), report]
        generator = np.random.default_rng([self._spec.seed, labels])
        results = [result_of(known) for known in reports]
        stop = stopped(rules, results, self._spec.devices.keys, generator)
        return report, None if stop is None else self.record(stop)


def training_reports(store: Store, campaign_id: str) -> list[TrainingReport]:
    """Those with which rounds were closed, in their order."""
    reports = [TrainingReport.of(r.report) for r in store.rounds.all(campaign_id)]
    return [report for report in reports if report is not None]


def rule_held(store: Store, campaign_id: str) -> Stop | None:
    """The rule that has ended a campaign, or is just ending it."""
    records = [e.message for e in store.campaigns.events(campaign_id, kind=ENOUGH)]
    # Earlier versions wrote it into the reports of the rounds.
    records += [(r.report or {}).get("stop", {}) for r in store.rounds.all(campaign_id)]
    return next((Stop(r["rule"], r["told"]) for r in records if "rule" in r), None)


@dataclass(frozen=True, kw_only=True)
class CampaignEnd:
    """What ended a campaign, or what will end it first at the pace so far."""

    rule: str
    reason: str
    """For people."""
    holds: bool
    """It has ended the campaign, or is just ending it."""
    unmeasured: int | None = None
    """Configurations that were planned for nothing, where a rule holds."""
    labels: int | None = None
    """At which it will hold, where it does not yet."""
    at: datetime | None = None
    """When it will hold."""


def end_of(store: Store, campaign: CampaignRecord, budget: CampaignBudget) -> CampaignEnd | None:
    """What ended a campaign or will end it; None while there is no pace to forecast from."""
    held = rule_held(store, campaign.id)
    if held is not None:
        counts = store.assignments.counts(campaign.id).values()
        unmeasured = sum(states.get(AssignmentState.OPEN, 0) for states in counts)
        return CampaignEnd(rule=held.rule, reason=held.reason, holds=True, unmeasured=unmeasured)
    spent = [r.spent for r in training_reports(store, campaign.id) if r.spent is not None]
    if not spent:
        return None
    launch = Spent(0, 0.0, datetime.fromisoformat(campaign.created_at))
    begin = spent[0] if len(spent) > 1 else launch
    coming = forecast(budget.stop or StopRules(), begin, spent[-1], budget.total)
    if coming is None:
        return None
    return CampaignEnd(
        rule=coming.rule,
        reason=coming.reason,
        holds=False,
        labels=round(coming.labels),
        at=coming.at.astimezone(UTC),
    )
