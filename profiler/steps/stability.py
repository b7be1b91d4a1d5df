"""The result of a run, and whether it can be trusted, by what was observed while it went on.

A run that fails here ends as `unstable`: its samples are kept, and it never becomes a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trappm.profiler.records import Measurement, Outcome, Protocol, is_cpu_device
from trappm.profiler.steps.meter import Findings, Window
from trappm.profiler.steps.sampling import summarize

if TYPE_CHECKING:
    from trappm.profiler.steps.step import StepRun

CONTENTION = "contention"
"""First word of the reason that other programs used the cores."""
NOISE = "noise"
"""First word of the reason that the interquartile range was too large."""
DRIFT = "drift"
"""First word of the reason that the two halves differed."""

_CONTENDED_SHARE = 0.05
"""Noise and drift are caused by other programs if these used more than this share of the cores."""

_MOST_LOST_SHARE = 0.5
"""A step that lost more than this share does not count, since the loss is an estimate."""

_DRIFT_SHARE = 0.5
"""Drift between the two halves may reach this share of the bound on the interquartile range."""


def judge(run: StepRun, protocol: Protocol) -> Findings:
    """What a finished run of the protocol found: `ok`, or `unstable` with the reasons."""
    reasons = unstable_reasons(run.samples_ms, run.window, protocol, run.lost_step_share)
    if run.least_lost_step_share > protocol.unstable_lost_share:
        reasons.append(
            f"{CONTENTION}: others had its cores for {run.least_lost_step_share:.0%} or more of "
            "every step"
        )
    window, memory = run.window, run.memory
    missing = {**memory.missing, **window.missing}
    energy_j, energy_missing = window.energy_j, window.energy_missing
    timed = len(run.samples_ms) + run.rejected_steps
    if energy_j is not None and run.rejected_steps > protocol.unstable_lost_share * timed:
        energy_j = None
        energy_missing = f"others used the cores in {run.rejected_steps} of {timed} steps"
    if energy_missing is not None:
        missing |= dict.fromkeys(("power_w", "energy_j"), energy_missing)
    return Findings(
        outcome=Outcome.UNSTABLE if reasons else Outcome.OK,
        failed_in="measure" if reasons else None,
        message="; ".join(reasons) or None,
        step_samples_ms=run.samples_ms,
        step=summarize(run.samples_ms, run.parts_ms),
        memory_mib=memory.peak_mib,
        memory_detail_mib=memory.detail_mib,
        power_w=None if energy_j is None else energy_j / window.seconds,
        energy_j=None if energy_j is None else energy_j / run.steps_in_window,
        missing=missing,
        environment={
            **window.facts,
            "window_s": window.seconds,
            "steps_in_window": run.steps_in_window,
            "steps_rejected": run.rejected_steps,
            "lost_step_share": run.lost_step_share,
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
    if lost_step_share > max(_MOST_LOST_SHARE, protocol.unstable_lost_share):
        reasons.append(f"{CONTENTION}: others had its cores for {lost_step_share:.0%} of a step")
    return reasons


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
