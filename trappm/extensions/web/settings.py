"""Settings of a server, importable without the server's dependencies."""

from __future__ import annotations

from dataclasses import dataclass


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
