"""Number of steps to time, summary of their times, and verdict on a run.

An untrusted run ends as `unstable`: its samples are kept, and it never becomes a label. Imports no
torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trappm.profiler.records import Measurement, Outcome, Protocol, StepSummary, is_cpu_device
from trappm.profiler.steps.meter import Findings, MemoryReading, StepTime, Window

_CHUNK = 4
"""Smallest number of steps between two checks: a check is a synchronization on a GPU."""

_TRUSTED_HALF = 32
"""Half of the number of samples from which `has_stopped_falling` is reliable.

Of 64 independent normal samples, 3 % do not lower the error of their first half; of 16, 22 %.
"""


_MAX_BATCHES, _MIN_BATCHES, _MIN_IN_BATCH = 16, 4, 4

_PATIENCE = 2.0
"""Time to wait for undisturbed steps, as a multiple of `max_seconds`."""


@dataclass(frozen=True)
class StepSamples:
    """Times of the accepted steps, without the time lost to other programs."""

    times_ms: tuple[float, ...]
    rejected: int = 0
    """Number of steps that lost too much of their time."""
    lost_share: float = 0.0
    """Largest share of its wall time that an accepted step lost."""
    least_lost_share: float = 0.0
    """Smallest share of its wall time that a step that counts lost."""


def sample(time_steps: Callable[[int], list[float]], protocol: Protocol) -> tuple[float, ...]:
    """Return step times in milliseconds, until the protocol's rules are satisfied."""
    return sample_clean(lambda n: [StepTime(ms) for ms in time_steps(n)], protocol).times_ms


def sample_clean(
    time_steps: Callable[[int], list[StepTime]],
    protocol: Protocol,
    clock: Callable[[], float] = time.monotonic,
) -> StepSamples:
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
    return StepSamples(
        tuple(step.net_ms for step in clean),
        rejected=len(steps) - len(clean),
        lost_share=max(step.lost_share for step in clean),
        least_lost_share=min(step.lost_share for step in clean),
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


def relative_error_of_batches(samples_ms: Sequence[float]) -> float:
    """Return the relative standard error of the median by batch means, never below that above.

    Steps that wait for the host are correlated over many steps. The medians of consecutive batches
    differ by more than independent samples would (Law, "Confidence intervals in discrete event
    simulation", 1977).
    """
    independent = relative_error(samples_ms)
    batches = min(_MAX_BATCHES, len(samples_ms) // _MIN_IN_BATCH)
    if batches < _MIN_BATCHES:
        return independent
    medians = [np.median(batch) for batch in np.array_split(samples_ms, batches)]
    error = np.std(medians, ddof=1) / math.sqrt(batches) / np.median(samples_ms)
    return max(independent, float(error))


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


CONTENTION = "contention"
"""First word of the reason that other programs used the cores."""
NOISE = "noise"
"""First word of the reason that the interquartile range was too large."""
DRIFT = "drift"
"""First word of the reason that the two halves differed."""

_CONTENDED_SHARE = 0.05
"""Noise and drift count as contention if other programs used a larger share of the cores."""

_MAX_LOST_SHARE = 0.5
"""A step that lost more does not count, since the loss is an estimate."""

_DRIFT_SHARE = 0.5
"""Largest drift between the two halves, as a share of the bound on the interquartile range."""


@dataclass(frozen=True, kw_only=True)
class StepRun:
    """All observations of one run of the protocol."""

    samples: StepSamples
    window: Window
    steps_in_window: int
    memory: MemoryReading
    parts_ms: tuple[tuple[float, ...], ...] = ()
    """Forward with loss, backward, optimizer with zero_grad of a few more steps (n, 3)."""


def judge(run: StepRun, protocol: Protocol) -> Findings:
    """Return the findings of a run: `ok`, or `unstable` with the reasons."""
    samples, window, memory = run.samples, run.window, run.memory
    reasons = unstable_reasons(samples.times_ms, window, protocol, samples.lost_share)
    if samples.least_lost_share > protocol.unstable_lost_share:
        reasons.append(
            f"{CONTENTION}: others had its cores for {samples.least_lost_share:.0%} or more of "
            "every step"
        )
    missing = {**memory.missing, **window.missing}
    energy_j, energy_missing = window.energy_j, window.energy_missing
    timed = len(samples.times_ms) + samples.rejected
    if energy_j is not None and samples.rejected > protocol.unstable_lost_share * timed:
        energy_j = None
        energy_missing = f"others used the cores in {samples.rejected} of {timed} steps"
    error = relative_error_of_batches(samples.times_ms)
    if energy_missing is not None:
        missing |= dict.fromkeys(("power_w", "energy_j"), energy_missing)
    return Findings(
        outcome=Outcome.UNSTABLE if reasons else Outcome.OK,
        failed_in="measure" if reasons else None,
        message="; ".join(reasons) or None,
        step_samples_ms=samples.times_ms,
        step=summarize(samples.times_ms, run.parts_ms),
        memory_mib=memory.peak_mib,
        memory_detail_mib=memory.detail_mib,
        power_w=None if energy_j is None else energy_j / window.seconds,
        energy_j=None if energy_j is None else energy_j / run.steps_in_window,
        missing=missing,
        environment={
            **window.facts,
            "window_s": window.seconds,
            "steps_in_window": run.steps_in_window,
            "steps_rejected": samples.rejected,
            "lost_step_share": samples.lost_share,
            "step_time_relative_error": error if math.isfinite(error) else None,
            "memory_method": memory.method,
        },
    )


def unstable_reasons(
    samples_ms: Sequence[float], window: Window, protocol: Protocol, lost_step_share: float = 0.0
) -> list[str]:
    """Why the samples cannot be trusted; empty when they can.

    Args:
        samples_ms: Step times, without the time that steps lost to other programs.
        window: What happened while steps ran.
        protocol: Its bounds.
        lost_step_share: Largest share of its wall time that one of these steps lost.
    """
    reasons = list(window.disturbances)
    low, median, high = np.percentile(samples_ms, (25, 50, 75))
    bound = protocol.unstable_relative_iqr
    if high - low > bound * median:
        reasons.append(f"{NOISE}: the interquartile range is {(high - low) / median:.0%} of a step")
    if len(samples_ms) >= 8:
        half = len(samples_ms) // 2
        drift = (np.median(samples_ms[half:]) - np.median(samples_ms[:half])) / median
        if abs(drift) > bound * _DRIFT_SHARE:
            longer = "longer" if drift > 0 else "shorter"
            reasons.append(
                f"{DRIFT}: steps of the second half were {longer} by {abs(drift):.0%} of the median"
            )
    lost = window.lost_share
    if lost is not None and lost > protocol.unstable_lost_share:
        reasons.append(f"{CONTENTION}: others had its cores for {lost:.0%} of the time")
    if lost_step_share > max(_MAX_LOST_SHARE, protocol.unstable_lost_share):
        reasons.append(f"{CONTENTION}: others had its cores for {lost_step_share:.0%} of a step")
    return reasons


_BUSY_SHARE = 0.9
"""Smallest share of a step in which kernels of a busy GPU run.

On an H100 it is 0.94 to 1.00 where the interquartile range of steps is below 0.5 %, and at most
0.88 where it is 5 to 22 % (`examples/data/h100`).
"""


def waits_for_host(measurement: Measurement) -> bool:
    """Return whether the GPU of a label waited for launches, so its time depends on the host."""
    device_ms, step = measurement.environment.get("device_time_ms"), measurement.step
    if measurement.outcome is not Outcome.OK or device_ms is None or step is None:
        return False
    return bool(device_ms < _BUSY_SHARE * step.median_ms)


def of_two_processes(first: Measurement, again: Measurement) -> Measurement:
    """Return a measurement with the step times of two processes, and their difference as noise.

    Both processes have the same number of samples in it. Memory, power and energy are the first's.
    Without a second label the first stays as it is.
    """
    duration_s = first.duration_s + again.duration_s
    if again.outcome is not Outcome.OK or first.step is None or again.step is None:
        why = f"{again.outcome}: {again.message}"
        facts = {**first.environment, "second_process": why}
        return replace(first, duration_s=duration_s, environment=facts)
    count = min(len(first.step_samples_ms), len(again.step_samples_ms))
    samples_ms = (*first.step_samples_ms[-count:], *again.step_samples_ms[-count:])
    medians_ms = [first.step.median_ms, again.step.median_ms]
    # The standard error of the mean of two is half of their difference.
    between = abs(math.log(medians_ms[1] / medians_ms[0])) / 2
    error = max(between, first.environment["step_time_relative_error"] or 0.0)
    shares = {
        name: getattr(first.step, name)
        for name in ("forward_share", "backward_share", "optimizer_share")
    }
    summary = replace(summarize(samples_ms), **shares)
    rate = first.environment["samples_per_second"] * first.step.median_ms / summary.median_ms
    facts = {
        **first.environment,
        "process_medians_ms": medians_ms,
        "step_time_relative_error": error,
        "samples_per_second": rate,
    }
    return replace(
        first,
        step_samples_ms=samples_ms,
        step=summary,
        duration_s=duration_s,
        environment=facts,
    )


def is_contended(measurement: Measurement) -> bool:
    """Return whether a run on CPU cores was unstable because other programs used the cores.

    The run reported contention, or its steps were noisy or drifted while other programs used more
    than 5 % of the host's cores. Other reasons, such as skipped optimizer steps, do not count.
    """
    if measurement.outcome is not Outcome.UNSTABLE or not is_cpu_device(measurement.device):
        return False
    reasons = measurement.message or ""
    if f"{CONTENTION}:" in reasons:
        return True
    share = measurement.environment.get("others_cpu_share")
    is_unsteady = f"{NOISE}:" in reasons or f"{DRIFT}:" in reasons
    return is_unsteady and share is not None and share > _CONTENDED_SHARE
