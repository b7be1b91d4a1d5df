"""When enough steps have been timed, and what follows from the samples. Needs no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trappm.profiler.records import Protocol, StepSummary
from trappm.profiler.steps.meter import StepTime

_CHUNK = 4
"""Steps between two looks at the noise, at least: a look is a synchronisation on a GPU."""

_TRUSTED_HALF = 32
"""Of 64 independent normal samples, 3 % do not lower the error of their first half; of 16, 22 %."""


_PATIENCE = 2.0
"""Clean steps are waited for this many times longer than the protocol's `max_seconds`."""


@dataclass(frozen=True)
class Samples:
    """Times of the steps that count, without the time that they lost to other programs."""

    times_ms: tuple[float, ...]
    rejected: int = 0
    """Number of other steps, which lost too much of their time."""
    lost_share: float = 0.0
    """Largest share of its wall time that one of the steps that count lost."""
    least_lost_share: float = 0.0
    """Smallest such share."""


def sample(time_steps: Callable[[int], list[float]], protocol: Protocol) -> tuple[float, ...]:
    """Step times in milliseconds, until the protocol's rules are satisfied."""
    return sample_clean(lambda n: [StepTime(ms) for ms in time_steps(n)], protocol).times_ms


def sample_clean(
    time_steps: Callable[[int], list[StepTime]],
    protocol: Protocol,
    clock: Callable[[], float] = time.monotonic,
) -> Samples:
    """Time steps until enough of them are clean and the protocol's rules are satisfied.

    A step is clean if it lost at most the protocol's `unstable_lost_share` of its time. If the time
    is up before there are `min_steps` clean ones, those that lost the smallest shares count.

    Args:
        time_steps: Runs this number of steps.
        protocol: Number of steps, time and precision.
        clock: Seconds that never go backwards.
    """
    begin = clock()
    steps = time_steps(protocol.min_steps)
    while True:
        clean = [step for step in steps if step.lost_share <= protocol.unstable_lost_share]
        missing = protocol.min_steps - len(clean)
        seconds = clock() - begin
        if missing > 0:
            if seconds >= _PATIENCE * protocol.max_seconds:
                break
        else:
            times_ms = [step.net_ms for step in clean]
            if (
                len(clean) >= protocol.max_steps
                or seconds >= protocol.max_seconds
                or relative_error(times_ms) <= protocol.target_relative_error
                or has_stopped_falling(times_ms)
            ):
                break
        chunk = max(_CHUNK, missing, len(clean) // 4)
        steps += time_steps(min(chunk, protocol.max_steps - len(clean)))
    if missing > 0:
        bound = sorted(step.lost_share for step in steps)[protocol.min_steps - 1]
        clean = [step for step in steps if step.lost_share <= bound]
    return Samples(
        tuple(step.net_ms for step in clean),
        rejected=len(steps) - len(clean),
        lost_share=max(step.lost_share for step in clean),
        least_lost_share=min(step.lost_share for step in clean),
    )


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
