"""`trappm serve`: predictions over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    snapshot: Annotated[
        str | None,
        typer.Option(help="An id, alias or folder; by default the device's latest, then default."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="Holds the callers' token; by default TRAPPM_TOKEN does.")
    ] = None,
    max_upload_mib: Annotated[int, typer.Option(min=1, max=2048, help="Of an ONNX file.")] = 200,
    timeout: Annotated[float, typer.Option(min=1, max=3600, help="Of a request, in s.")] = 120,
    max_requests: Annotated[
        int, typer.Option(min=1, max=10_000, help="At once; more are refused for now.")
    ] = 64,
) -> None:
    """Answer predictions over HTTP, the same as trappm predict gives.

    Example: trappm serve --port 8000
    """
    from trappm.serving.running import hosts_for, token_for
    from trappm.serving.running import serve as run
    from trappm.serving.settings import ServingSettings

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
