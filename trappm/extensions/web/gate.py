"""Checks of every request before its route.

Plain ASGI middleware also covers static files. `connections` limits clients that send no whole
headers; fairness between clients and TLS are left to a reverse proxy (docs/serving.md).

FastAPI's `HTTPBearer` reads the body before it checks the token and leaves unknown routes open.
Starlette's `RequestBodyLimitMiddleware` responds in plain text, without problem details.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trappm.extensions.web.metrics import Metrics
from trappm.extensions.web.problems import ServingError, problem, refusal
from trappm.profiler.errors import TrappmError


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """Settings of one server: its snapshot, its callers, and its limits."""

    snapshot: str | None = None
    """Id, alias or folder; None for `latest` and then `default`, as in `predict`."""
    token: str | None = None
    """Token for everything except health and the page's files; None only on loopback."""
    hosts: tuple[str, ...] | None = None
    """Allowed Host headers; None for any."""
    max_upload_bytes: int = 200 << 20
    max_body_bytes: int = 1 << 20
    """Limit of a body without a file."""
    max_requests: int = 64
    """Limit of requests in flight; more get status 503."""
    timeout_s: float = 120.0
    """Time limit per request, including its body; exceeding it gives status 504."""
    trace_memory_mib: int = 8192
    """Memory limit of the tracing process."""
    max_waiting: int = 32
    """Limit of models that wait for a trace; more get status 503."""
    poll_s: float = 2.0
    """Interval between checks of the aliases in seconds."""

    def __repr__(self) -> str:
        return f"ServingSettings(snapshot={self.snapshot!r}, ...)"  # never the token


HEALTH = frozenset({"/healthz", "/readyz"})
"""Paths that need no token and are exempt from the limit of requests."""
DATA = ("/v1/", "/api/", "/metrics", "/openapi.json")
"""Path prefixes that need the token; the other paths are the page, which contains no data."""
_FORM_BYTES = 1 << 20
"""Allowance for the form fields around an uploaded file."""

_log = logging.getLogger("trappm.web")


class Gate:
    """Middleware with authentication and limits for the whole application."""

    def __init__(self, app: ASGIApp, settings: ServingSettings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-content-type-options"] = "nosniff"
            await send(message)

        async def fail(response: JSONResponse) -> None:
            if not status:  # else part of another response has been sent
                await response(scope, receive, watched)

        self._metrics.in_flight.inc()
        try:
            await self._checked(scope, receive, watched)
        except TrappmError as error:
            await fail(problem(error))
        except asyncio.CancelledError:  # server shutdown; uvicorn would log a traceback
            await fail(refusal(503, "the server is stopping"))
        except Exception:  # callers get no details of unexpected errors
            _log.exception("%s %s failed", scope["method"], scope["path"])
            await fail(refusal(500, "unexpected error; see the server's log"))
        finally:
            self._metrics.in_flight.dec()
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(status or 499)).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - begin)

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = MutableHeaders(raw=list(scope["headers"]))
        if "content-length" in headers and "transfer-encoding" in headers:  # RFC 9112, section 6.1
            response = refusal(400, "the body has both Content-Length and Transfer-Encoding")
            response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        if scope["path"] in HEALTH:
            await self._app(scope, receive, send)
            return
        self._check_caller(scope, headers)
        is_upload = headers.get("content-type", "").startswith("multipart/")
        is_upload = is_upload and scope["path"].endswith("/upload")
        if not is_upload:  # `curl -d` sends JSON with the type of a form, which FastAPI rejects
            headers["content-type"] = "application/json"
        scope["headers"] = headers.raw
        most = self._max_bytes(is_upload, headers.get("content-length", ""))
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > most:
                raise _too_large(most)
            return message

        if self._requests >= self._settings.max_requests:
            raise ServingError(503, f"{self._requests} requests are in flight; retry in a moment")
        self._requests += 1
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._app(scope, limited, send)
        except TimeoutError:
            raise ServingError(
                504,
                f"the request exceeded {self._settings.timeout_s:g} s; send smaller requests",
            ) from None
        finally:
            self._requests -= 1

    def _check_caller(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raise ServingError for cross-site requests and for a missing or wrong token."""
        settings, path = self._settings, scope["path"]
        own, origin = f"{scope['scheme']}://{headers.get('host', '')}", headers.get("origin")
        if origin is not None and origin.lower() != own.lower():
            raise ServingError(403, f"cross-origin request from {origin[:100]} refused")
        # Browsers send this header with requests from other sites; links to the page are allowed.
        site = headers.get("sec-fetch-site", "none")
        if site not in {"none", "same-origin"} and path.startswith(DATA):
            raise ServingError(403, f"cross-site request ({site[:20]!r}) refused")
        if settings.token is None or not path.startswith(DATA):
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), settings.token.encode())
        if kind.lower() != "bearer" or not right:
            raise ServingError(
                401, "missing or wrong token; send the header 'Authorization: Bearer TOKEN'"
            )

    def _max_bytes(self, is_upload: bool, declared: str) -> int:
        """Return the limit of the body; raise ServingError if the declared length exceeds it."""
        settings = self._settings
        most = settings.max_upload_bytes + _FORM_BYTES if is_upload else settings.max_body_bytes
        if declared.isdigit() and int(declared[:20]) > most:
            raise _too_large(most)
        return most


def _too_large(most: int) -> ServingError:
    return ServingError(413, f"the body exceeds {most:,} bytes; send smaller requests")
