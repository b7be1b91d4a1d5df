"""What ends a campaign: keeps which stop rule held, asks after errors and clock, foretells the end.

The rule that held is written down as an event at once, so that it holds after a restart. What was
spent is written into the learner's report, which a closed round keeps. Budgets are the state
machine's own affair (`allowance`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from trappm.cluster.campaign.spec import CampaignSpec
from trappm.cluster.scheduler.stop_rules import (
    RoundResult,
    Stop,
    StopRules,
    foretold,
    past,
    stopped,
)
from trappm.store import AssignmentState, CampaignRecord, Store

ENOUGH = "enough"
"""The kind of event that tells which rule held."""


class Ending:
    """The stop rules of one campaign, and what they have said so far."""

    def __init__(self, store: Store, campaign_id: str, spec: CampaignSpec) -> None:
        self._store, self._id, self._spec = store, campaign_id, spec
        self.has_come = False
        """A rule held, and nothing more is to begin."""

    def recall(self) -> None:
        """Reads back whether a rule held before a restart."""
        self.has_come = rule_held(self._store, self._id) is not None

    def hold(self, rule: str, told: str) -> str:
        """Writes down that a rule holds; what is to be told of it."""
        news = f"enough ({rule}): {told}"
        event = {"message": news, "rule": rule, "told": told}
        self._store.campaigns.log_event(self._id, ENOUGH, event)
        self.has_come = True
        return news

    def look_at_clock(self) -> str | None:
        """What is to be told if the time is up, and was not before."""
        rules = self._spec.stop
        if self.has_come or rules is None:
            return None
        stop = past(rules, datetime.now(UTC))
        return None if stop is None else self.hold(stop.rule, stop.told)

    def ask(self, report: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
        """The report of a training with what was spent until then, and whether errors end it.

        Returns:
            The report, and what is to be told: that a rule holds, when it does for the first time.
        """
        labels = self._store.campaigns.label_counts(self._id).get(self._id, 0)
        spent = {
            "labels": labels,
            "gpu_seconds": self._store.campaigns.measuring_seconds(self._id),
            "at": datetime.now(UTC).isoformat(),
        }
        told = {**report, "spent": spent}
        rules = self._spec.stop
        if self.has_come or rules is None:
            return told, None
        before = [r.report or {} for r in self._store.rounds.all(self._id)]
        known = [r for r in map(RoundResult.of, (*before, told)) if r is not None]
        generator = np.random.default_rng([self._spec.seed, labels])
        stop = stopped(rules, known, self._spec.devices.keys, generator)
        return told, None if stop is None else self.hold(stop.rule, stop.told)


def rule_held(store: Store, campaign_id: str) -> Stop | None:
    """The rule that has ended a campaign, or is just ending it."""
    told = [e.message for e in store.campaigns.events(campaign_id, kind=ENOUGH)]
    # Earlier versions wrote it into the reports of the rounds.
    told += [(r.report or {}).get("stop", {}) for r in store.rounds.all(campaign_id)]
    return next((Stop(one["rule"], one["told"]) for one in told if "rule" in one), None)


def end_of(store: Store, campaign: CampaignRecord) -> dict[str, Any] | None:
    """What ended a campaign or will end it, and when; None while nothing can be foretold.

    Returns:
        rule, told (for people), holds (whether it does by now), and for one that does: unmeasured,
        how many configurations were planned for nothing; for one that does not yet: labels at which
        it will, at (UTC, ISO 8601).
    """
    held = rule_held(store, campaign.id)
    if held is not None:
        counts = store.assignments.counts(campaign.id).values()
        unmeasured = sum(states.get(AssignmentState.OPEN, 0) for states in counts)
        return {"rule": held.rule, "told": held.told, "holds": True, "unmeasured": unmeasured}
    reports = [r.report for r in store.rounds.all(campaign.id) if r.report]
    launch = RoundResult(0, 0.0, datetime.fromisoformat(campaign.created_at))
    known = [r for r in map(RoundResult.of, reports) if r is not None]
    # Only these keys: reading a whole campaign file brings in torch, and status is to be quick.
    rules = TypeAdapter(StopRules | None).validate_python(campaign.spec.get("stop"))
    rounds = known if len(known) > 1 else [launch, *known]
    stop = foretold(rules or StopRules(), rounds, _planned(campaign.spec))
    if stop is None:
        return None
    return {
        "rule": stop.rule,
        "told": stop.told,
        "holds": False,
        "labels": None if stop.labels is None else round(stop.labels),
        "at": None if stop.at is None else stop.at.astimezone(UTC).isoformat(),
    }


def _planned(spec: Mapping[str, Any]) -> int:
    """Labels of all rounds on all devices, by a campaign file as the store keeps it."""
    parts = [spec["evaluation"], spec["initial"], *[spec["rounds"]] * spec["rounds"]["count"]]
    return sum(part["source"] + part["target"] for part in parts)
