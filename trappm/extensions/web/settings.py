"""Settings of a server, without its libraries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """Settings of one server: its snapshot, its callers, and its limits."""

    snapshot: str | None = None
    """An id, alias or folder; None for `latest` here and `default` after it, as in `predict`."""
    token: str | None = None
    """Required for all but health and the page's files; None on loopback only."""
    hosts: tuple[str, ...] | None = None
    """Host names that a browser may use for this server; None for any."""
    max_upload_bytes: int = 200 << 20
    max_body_bytes: int = 1 << 20
    """Limit of a body without a file."""
    max_requests: int = 64
    """Requests in flight; further ones get status 503."""
    timeout_s: float = 120.0
    """Limit of a request, its body included; after it the status is 504."""
    trace_memory_mib: int = 8192
    """Limit of the process that traces a model for the first time."""
    max_waiting: int = 32
    """Models that wait to be traced; further ones get status 503."""
    poll_s: float = 2.0
    """Seconds between two checks of the aliases."""

    def __repr__(self) -> str:
        return f"ServingSettings(snapshot={self.snapshot!r}, ...)"  # never the token
