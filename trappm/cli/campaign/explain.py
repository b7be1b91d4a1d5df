"""`trappm campaign explain`: why these configurations, and which ones next."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trappm.cli import shell
from trappm.cli.options import AsJson, print_json


def explain(
    campaign_id: Annotated[
        str | None,
        typer.Argument(
            metavar="CAMPAIGN",
            help="Its id; the latest by default.",
            autocompletion=shell.campaigns,
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="One of the campaign's; by default its source.")
    ] = None,
    count: Annotated[
        int, typer.Option(min=1, max=1000, help="Show so many choices, and so many wanted next.")
    ] = 10,
    png: Annotated[Path | None, typer.Option(help="Draw the map into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell why a campaign measured what it measured, and what it wants next, with a map."""
    from rich.console import Console

    from trappm.label_store import store_to_read
    from trappm.reports.choices import draw_map, print_explanation
    from trappm.reports.choices import explain as explain_choices
    from trappm.store import Home
    from trappm.terminal.png_figures import require_matplotlib

    if png is not None:
        require_matplotlib("--png")
    home = Home.find()
    busy = Console(stderr=True).status("training on the labels so far, then choosing")
    with store_to_read(home) as store, busy:
        explanation = explain_choices(
            store, home, store.campaigns.get(campaign_id).id, device=device, count=count
        )
    if png is not None:
        draw_map(explanation, png)
    if as_json:
        print_json(asdict(explanation))
    else:
        print_explanation(explanation, count)
