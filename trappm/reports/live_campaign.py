"""A running campaign followed in the terminal: rates, errors, time to go."""

from __future__ import annotations

import time
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from trappm.reports.campaign_facts import CampaignFacts, campaign_facts
from trappm.reports.campaign_report import MAPES, errors_by_round, event_line
from trappm.store import CampaignState
from trappm.terminal.tables import console, table

if TYPE_CHECKING:
    from rich.console import Group

    from trappm.store import Store

PERIOD_S = 2.0


def watch(store: Store, campaign_id: str, *, once: bool) -> None:
    """Shows it until it ends, or until Ctrl-C, which the campaign does not notice."""
    from rich.live import Live

    facts = campaign_facts(store, campaign_id)
    if once or not console().is_terminal:
        console().print(_view(facts))
        return
    with Live(_view(facts), console=console(), auto_refresh=False) as live:
        while facts.state == CampaignState.RUNNING:
            time.sleep(PERIOD_S)
            facts = campaign_facts(store, campaign_id)
            live.update(_view(facts), refresh=True)


def _view(facts: CampaignFacts) -> Group:
    from rich.console import Group
    from rich.text import Text

    minutes = facts.minutes_to_go
    to_go = f", about {minutes:,.0f} minutes of measuring to go" if minutes else ""
    columns = ("device", "done", "failed", "budget", "measuring", "workers", "attempts/min",
               "minutes to go")  # fmt: skip
    rows = [(name, *astuple(device)) for name, device in facts.devices.items()]
    parts: list[Any] = [
        Text(f"campaign {facts.id} ({facts.name}): {facts.standing}{to_go}"),
        table("", columns, rows),
        Text(str(facts.cost)),
    ]
    if errors := errors_by_round(facts)[-6:]:
        rows = [(number, device, *mapes) for number, _, device, _, _, *mapes in errors]
        parts.append(table("error on architectures held out", ("round", "device", *MAPES), rows))
    parts += [Text(event_line(event)) for event in facts.events]
    return Group(*parts)
