"""Settings of a server: its snapshot, its callers, and its limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """Plain values, so that every replica can be handed the same ones."""

    snapshot: str | None = None
    """An id, alias or folder; None for `latest` here and `default` after it, as in `predict`."""
    token: str | None = None
    """Without it nobody is answered but for health; None on loopback only."""
    hosts: tuple[str, ...] | None = None
    """Names that a browser may call this server by; None for any. Keeps out other sites' pages."""
    max_upload_bytes: int = 200 << 20
    max_body_bytes: int = 1 << 20
    """Of a body without a file."""
    max_uploads: int = 4
    """At once, half of them one client's; they take room on the disk."""
    max_requests: int = 64
    """At work at once; more are refused for now (503)."""
    body_timeout_s: float = 10.0
    """For a body to come, beside a second for each 64 KiB of it."""
    timeout_s: float = 120.0
    """After it a request's work is ended (504)."""
    trace_memory_mib: int = 8192
    """Of the process that traces a model for the first time."""
    trace_processes: int = 1
    """Models that are traced at once."""
    poll_s: float = 2.0
    """How often the aliases are looked at."""

    def __repr__(self) -> str:
        return f"ServingSettings(snapshot={self.snapshot!r}, ...)"  # never the token
