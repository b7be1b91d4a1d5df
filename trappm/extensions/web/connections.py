"""HTTP connections with a time limit for incomplete requests and a limit per client address.

uvicorn has settings for neither. Its own limit counts connections of all clients together, so that
one client with many half-sent requests would shut out all others, and health checks.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

INCOMPLETE_S = 10.0
"""Time limit for the headers of a request, and for each next part of its body."""
MAX_WAITING_PER_CLIENT = 256
"""Connections of one client address without a request in progress."""


class LimitedConnection(H11Protocol):
    """Connection that is closed if a request stays incomplete, or its client has too many."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()
        host = self.client and self.client[0]
        waiting = [
            other for other in self.connections
            if isinstance(other, LimitedConnection)
            and other.is_waiting and (other.client and other.client[0]) == host
        ]  # fmt: skip
        if len(waiting) > MAX_WAITING_PER_CLIENT:
            min(waiting, key=lambda other: other.closes_at).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_waiting:
            self._stop_timer()
        if self._lacks_body or (self.is_waiting and self._timer is None):
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def is_waiting(self) -> bool:
        """True while no request is in progress: none has come, or its headers are incomplete."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def closes_at(self) -> float:
        """Time of the event loop at which a waiting connection is closed."""
        timer = self._timer or self.timeout_keep_alive_task
        return self.loop.time() if timer is None else timer.when()

    @property
    def _lacks_body(self) -> bool:
        """True while a request is in progress whose body is incomplete."""
        return not self.is_waiting and self.cycle.more_body

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(INCOMPLETE_S, self._end_incomplete)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_incomplete(self) -> None:
        """Close the connection; a request in progress ends as if its client had left."""
        if self._lacks_body and self.flow.read_paused:  # what has come is not read yet
            self._start_timer()
        elif self._lacks_body:
            self.transport.abort()
        elif self.is_waiting:
            self.timeout_keep_alive_handler()
