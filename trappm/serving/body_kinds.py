"""JSON of whatever content type: `curl -d` calls its JSON a form, and FastAPI goes by the type."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send


class JsonBodies:
    """Calls every body JSON that is not the form of an upload."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = MutableHeaders(raw=list(scope["headers"]))
            if not headers.get("content-type", "").startswith("multipart/"):
                headers["content-type"] = "application/json"
            scope["headers"] = headers.raw  # in place: the gate reads the route from this scope
        await self._app(scope, receive, send)
