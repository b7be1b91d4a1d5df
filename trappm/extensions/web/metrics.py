"""Prometheus metrics: requests, durations, traces, and active snapshots."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Metrics of one application, separate from other applications in the process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "trappm_requests", "Requests answered.", ("route", "status"), registry=self._registry
        )
        self.seconds = Histogram(
            "trappm_request_seconds",
            "Request duration from the first byte to the last.",
            ("route",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "trappm_requests_in_flight", "Requests being answered.", registry=self._registry
        )
        self.known = Counter(
            "trappm_known_answers", "Predictions served from the cache.", registry=self._registry
        )
        self.traces = Counter(
            "trappm_traces",
            "Models traced, for new profiles or an estimate.",
            ("outcome",),
            registry=self._registry,
        )
        self.reloads = Counter(
            "trappm_reloads", "Snapshot reloads.", ("outcome",), registry=self._registry
        )
        self._snapshots = Gauge("trappm_snapshot", "1 if active.", ("id",), registry=self._registry)

    def answering(self, ids: Iterable[str]) -> None:
        """Set the active snapshots."""
        self._snapshots.clear()
        for snapshot_id in ids:
            self._snapshots.labels(snapshot_id).set(1)

    @contextlib.contextmanager
    def trace(self) -> Iterator[None]:
        """Count a trace by its outcome, `done` or `failed`."""
        outcome = "failed"
        try:
            yield
            outcome = "done"
        finally:
            self.traces.labels(outcome).inc()

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self._registry)
