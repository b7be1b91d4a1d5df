"""The application in many replicas behind one address, which Ray Serve runs.

Every replica holds its own snapshots and answers, and looks by itself for what `latest` means.
Requests pass two more processes on their way, so a single process answers sooner as long as it can
keep up (docs/serving.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from trappm.serving.running import address_of
from trappm.serving.settings import ServingSettings

if TYPE_CHECKING:
    from fastapi import FastAPI


class Replica:
    """Makes the application where Ray has put it: only settings travel there."""

    def __init__(self, settings: ServingSettings) -> None:
        self._settings = settings

    def __serve_build_asgi_app__(self) -> FastAPI:
        from trappm.serving.app import create_app

        return create_app(self._settings)


def deploy(
    settings: ServingSettings,
    *,
    host: str,
    port: int,
    replicas: int,
    address: str | None,
    listening: Callable[[str], None],
) -> None:
    """Serves with Ray until it is interrupted or terminated; called in the main thread.

    Args:
        settings: of each replica; `max_requests` are shared out among them.
        host: the address to listen at.
        port: of the proxy.
        replicas: how many processes.
        address: of a Ray cluster; None for a private Ray on this machine.
        listening: called with the address, once it can be asked.

    Raises:
        KeyboardInterrupt, InputError, CampaignError: as `cluster.ray_serving.serve_replicas`.
    """
    from trappm.cluster.ray_serving import serve_replicas

    # Ray's proxy has its own queue, so a replica never has more than its share.
    each = max(-(-settings.max_requests // replicas), 1)
    serve_replicas(
        Replica,
        replace(settings, max_requests=each),
        host=host,
        port=port,
        replicas=replicas,
        requests_at_once=each,
        requests_waiting=settings.max_requests,
        address=address,
        listening=lambda: listening(address_of(host, port)),
    )
