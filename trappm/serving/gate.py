"""What every request passes before any route sees it, and every answer after it.

Who asks (token, host, origin), how much (body, requests at once), how long (time limit), and what
came of it (metrics). Plain ASGI, so that it holds for every route there is, files included.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trappm.profiler.errors import TrappmError
from trappm.serving.metrics import Metrics
from trappm.serving.problems import (
    MEDIA_TYPE,
    BusyError,
    ForbiddenError,
    TimeoutExceededError,
    TooLargeError,
    UnauthorizedError,
    body,
    details,
    headers_of,
    problem,
)
from trappm.serving.settings import ServingSettings

HEALTH = frozenset({"/healthz", "/readyz"})
"""Answered without a token and however busy the server is."""
DATA = ("/v1/", "/api/", "/metrics", "/openapi.json")
"""What a token guards; the rest is the page, which shows nothing without them."""
_FORM_BYTES = 1 << 20
"""What a form may have beside its file."""

_log = logging.getLogger("trappm.serving")


class Gate:
    """Around the whole application."""

    def __init__(self, app: ASGIApp, settings: ServingSettings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._requests = 0
        self._uploads = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        answer = _Answer(send)
        self._metrics.in_flight.inc()
        try:
            await self._guarded(scope, receive, answer)
        except TrappmError as error:
            await answer.problem(*problem(error))
        except Exception:  # the last resort; nothing of it is told
            _log.exception("%s %s failed", scope["method"], scope["path"])
            await answer.problem(500, details(500, "an unexpected error; the server's log has it"))
        finally:
            self._metrics.in_flight.dec()
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(answer.status or 499)).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - begin)

    async def _guarded(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        if scope["path"] in HEALTH:
            await self._app(scope, receive, answer.send)
            return
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        self._check_caller(scope["path"], headers)
        upload = headers.get("content-type", "").startswith("multipart/")
        full = self._requests >= self._settings.max_requests
        if full or (upload and self._uploads >= self._settings.max_uploads):
            what = f"{self._uploads} uploads" if upload else f"{self._requests} requests"
            raise BusyError(f"the server is at work on {what}; ask again in a moment")
        self._requests += 1
        self._uploads += upload
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                limited = self._limited(receive, headers, upload)
                await self._app(scope, limited, answer.send)
        except TimeoutError:
            raise TimeoutExceededError(
                f"the request took more than {self._settings.timeout_s:g} s; ask for less at once"
            ) from None
        finally:
            self._requests -= 1
            self._uploads -= upload

    def _check_caller(self, path: str, headers: Mapping[str, str]) -> None:
        """Raises ForbiddenError or UnauthorizedError for callers that are not to be answered."""
        settings, host = self._settings, headers.get("host", "")
        if settings.hosts is not None and _name(f"//{host}") not in settings.hosts:
            raise ForbiddenError(
                f"this server is not called {host[:100]!r}; call it {settings.hosts[0]}"
            )
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("//")[2] != host.lower():
            raise ForbiddenError(f"a page of {origin[:100]} may not ask; only this server's own")
        if settings.token is None or not path.startswith(DATA):
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), settings.token.encode())
        if kind.lower() != "bearer" or not right:
            raise UnauthorizedError(
                "no token, or a wrong one; send the header 'Authorization: Bearer TOKEN'"
            )

    def _limited(self, receive: Receive, headers: Mapping[str, str], upload: bool) -> Receive:
        """The body, as long as it is not too large."""
        settings = self._settings
        most = settings.max_upload_bytes + _FORM_BYTES if upload else settings.max_body_bytes
        too_large = TooLargeError(
            f"the body has more than {most:,} bytes; send a smaller file, or ask for less at once"
        )
        length = headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > most:
            raise too_large
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > most:
                raise too_large
            return message

        return limited


class _Answer:
    """What is sent, and whether it has begun: then no other answer can be given."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-content-type-options", b"nosniff"),
            ]
        await self._send(message)

    async def problem(self, status: int, told: dict[str, Any]) -> None:
        if self.status is not None:
            return
        data = body(told)
        headers = {
            "content-type": MEDIA_TYPE,
            "content-length": str(len(data)),
            **headers_of(status),
        }
        rows = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": rows})
        await self.send({"type": "http.response.body", "body": data})


def _name(address: str) -> str:
    """A host without its port; empty for what is none."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""
