"""The gate that every request passes before its route, and every answer after it.

It checks the caller (token, origin), the size (body, requests at once) and the time (of a body, of
the work, which ends when its caller leaves), and counts the outcome (metrics). Plain ASGI, so that
it holds for every route there is, files included.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trappm.profiler.errors import TrappmError
from trappm.serving.metrics import Metrics
from trappm.serving.problems import (
    MEDIA_TYPE,
    BusyError,
    ForbiddenError,
    SlowBodyError,
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
"""Of a form beside its file."""
_MIN_BYTES_PER_S = 64 << 10
"""Bytes a second of a body, after its first seconds."""
_AGAIN = "ask again in a moment"

_log = logging.getLogger("trappm.serving")


class Gate:
    """Around the whole application."""

    def __init__(self, app: ASGIApp, settings: ServingSettings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._requests = 0
        self._uploads: Counter[str] = Counter()

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
        except Exception:  # the last resort; callers learn nothing of it
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
        with contextlib.ExitStack() as taken:
            if headers.get("content-type", "").startswith("multipart/"):
                taken.enter_context(self._upload(client_of(scope)))
            at_work = self._place()
            body = _Body(receive, self._max_bytes(headers), self._settings.body_timeout_s)
            if scope["method"] == "POST":  # its place is taken when its body is there
                self._check_place()
                body.when_whole = lambda: taken.enter_context(at_work)
            else:
                taken.enter_context(at_work)
            try:
                async with asyncio.timeout(self._settings.timeout_s), body.caller_there(answer):
                    await self._app(scope, body.receive, answer.send)
            except TimeoutError:
                raise TimeoutExceededError(
                    f"the request took more than {self._settings.timeout_s:g} s; ask for less at "
                    "once"
                ) from None

    def _check_place(self) -> None:
        if self._requests >= self._settings.max_requests:
            raise BusyError(f"the server is at work on {self._requests} requests; {_AGAIN}")

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """Raises BusyError: as many requests are at work as may be."""
        self._check_place()
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    @contextlib.contextmanager
    def _upload(self, client: str) -> Iterator[None]:
        """Raises BusyError: as many files come in as may, from this client or in all."""
        most = self._settings.max_uploads
        if self._uploads.total() >= most or self._uploads[client] >= -(-most // 2):
            raise BusyError(f"the server is at work on {self._uploads.total()} uploads; {_AGAIN}")
        self._uploads[client] += 1
        try:
            yield
        finally:
            self._uploads[client] -= 1
            self._uploads += Counter()  # forgets who has none

    def _check_caller(self, path: str, headers: Mapping[str, str]) -> None:
        """Raises ForbiddenError or UnauthorizedError for callers that are not to be answered."""
        settings = self._settings
        host, origin = headers.get("host", ""), headers.get("origin")
        if origin is not None and origin.lower().partition("//")[2] != host.lower():
            raise ForbiddenError(f"a page of {origin[:100]} may not ask; only this server's own")
        # A browser says so of what other sites' pages load; the page itself may be linked to.
        site = headers.get("sec-fetch-site", "none")
        if site not in {"none", "same-origin"} and path.startswith(DATA):
            raise ForbiddenError(f"a page of another site ({site[:20]!r}) may not ask")
        if settings.token is None or not path.startswith(DATA):
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), settings.token.encode())
        if kind.lower() != "bearer" or not right:
            raise UnauthorizedError(
                "no token, or a wrong one; send the header 'Authorization: Bearer TOKEN'"
            )

    def _max_bytes(self, headers: Mapping[str, str]) -> int:
        """Of the body; raises TooLargeError if more is announced."""
        settings = self._settings
        upload = headers.get("content-type", "").startswith("multipart/")
        most = settings.max_upload_bytes + _FORM_BYTES if upload else settings.max_body_bytes
        length = headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > most:
            raise _too_large(most)
        return most


class _Body:
    """What a caller sends, neither too much nor too slowly; then, whether they stay."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._begin = time.monotonic()
        self._timeout_s = timeout_s
        self._taken = 0
        self._whole = asyncio.Event()
        self.when_whole: Callable[[], object] = lambda: None

    async def receive(self) -> Message:
        """The next part; raises SlowBodyError or TooLargeError."""
        if self._whole.is_set():
            return await self._receive()
        waits_s = self._begin + self._timeout_s + self._taken / _MIN_BYTES_PER_S - time.monotonic()
        try:
            async with asyncio.timeout(waits_s):
                message = await self._receive()
        except TimeoutError:
            raise SlowBodyError(
                f"the body came too slowly: {self._taken:,} bytes in "
                f"{time.monotonic() - self._begin:.0f} s; send it at once"
            ) from None
        self._taken += len(message.get("body", b""))
        if self._taken > self._max_bytes:
            raise _too_large(self._max_bytes)
        if message["type"] == "http.request" and not message.get("more_body"):
            self.when_whole()
            self._whole.set()
        return message

    @contextlib.asynccontextmanager
    async def caller_there(self, answer: _Answer) -> AsyncIterator[None]:
        """What is inside is cancelled when the caller leaves after having sent the whole body."""
        inside = asyncio.current_task()
        assert inside is not None  # noqa: S101  (requests are tasks)

        async def watch() -> None:
            await self._whole.wait()
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if answer.status is None:
                inside.cancel()

        watching = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if not watching.done() or watching.cancelled() or inside.uncancel():
                raise  # somebody else's cancellation
        finally:
            watching.cancel()


def client_of(scope: Scope) -> str:
    """The address that a request comes from; behind a proxy the one that it names."""
    address = scope.get("client")
    return str(address[0]) if address else ""


def _too_large(most: int) -> TooLargeError:
    return TooLargeError(
        f"the body has more than {most:,} bytes; send a smaller file, or ask for less at once"
    )


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

    async def problem(self, status: int, fields: dict[str, Any]) -> None:
        if self.status is not None:
            return
        data = body(fields)
        headers = {
            "content-type": MEDIA_TYPE,
            "content-length": str(len(data)),
            **headers_of(status),
        }
        rows = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": rows})
        await self.send({"type": "http.response.body", "body": data})
