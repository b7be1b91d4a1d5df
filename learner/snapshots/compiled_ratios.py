"""Step times under `torch.compile` relative to eager ones, from pairs of labels of a device.

A ratio is that of the fused kernels, with constants that start from those of the reference card, or
the median of the pairs: whichever is better on architectures that its pairs do not have.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from trappm.learner.physics.compiled_step import CompiledStep, reference_step, times_of_pairs
from trappm.learner.snapshots.manifest import CompiledRatio
from trappm.learner.workload import Array, CompiledPair, Workload
from trappm.profiler.records import Phase

LEAST_PAIRS = 3
"""Fewer pairs of a device and phase give no ratio of compiled to eager steps."""


def compiled_ratios(
    pairs: Sequence[CompiledPair], workloads: Mapping[str, Workload], groups: Mapping[str, str]
) -> tuple[dict[str, dict[Phase, CompiledRatio]], list[str]]:
    """Return ratios by device and phase, and a line about each with its held-out error.

    Args:
        pairs: Pairs for training, and held-out ones, which only judge.
        workloads: Steps by the id of their configuration.
        groups: Group that a configuration is held out with, by its id.
    """
    parts = defaultdict[tuple[str, Phase], list[CompiledPair]](list)
    for pair in pairs:
        parts[pair.device, pair.phase].append(pair)
    ratios = defaultdict[str, dict[Phase, CompiledRatio]](dict)
    lines = []
    for (device, phase), of_part in sorted(parts.items()):
        training = [pair for pair in of_part if not pair.is_held_out]
        held_out = [pair for pair in of_part if pair.is_held_out]
        if len(training) < LEAST_PAIRS:
            continue
        traced = [pair for pair in training if _is_traced(pair, workloads)]
        if len(traced) >= LEAST_PAIRS:
            training = traced
            held_out = [pair for pair in held_out if _is_traced(pair, workloads)]
        ratio = _ratio(training, workloads, np.array([groups[pair.eager] for pair in training]))
        ratios[device][phase] = ratio
        how = "fused kernels" if ratio.constants else "median"
        line = f"{device}: a compiled {phase} step takes {math.exp(ratio.log_ratio):.2f} times the "
        line += f"eager one (by the {how} of {ratio.pairs} pairs"
        if held_out:
            errors = np.abs(np.expm1(_predicted(ratio, held_out, workloads) - _measured(held_out)))
            line += f"; mean error {errors.mean():.0%} on {len(held_out)} held-out pairs"
        lines.append(f"{line})")
    return ratios, lines


def _is_traced(pair: CompiledPair, workloads: Mapping[str, Workload]) -> bool:
    return all(workloads[name].kernels is not None for name in (pair.eager, pair.compiled))


def _measured(pairs: Sequence[CompiledPair]) -> Array:
    """Return the logarithms of the measured ratios (n)."""
    return np.array([pair.log_ratio for pair in pairs])


def _times(
    pairs: Sequence[CompiledPair], workloads: Mapping[str, Workload]
) -> tuple[Array, Array] | None:
    """Return `times_of_pairs`; None if a step could not be traced."""
    if not all(_is_traced(pair, workloads) for pair in pairs):
        return None
    return times_of_pairs(
        [workloads[pair.eager] for pair in pairs], [workloads[pair.compiled] for pair in pairs]
    )


def _predicted(
    ratio: CompiledRatio, pairs: Sequence[CompiledPair], workloads: Mapping[str, Workload]
) -> Array:
    """Return the logarithms of predicted ratios (n)."""
    times = _times(pairs, workloads) if ratio.constants else None
    if times is None:
        return np.full(len(pairs), ratio.log_ratio)
    return CompiledStep(np.array(ratio.constants)).log_times(times[0]) - times[1]


def _ratio(
    pairs: Sequence[CompiledPair], workloads: Mapping[str, Workload], groups: npt.NDArray[np.str_]
) -> CompiledRatio:
    """Return the better ratio of n pairs, whose groups are held out in turn (n)."""
    measured, times = _measured(pairs), _times(pairs, workloads)
    if len(np.unique(groups)) == 1:  # then single pairs are held out
        groups = np.arange(len(pairs)).astype(np.str_)
    medians = [float(np.median(measured[groups != group])) for group in groups]
    of_medians = CompiledRatio.of(measured.tolist(), (measured - medians).tolist())
    if times is None:
        return of_medians
    parts, eager = times
    errors = np.empty(len(pairs))
    for group in np.unique(groups):
        out = groups == group
        step = reference_step().refit(parts[~out], (eager + measured)[~out])
        errors[out] = (eager + measured - step.log_times(parts))[out]
    step = reference_step().refit(parts, eager + measured)
    of_kernels = CompiledRatio.of(measured.tolist(), errors.tolist(), step.constants.tolist())
    return min(of_kernels, of_medians, key=lambda ratio: ratio.log_error)
