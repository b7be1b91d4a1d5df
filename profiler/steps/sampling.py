"""How many steps to time, and the summary of their times. Imports no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trappm.profiler.records import Protocol, StepSummary
from trappm.profiler.steps.meter import StepTime

_CHUNK = 4
"""Smallest number of steps between two checks: a check is a synchronization on a GPU."""

_TRUSTED_HALF = 32
"""Half of the number of samples from which `has_stopped_falling` is reliable.

Of 64 independent normal samples, 3 % do not lower the error of their first half; of 16, 22 %.
"""


_PATIENCE = 2.0
"""Time to wait for undisturbed steps, as a multiple of `max_seconds`."""


@dataclass(frozen=True)
class Samples:
    """Times of the accepted steps, without the time lost to other programs."""

    times_ms: tuple[float, ...]
    rejected: int = 0
    """Number of steps that lost too much of their time."""
    lost_share: float = 0.0
    """Largest share of its wall time that an accepted step lost."""


def sample(time_steps: Callable[[int], list[float]], protocol: Protocol) -> tuple[float, ...]:
    """Return step times in milliseconds, until the protocol's rules are satisfied."""
    return sample_clean(lambda n: [StepTime(ms) for ms in time_steps(n)], protocol).times_ms


def sample_clean(
    time_steps: Callable[[int], list[StepTime]],
    protocol: Protocol,
    clock: Callable[[], float] = time.monotonic,
) -> Samples:
    """Time steps until enough of them are undisturbed and the protocol's rules are satisfied.

    A step is undisturbed if it lost at most the protocol's `unstable_lost_share` of its time. If
    the time is up before there are `min_steps` of them, those with the smallest losses count.

    Args:
        time_steps: Runs this number of steps.
        protocol: Number of steps, time and precision.
        clock: Monotonic seconds.
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
    )


def relative_error(samples_ms: Sequence[float]) -> float:
    """Return the relative standard error of the median; infinite for fewer than two samples.

    For n normal samples it is 1.2533 sigma / sqrt(n); sigma comes from the interquartile range,
    which is robust to slow steps.
    """
    if len(samples_ms) < 2:
        return math.inf
    low, median, high = np.percentile(samples_ms, (25, 50, 75))
    return float(1.2533 * (high - low) / 1.349 / math.sqrt(len(samples_ms)) / median)


def has_stopped_falling(samples_ms: Sequence[float]) -> bool:
    """Return whether twice as many samples have not lowered the median's relative error.

    Independent samples lower it by 1 / sqrt(2) per doubling. Where it stays, samples are correlated
    (a drift, a changing clock), and more of them do not help.
    """
    half = len(samples_ms) // 2
    return half >= _TRUSTED_HALF and relative_error(samples_ms) >= relative_error(samples_ms[:half])


def summarize(
    samples_ms: tuple[float, ...], parts_ms: Sequence[Sequence[float]] = ()
) -> StepSummary:
    """Return median, mean, interquartile range and 95th percentile of the samples.

    Args:
        samples_ms: Step times.
        parts_ms: Forward, backward and optimizer of a few other steps (n, 3); none, no shares.
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
