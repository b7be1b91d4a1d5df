"""When enough steps have been timed, and what follows from the samples. Needs no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from trappm.profiler.records import Protocol, StepSummary

_CHUNK = 4
"""Steps between two looks at the noise, at least: a look is a synchronisation on a GPU."""

_TRUSTED_HALF = 32
"""Of 64 independent normal samples, 3 % do not lower the error of their first half; of 16, 22 %."""


def sample(time_steps: Callable[[int], list[float]], protocol: Protocol) -> tuple[float, ...]:
    """Step times in milliseconds, until the protocol's rules are satisfied."""
    begin = time.monotonic()
    samples_ms = time_steps(protocol.min_steps)
    while (
        len(samples_ms) < protocol.max_steps
        and time.monotonic() - begin < protocol.max_seconds
        and relative_error(samples_ms) > protocol.target_relative_error
        and not has_stopped_falling(samples_ms)
    ):
        chunk = max(_CHUNK, len(samples_ms) // 4)
        samples_ms += time_steps(min(chunk, protocol.max_steps - len(samples_ms)))
    return tuple(samples_ms)


def relative_error(samples_ms: Sequence[float]) -> float:
    """Standard error of the median, relative to it; infinite for fewer than two samples.

    For n normal samples it is 1.2533 sigma / sqrt(n); sigma is taken from the interquartile range,
    which one slow step does not move.
    """
    if len(samples_ms) < 2:
        return math.inf
    low, median, high = np.percentile(samples_ms, (25, 50, 75))
    return float(1.2533 * (high - low) / 1.349 / math.sqrt(len(samples_ms)) / median)


def has_stopped_falling(samples_ms: Sequence[float]) -> bool:
    """Whether twice as many samples have not lowered the relative error of the median.

    Independent samples lower it by 1 / sqrt(2) for each doubling. Where it stays, the samples hang
    together (a drift, a clock that changes), and more of them would not make the median better.
    """
    half = len(samples_ms) // 2
    return half >= _TRUSTED_HALF and relative_error(samples_ms) >= relative_error(samples_ms[:half])


def summarize(
    samples_ms: tuple[float, ...], parts_ms: Sequence[Sequence[float]] = ()
) -> StepSummary:
    """Median, mean, interquartile range and 95th percentile of the samples.

    Args:
        parts_ms: of a few other steps: forward, backward, optimizer (n, 3). The median of each
            gives the shares; none, no shares.
    """
    low, median, high, p95 = (float(q) for q in np.percentile(samples_ms, (25, 50, 75, 95)))
    shares: list[float | None] = [None, None, None]
    if parts_ms:
        medians = np.median(parts_ms, axis=0)
        shares = [float(part) for part in medians / medians.sum()]
    return StepSummary(
        median_ms=median,
        mean_ms=float(np.mean(samples_ms)),
        iqr_ms=high - low,
        p95_ms=p95,
        forward_share=shares[0],
        backward_share=shares[1],
        optimizer_share=shares[2],
    )
