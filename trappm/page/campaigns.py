"""What the page shows of campaigns, as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from trappm.profiler.records import METRICS
from trappm.reports import campaign_report, live_campaign

if TYPE_CHECKING:
    from trappm.store import CampaignRecord, Store

MOST_ATTEMPTS = 20_000
"""So many of the latest attempts tell the pace."""
BINS = 40
"""Parts of the time that the curve of the pace has at most."""
MOST_EVENTS = 50
MOST_POINTS = 2_000
"""Of predicted against measured."""


def rows(store: Store) -> list[dict[str, Any]]:
    """One row for each campaign, the latest first."""
    found = []
    for campaign in store.campaigns.all():
        counts = store.assignments.counts(campaign.id)
        found.append(
            {
                "id": campaign.id,
                "name": campaign.name,
                **_state(campaign),
                "seed": campaign.seed,
                "created_at": campaign.created_at,
                "finished_at": campaign.finished_at,
                "devices": {d: _by_state(counts.get(d, {})) for d in _devices(campaign)},
            }
        )
    return found


def facts(store: Store, campaign_id: str) -> dict[str, Any]:
    """Everything that the page tells of one campaign.

    Raises:
        InputError: there is no such campaign.
    """
    campaign = store.campaigns.get(campaign_id)
    told = campaign_report.campaign_facts(store, campaign_id)
    pace = live_campaign.facts(store, campaign_id)
    stop = campaign.spec.get("stop") or {}
    reports = [(r["number"], r["purpose"], r["report"]) for r in told["rounds"] if r["report"]]
    events = [
        {"at": e.at, "kind": e.kind, "message": e.message.get("message", "")}
        for e in store.campaigns.events(campaign_id)[-MOST_EVENTS:]
    ]
    return {
        "id": campaign.id,
        "name": campaign.name,
        **_state(campaign),
        "seed": campaign.seed,
        "created_at": campaign.created_at,
        "finished_at": campaign.finished_at,
        "strategy": campaign.spec.get("strategy"),
        "learner": campaign.spec.get("learner"),
        "protocol": _name_of(campaign.spec.get("protocol")),
        "rehearsal_on": told["rehearsal_on"],
        "devices": pace["devices"],
        "minutes_to_go": pace["minutes_to_go"],
        "outcomes": told["outcomes"],
        "targets": stop.get("target_mape") or {},
        "end": told["end"],
        "cost": told["cost"],
        "rounds": [
            {"number": r["number"], "purpose": str(r["purpose"]), "state": str(r["state"])}
            for r in told["rounds"]
        ],
        "errors": [_errors(number, purpose, one) for number, purpose, one in reports],
        "transfer": reports[-1][2].get("transfer", {}) if reports else {},
        "predicted": reports[-1][2].get("evaluation", [])[:MOST_POINTS] if reports else [],
        "pace": _pace(store, campaign),
        "working": [
            {
                "worker": a.worker,
                "device": a.device,
                "configuration": str(a.configuration),
                "attempt": a.attempts,
            }
            for a in store.assignments.of_campaign(campaign_id, state="leased")
        ],
        "canary": told["canary"],
        "snapshot": told["snapshot"],
        "events": events[::-1],
    }


def _state(campaign: CampaignRecord) -> dict[str, Any]:
    """One word, and what to type next where it was interrupted."""
    state, _, hint = campaign_report.campaign_state(campaign).partition("; ")
    command = hint.partition(": ")[2]
    return {"state": state, "next_command": command or None}


def _devices(campaign: CampaignRecord) -> list[str]:
    devices = dict(campaign.spec.get("devices") or {})
    return [str(d) for d in (devices.get("source"), devices.get("target")) if d]


def _by_state(counts: Mapping[Any, int]) -> dict[str, int]:
    states = {str(state): count for state, count in counts.items()}
    return {state: states.get(state, 0) for state in ("open", "leased", "done", "failed")}


def _name_of(protocol: object) -> str | None:
    """Protocols can be written into a campaign file beside the named ones."""
    if isinstance(protocol, Mapping):
        return str(protocol.get("name", "its own"))
    return None if protocol is None else str(protocol)


def _errors(number: int, purpose: object, told: Mapping[str, Any]) -> dict[str, Any]:
    """Errors of one round by device and metric, without the single predictions."""
    return {
        "round": number,
        "purpose": str(purpose),
        "labels": told.get("labels", {}),
        "devices": {
            device: {metric: by_metric[metric] for metric in METRICS if metric in by_metric}
            for device, by_metric in told.get("devices", {}).items()
        },
    }


def _pace(store: Store, campaign: CampaignRecord) -> dict[str, Any]:
    """Attempts that ended well by the minute, for each device, over the time of the campaign."""
    from trappm.store import LabelFilter

    frame = store.labels.query(
        LabelFilter(outcome="any", campaign=campaign.id),
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
