"""What the page shows of campaigns, as plain values."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from trappm.cluster.scheduler.training_report import TrainingReport
from trappm.profiler.errors import CampaignError
from trappm.reports.campaign_facts import campaign_facts, campaign_rows

if TYPE_CHECKING:
    from trappm.store import Store

MOST_ATTEMPTS = 20_000
"""So many of the latest attempts tell the pace."""
BINS = 40
"""Parts of the time that the curve of the pace has at most."""
MOST_EVENTS = 50
MOST_POINTS = 2_000
"""Of predicted against measured."""
MOST_CURVES = 10
"""Campaigns whose learning curves lie over each other."""


def rows(store: Store) -> list[dict[str, Any]]:
    """One row for each campaign, the latest first."""
    return [asdict(row) for row in campaign_rows(store)]


def facts(store: Store, campaign_id: str) -> dict[str, Any]:
    """Everything that the page shows of one campaign.

    Raises:
        InputError: there is no such campaign.
    """
    known = campaign_facts(store, campaign_id, latest_events=MOST_EVENTS)
    shown = known.to_json()
    for name in ("spec", "assignments"):
        del shown[name]
    reports = [(r, report.to_json()) for r, report in known.trained]
    return shown | {
        "strategy": known.spec.get("strategy"),
        "learner": known.spec.get("learner"),
        "protocol": _name_of(known.spec.get("protocol")),
        "targets": (known.spec.get("stop") or {}).get("target_mape") or {},
        "rounds": [
            {"number": r.number, "purpose": str(r.purpose), "state": str(r.state)}
            for r in known.rounds
        ],
        "errors": [_errors(r.number, str(r.purpose), report) for r, report in reports],
        "transfer": reports[-1][1]["transfer"] if reports else {},
        "predicted": reports[-1][1]["evaluation"][:MOST_POINTS] if reports else [],
        "pace": _pace(store, campaign_id),
        "events": [
            {"at": e.at, "kind": e.kind, "message": e.message.get("message", "")}
            for e in reversed(known.events)
        ],
    }


def curves(store: Store) -> list[dict[str, Any]]:
    """Errors by round of the latest campaigns that have any."""
    drawn = []
    for campaign in store.campaigns.all():
        errors = []
        with contextlib.suppress(CampaignError):  # another version wrote its reports
            errors = [
                _errors(r.number, str(r.purpose), report.to_json())
                for r in store.rounds.all(campaign.id)
                if (report := TrainingReport.of(r.report)) is not None
            ]
        if errors:
            drawn.append({"id": campaign.id, "name": campaign.name, "errors": errors})
        if len(drawn) == MOST_CURVES:
            break
    return drawn


def _errors(number: int, purpose: str, report: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "round": number,
        "purpose": purpose,
        "labels": report["labels"],
        "devices": report["devices"],
    }


def _name_of(protocol: object) -> str | None:
    """Protocols can be written into a campaign file beside the named ones."""
    if isinstance(protocol, Mapping):
        return str(protocol.get("name", "its own"))
    return None if protocol is None else str(protocol)


def _pace(store: Store, campaign_id: str) -> dict[str, Any]:
    """Attempts that ended well by the minute, for each device, over the time of the campaign."""
    from trappm.store import LabelFilter

    frame = store.labels.query(
        LabelFilter(outcome="any", campaign=campaign_id),
        columns=["device", "outcome", "started_at"],
        sort="-started_at",
        limit=MOST_ATTEMPTS,
    )
    good = frame[frame["outcome"].isin(["ok", "oom"])]
    times: Sequence[datetime] = [t.to_pydatetime() for t in good["started_at"]]
    if len(times) < 2 or max(times) == min(times):
        return {"minutes_each": None, "series": {}, "began_at": None}
    first, last = min(times), max(times)
    width = max((last - first) / BINS, timedelta(seconds=30))
    counts: Counter[tuple[str, int]] = Counter(
        (device, int((time - first) / width))
        for device, time in zip(good["device"], times, strict=True)
    )
    bins = int((last - first) / width) + 1
    minutes = width.total_seconds() / 60
    return {
        "began_at": first.isoformat(),
        "minutes_each": minutes,
        "series": {
            device: [counts[device, number] / minutes for number in range(bins)]
            for device in sorted(set(good["device"]))
        },
    }
