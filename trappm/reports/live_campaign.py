"""A running campaign as its label store shows it, wherever it runs: rates, errors, time to go."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from trappm.profiler.records import METRICS
from trappm.reports.spending import cost_line, cost_so_far
from trappm.terminal.tables import console, table

if TYPE_CHECKING:
    from rich.console import Group

    from trappm.store import Store

PERIOD_S = 2.0

WINDOW_MIN = 10.0
"""Rates are those of the last so many minutes."""


def facts(store: Store, campaign_id: str) -> dict[str, Any]:
    """How a campaign is now, as plain values."""
    from trappm.cluster.launch import spec_of
    from trappm.reports.campaign_report import campaign_state

    campaign = store.campaigns.get(campaign_id)
    spec = spec_of(campaign)
    now = datetime.now(UTC)
    began = max(now - timedelta(minutes=WINDOW_MIN), datetime.fromisoformat(campaign.created_at))
    minutes = max((now - began).total_seconds() / 60, 1 / 60)
    counts = store.assignments.counts(campaign_id)
    lately = store.campaigns.outcome_counts(campaign_id, since=began.isoformat())
    at_work = store.assignments.of_campaign(campaign_id, state="leased")
    reports = [(r.number, r.report) for r in store.rounds.all(campaign_id) if r.report]
    devices: dict[str, dict[str, Any]] = {}
    for device in spec.devices.keys:
        states = {str(state): count for state, count in counts.get(device, {}).items()}
        ended = states.get("done", 0) + states.get("failed", 0)
        rate = sum(lately.get(device, {}).values()) / minutes
        left = spec.budget(device) - ended
        devices[device] = {
            "done": states.get("done", 0),
            "failed": states.get("failed", 0),
            "budget": spec.budget(device),
            "measuring": sum(a.device == device for a in at_work),
            "workers": len({a.worker for a in at_work if a.device == device}),
            "attempts_per_minute": rate,
            "minutes_to_go": left / rate if rate else (None if left else 0.0),
        }
    known = [d["minutes_to_go"] for d in devices.values()]
    return {
        "id": campaign.id,
        "name": campaign.name,
        "state": campaign_state(campaign),
        "devices": devices,
        "minutes_to_go": None if None in known else max(known, default=None),
        "cost": cost_so_far(store, campaign),
        "errors": [
            {
                "round": number,
                "device": device,
                **{metric: errors[metric]["mape"] for metric in METRICS if metric in errors},
            }
            for number, report in reports
            for device, errors in report.get("devices", {}).items()
        ],
        "events": [
            {"at": e.at, "kind": e.kind, "message": e.message.get("message", "")}
            for e in store.campaigns.events(campaign_id, last=5)
        ],
    }


def watch(store: Store, campaign_id: str, *, once: bool) -> None:
    """Shows it until it ends, or until Ctrl-C; the campaign does not mind."""
    from rich.live import Live

    shown = facts(store, campaign_id)
    if once or not console().is_terminal:
        console().print(_view(shown))
        return
    with Live(_view(shown), console=console(), auto_refresh=False) as live:
        while shown["state"] == "running":
            time.sleep(PERIOD_S)
            shown = facts(store, campaign_id)
            live.update(_view(shown), refresh=True)


def _view(shown: dict[str, Any]) -> Group:
    from rich.console import Group
    from rich.text import Text

    to_go = shown["minutes_to_go"]
    left = "" if not to_go else f", about {to_go:,.0f} minutes of measuring to go"
    rows = [(device, *values.values()) for device, values in shown["devices"].items()]
    columns = ("device", "done", "failed", "budget", "measuring", "workers", "attempts/min",
               "minutes to go")  # fmt: skip
    parts: list[Any] = [
        Text(f"campaign {shown['id']} ({shown['name']}): {shown['state']}{left}"),
        table("", columns, rows),
        Text(cost_line(shown["cost"])),
    ]
    if shown["errors"]:
        errors = [
            (e["round"], e["device"], *(e.get(metric) for metric in METRICS))
            for e in shown["errors"][-6:]
        ]
        names = ("round", "device", *(f"{metric}, MAPE %" for metric in METRICS))
        parts.append(table("error on architectures held out", names, errors))
    parts += [
        Text(f"{e['at'][:19].replace('T', ' ')} UTC  {e['kind']}: {e['message']}")
        for e in shown["events"]
    ]
    return Group(*parts)
