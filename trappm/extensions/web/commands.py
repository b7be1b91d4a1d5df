"""`trappm serve` and `trappm ui`: predictions over HTTP, and the page in the browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

HOST = "127.0.0.1"
"""Address of the page."""

_Snapshot = Annotated[
    str | None,
    typer.Option(help="Id, alias or folder (default: the device's latest, then default)."),
]


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Serve")(serve)
    app.command(rich_help_panel="Serve")(ui)


def serve(
    host: Annotated[str, typer.Option(help="Address to listen at.")] = HOST,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port (0: any free one).")] = 8000,
    snapshot: _Snapshot = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token (default: TRAPPM_TOKEN).")
    ] = None,
    max_upload_mib: Annotated[
        int, typer.Option(min=1, max=2048, help="Largest ONNX file in MiB.")
    ] = 200,
    timeout: Annotated[
        float, typer.Option(min=1, max=3600, help="Limit of a request in seconds.")
    ] = 120,
    max_requests: Annotated[
        int, typer.Option(min=1, max=10_000, help="Requests in flight; further ones get 503.")
    ] = 64,
) -> None:
    """Answer predictions over HTTP, the same as trappm predict gives.

    Example: trappm serve --port 8000
    """
    from trappm.extensions.web.running import hosts_for, token_for
    from trappm.extensions.web.running import serve as run
    from trappm.extensions.web.settings import ServingSettings

    token = token_for(host, token_file)
    settings = ServingSettings(
        snapshot=snapshot,
        token=token,
        hosts=hosts_for(host, token),
        max_upload_bytes=max_upload_mib << 20,
        timeout_s=timeout,
        max_requests=max_requests,
    )

    def listening(url: str) -> None:
        typer.echo(f"Serving at {url} (Ctrl-C ends it); try: curl {url}/readyz")

    run(settings, host=host, port=port, listening=listening)


def ui(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port (0: any free one).")] = 8000,
    snapshot: _Snapshot = None,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Print the address and open no browser.")
    ] = False,
) -> None:
    """Open the page: campaigns, labels, snapshots and predictions.

    It is for this machine alone, changes nothing, and sends requests to no other host.

    Example: trappm ui --port 8000
    """
    from trappm.extensions.web.running import hosts_for, token_for
    from trappm.extensions.web.running import serve as run
    from trappm.extensions.web.settings import ServingSettings

    def listening(url: str) -> None:
        typer.echo(f"The page is at {url}/ (Ctrl-C ends it)")
        if not no_browser:
            webbrowser.open(f"{url}/")

    token = token_for(HOST, None)
    settings = ServingSettings(snapshot=snapshot, token=token, hosts=hosts_for(HOST, token))
    run(settings, host=HOST, port=port, listening=listening)
