"""What ends a campaign: asks its stop rules after each training, and foretells the end.

What was spent is written into the learner's report, which a closed round keeps, so that the rules
say the same after a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from cluster.spec import CampaignSpec
from cluster.stopping import RoundResult, StopRules, foretold, stopped
from store import CampaignRecord, Store


class Ending:
    """The stop rules of one campaign, and what they have said so far."""

    def __init__(self, store: Store, campaign_id: str, spec: CampaignSpec) -> None:
        self._store, self._id, self._spec = store, campaign_id, spec
        self._held: Mapping[str, Any] | None = None

    @property
    def has_come(self) -> bool:
        """A rule held, and nothing more is to be planned."""
        return self._held is not None

    def ask(self, report: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
        """The report of a training with what was spent until then and the rule that holds.

        Returns:
            The report, and what is new: that a rule holds, when it does for the first time.
        """
        labels = len(self._store.campaign_labels(self._id))
        spent = {
            "labels": labels,
            "gpu_seconds": self._store.measuring_seconds(self._id),
            "at": datetime.now(UTC).isoformat(),
        }
        told = {**report, "spent": spent}
        before = [r.report or {} for r in self._store.rounds(self._id)]
        self._held = self._held or next((r["stop"] for r in before if "stop" in r), None)
        rules, news = self._spec.stop, None
        if self._held is None and rules is not None:
            rounds = [RoundResult.of(r) for r in (*before, told)]
            generator = np.random.default_rng([self._spec.seed, labels])
            known = [r for r in rounds if r is not None]
            stop = stopped(rules, known, self._spec.devices.keys, generator)
            if stop is not None:
                self._held = {"rule": stop.rule, "told": stop.told}
                news = f"enough ({stop.rule}): {stop.told}"
                self._store.log_event(self._id, "enough", {"message": news})
        return (told if self._held is None else {**told, "stop": dict(self._held)}), news


def end_of(store: Store, campaign: CampaignRecord) -> dict[str, Any] | None:
    """What ended a campaign or will end it, and when; None while nothing can be foretold.

    Returns:
        rule, told (for people), holds (whether it does by now), and for one that does not yet:
        labels at which it will, at (UTC, ISO 8601).
    """
    reports = [r.report for r in store.rounds(campaign.id) if r.report]
    for report in reports:
        if "stop" in report:
            return {**report["stop"], "holds": True}
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
