"""Whether the samples of a run can be trusted, decided from what was seen while they were taken.

A run that fails here ends as `unstable`: its samples are kept, and it never becomes a label.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from profiler.devices.base import Window
from profiler.records import Protocol

_DRIFT_SHARE = 0.5
"""Drift between the two halves may reach this share of the bound on the interquartile range."""


def unstable_reasons(samples_ms: Sequence[float], window: Window, protocol: Protocol) -> list[str]:
    """Why the samples cannot be trusted; empty when they can."""
    reasons = list(window.disturbances)
    low, median, high = np.percentile(samples_ms, (25, 50, 75))
    bound = protocol.unstable_relative_iqr
    if high - low > bound * median:
        reasons.append(f"noise: the interquartile range is {(high - low) / median:.0%} of a step")
    if len(samples_ms) >= 8:
        half = len(samples_ms) // 2
        drift = (np.median(samples_ms[half:]) - np.median(samples_ms[:half])) / median
        if abs(drift) > bound * _DRIFT_SHARE:
            reasons.append(f"drift: the second half of the steps took {drift:+.0%}")
    lost = window.lost_share
    if lost is not None and lost > protocol.unstable_lost_share:
        reasons.append(f"contention: others had its cores for {lost:.0%} of the time")
    return reasons
