"""Figures of a campaign as Ray's metrics, which Prometheus and Ray's dashboard read.

Ray exports each under the prefix `ray_`, on the metrics port of the campaign's node.

Import this module inside `with ray_runtime(...)` only (see there).
"""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

COUNTERS = {
    "labels": "Measurements that gave a label.",
    "failures": "Attempts that the step itself failed.",
    "losses": "Attempts whose worker or node was lost or faulty.",
}
GAUGES = {
    "queue": "Assignments that wait for a worker.",
    "workers": "Workers that have joined.",
    "busy_share": "Share of the workers that are at work.",
}


class CampaignMetrics:
    """Metrics `trappm_labels_total`, `trappm_queue` ... of one campaign, by device."""

    def __init__(self, campaign_id: str) -> None:
        tags = ("campaign", "device")
        self._counters = {
            name: Counter(f"trappm_{name}_total", description=text, tag_keys=tags)
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(f"trappm_{name}", description=text, tag_keys=tags)
            for name, text in GAUGES.items()
        }
        self._campaign_id = campaign_id

    def __call__(self, name: str, device: str, value: float) -> None:
        """Add to a counter, or set a gauge."""
        tags = {"campaign": self._campaign_id, "device": device}
        if name in self._counters:
            self._counters[name].inc(value, tags=tags)
        else:
            self._gauges[name].set(value, tags=tags)
