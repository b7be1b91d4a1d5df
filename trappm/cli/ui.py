"""`trappm ui`: the page in the browser, on the server of `trappm serve`."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

HOST = "127.0.0.1"


def ui(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    snapshot: Annotated[
        str | None,
        typer.Option(
            help="What predicts: id, alias or folder; by default the device's latest, then default."
        ),
    ] = None,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Do not open it; say where it is.")
    ] = False,
) -> None:
    """Open the page: campaigns as they run, labels, snapshots, and predictions.

    It is for this machine alone, changes nothing, and asks no other host.

    Example: trappm ui --port 8000
    """
    from trappm.serving.running import hosts_for, serve, token_for
    from trappm.serving.settings import ServingSettings

    def listening(url: str) -> None:
        typer.echo(f"The page is at {url}/ (Ctrl-C ends it)")
        if not no_browser:
            webbrowser.open(f"{url}/")

    token = token_for(HOST, None)
    settings = ServingSettings(snapshot=snapshot, token=token, hosts=hosts_for(HOST, token))
    serve(settings, host=HOST, port=port, listening=listening)
