"""Bodies as callers may send them: JSON of whatever content type, and forms on the JSON routes.

`curl -d` calls its JSON a web form, and uploads had no routes of their own at first; FastAPI goes
by content type and route alone.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

UPLOAD = "/upload"
"""What the route of an upload has behind the one that takes JSON."""


class BodyKinds:
    """Hands forms to the upload routes, and calls every other body JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = MutableHeaders(raw=list(scope["headers"]))
            if not headers.get("content-type", "").startswith("multipart/"):
                headers["content-type"] = "application/json"
            elif scope["path"] in {"/v1/predict", "/v1/compare"}:
                scope["path"] += UPLOAD
            scope["headers"] = headers.raw  # in place: the gate reads the route from this scope
        await self._app(scope, receive, send)
