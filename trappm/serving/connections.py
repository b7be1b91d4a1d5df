"""Limits of connections: seconds for headers, a number in all, and half of it for one client.

uvicorn itself waits for headers for ever. Where there are too many connections, the one that has
been silent longest makes room, first among those of the client who opens another: so neither
half-sent headers nor a crowd of idle connections keep anybody out.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Collection
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 10.0
"""From a connection to its first request."""
NEXT_S = 30.0
"""From an answer to the next request."""
_OTHER_FILES = 256
"""That the process opens beside its connections."""


class BoundedProtocol(H11Protocol):
    """One connection of a server whose connections are bounded."""

    most = 512
    """Connections in all; half of them may be one client's."""
    _silent_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(HEADERS_S)
        self._make_room([c for c in self._all if c.peer == self.peer], self.most // 2)
        self._make_room(self._all, self.most)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait(NEXT_S)

    @property
    def peer(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def is_silent(self) -> bool:
        """Whether no request is being answered here."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _all(self) -> list[BoundedProtocol]:
        return [c for c in self.connections if isinstance(c, BoundedProtocol)]

    def _wait(self, seconds: float) -> None:
        """For the next request, which a trickle of bytes does not put off."""
        since = self._silent_since = self.loop.time()
        self.loop.call_later(seconds, self._end_if_silent, since)

    def _end_if_silent(self, since: float) -> None:
        if self.is_silent and self._silent_since == since:
            self._end()

    def _make_room(self, crowd: Collection[BoundedProtocol], most: int) -> None:
        if len(crowd) > most:
            silent = [c for c in crowd if c.is_silent]  # this one at least
            min(silent, key=lambda c: c._silent_since)._end()

    def _end(self) -> None:
        self.connections.discard(self)
        self.transport.abort()


def protocol(max_requests: int) -> type[Any]:
    """With room for so many requests at work, and as many files as that takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 384 + 2 * max_requests
    if soft != resource.RLIM_INFINITY and soft < most + _OTHER_FILES:
        soft = (
            most + _OTHER_FILES
            if hard == resource.RLIM_INFINITY
            else min(hard, most + _OTHER_FILES)
        )
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        most = min(most, max(soft - _OTHER_FILES, 16))
    return type("Bounded", (BoundedProtocol,), {"most": most})
