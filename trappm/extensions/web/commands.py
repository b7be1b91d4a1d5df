"""`trappm serve`: predictions over HTTP and the web page."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Serve")(serve)


def serve(
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the page in a browser on this machine.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port (0: any free port).")] = 8000,
    snapshot: Annotated[
        str | None,
        typer.Option(help="Id, alias or folder (default: the device's latest, then default)."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token (default: TRAPPM_TOKEN).")
    ] = None,
    max_upload_mib: Annotated[
        int, typer.Option(min=1, max=2048, help="Largest ONNX file in MiB.")
    ] = 200,
    timeout: Annotated[
        float, typer.Option(min=1, max=3600, help="Time limit per request in seconds.")
    ] = 120,
    max_requests: Annotated[
        int, typer.Option(min=1, max=10_000, help="Limit of requests in flight; more get 503.")
    ] = 64,
) -> None:
    """Serve predictions over HTTP, and a page with campaigns, labels, snapshots and predictions.

    Example: trappm serve --open
    """
    from trappm.extensions.web.gate import ServingSettings
    from trappm.extensions.web.running import hosts_for, token_for
    from trappm.extensions.web.running import serve as run

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
        typer.echo(f"Serving the page and the API at {url} (press Ctrl-C to stop)")
        if open_page:
            webbrowser.open(f"{url}/")

    try:
        run(settings, host=host, port=port, listening=listening)
    except KeyboardInterrupt as interrupt:  # typer would exit without a message
        raise typer.Abort from interrupt
