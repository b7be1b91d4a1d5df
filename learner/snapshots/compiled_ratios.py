"""Step times under `torch.compile` relative to eager ones, from pairs of labels of a device.

A ratio is that of the fused kernels, with constants that start from those of the reference card, or
the median of the pairs: whichever is better on architectures that its pairs do not have. What is
left of the pairs of a family is added for the family.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trappm.learner.physics.compiled_step import (
    CompiledStep,
    family_offsets,
    reference_offsets,
    reference_step,
    times_of_pairs,
)
from trappm.learner.snapshots.manifest import CompiledRatio
from trappm.learner.workload import Array, CompiledPair, Workload
from trappm.profiler.models.families import family_of
from trappm.profiler.records import Phase

LEAST_PAIRS = 3
"""Fewer pairs of a device and phase give no ratio of compiled to eager steps."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of one device and phase (n)."""

    measured: Array
    """Logarithms of the measured ratios (n)."""
    architectures: npt.NDArray[np.str_]
    groups: npt.NDArray[np.str_]
    """Groups that are held out together (n)."""
    times: tuple[Array, Array] | None
    """The result of `times_of_pairs`; None if a step could not be traced."""

    @classmethod
    def of(
        cls,
        pairs: Sequence[CompiledPair],
        workloads: Mapping[str, Workload],
        architectures: Mapping[str, str],
        groups: Mapping[str, str],
    ) -> Pairs:
        steps = [(workloads[pair.eager], workloads[pair.compiled]) for pair in pairs]
        times = None
        if steps and all(step.kernels is not None for pair in steps for step in pair):
            eager, compiled = zip(*steps, strict=True)
            times = times_of_pairs(eager, compiled)
        return cls(
            np.array([pair.log_ratio for pair in pairs]),
            np.array([architectures[pair.eager] for pair in pairs]),
            np.array([groups[pair.eager] for pair in pairs]),
            times,
        )

    def __len__(self) -> int:
        return len(self.measured)

    @property
    def families(self) -> list[str]:
        return [family_of(name) for name in self.architectures.tolist()]

    def at(self, chosen: npt.NDArray[np.bool_]) -> Pairs:
        times = None if self.times is None else (self.times[0][chosen], self.times[1][chosen])
        return Pairs(self.measured[chosen], self.architectures[chosen], self.groups[chosen], times)

    def added(self, offsets: Mapping[str, float]) -> Array:
        """Return what is added to the ratio of each (n)."""
        return np.array([offsets.get(name, 0.0) for name in self.families])


def compiled_ratios(
    pairs: Sequence[CompiledPair],
    workloads: Mapping[str, Workload],
    architectures: Mapping[str, str],
    groups: Mapping[str, str],
) -> tuple[dict[str, dict[Phase, CompiledRatio]], list[str]]:
    """Return ratios by device and phase, and a line about each with its held-out error.

    Args:
        pairs: Pairs for training, and held-out ones, which only judge.
        workloads: Steps by the id of their configuration.
        architectures: Architectures by the id of a configuration.
        groups: Group that a configuration is held out with, by its id.
    """
    parts = defaultdict[tuple[str, Phase], list[CompiledPair]](list)
    for pair in pairs:
        parts[pair.device, pair.phase].append(pair)
    ratios = defaultdict[str, dict[Phase, CompiledRatio]](dict)
    lines = []
    for (device, phase), of_part in sorted(parts.items()):
        traced = [
            pair for pair in of_part
            if None not in (workloads[pair.eager].kernels, workloads[pair.compiled].kernels)
        ]  # fmt: skip
        are_enough = sum(not pair.is_held_out for pair in traced) >= LEAST_PAIRS
        training, held_out = (
            Pairs.of(
                [p for p in (traced if are_enough else of_part) if p.is_held_out == is_held_out],
                workloads, architectures, groups,
            )
            for is_held_out in (False, True)
        )  # fmt: skip
        if len(training) < LEAST_PAIRS:
            continue
        ratio = _ratio(training)
        ratios[device][phase] = ratio
        how = "fused kernels" if ratio.constants else "median"
        line = f"{device}: a compiled {phase} step takes {math.exp(ratio.log_ratio):.2f} times the "
        line += f"eager one (by the {how} of {ratio.pairs} pairs"
        if len(held_out):
            errors = np.abs(np.expm1(predicted(ratio, held_out) - held_out.measured))
            line += f"; mean error {errors.mean():.0%} on {len(held_out)} held-out pairs"
        lines.append(f"{line})")
    return ratios, lines


def predicted(ratio: CompiledRatio, pairs: Pairs) -> Array:
    """Return the logarithms of predicted ratios (n)."""
    logs = np.full(len(pairs), ratio.log_ratio)
    if ratio.constants and pairs.times is not None:
        parts, eager = pairs.times
        logs = CompiledStep(np.array(ratio.constants)).log_times(parts) - eager
    return logs + pairs.added(ratio.families)


def _ratio(pairs: Pairs) -> CompiledRatio:
    """Return the better ratio of pairs, whose groups are held out in turn."""
    if len(np.unique(pairs.groups)) == 1:  # then single pairs are held out
        pairs = Pairs(
            pairs.measured, pairs.architectures, np.arange(len(pairs)).astype(np.str_), pairs.times
        )
    fits = [_by_median] if pairs.times is None else [_by_median, _by_kernels]
    ratios = []
    for fit in fits:
        errors = np.empty(len(pairs))
        for group in np.unique(pairs.groups):
            out = pairs.groups == group
            unseen = pairs.at(out)
            errors[out] = unseen.measured - predicted(fit(pairs.at(~out)), unseen)
        ratio = fit(pairs)
        ratios.append(
            CompiledRatio.of(
                pairs.measured.tolist(), errors.tolist(), ratio.constants, ratio.families
            )
        )
    return min(ratios, key=lambda ratio: ratio.log_error)


def _by_median(pairs: Pairs) -> CompiledRatio:
    middle = float(np.median(pairs.measured))
    offsets = family_offsets(pairs.measured - middle, pairs.families)
    return CompiledRatio.of(pairs.measured.tolist(), [0.0] * len(pairs), (), offsets)


def _by_kernels(pairs: Pairs) -> CompiledRatio:
    """Return the ratio of the fused kernels, with the additions of the reference and its own."""
    assert pairs.times is not None  # noqa: S101  (the caller has asked)
    parts, eager = pairs.times
    known = reference_offsets()
    times = eager + pairs.measured - pairs.added(known)
    step = reference_step().refit(parts, times)
    own = family_offsets(times - step.log_times(parts), pairs.families)
    offsets = {name: known.get(name, 0.0) + own.get(name, 0.0) for name in {**known, **own}}
    return CompiledRatio.of(
        pairs.measured.tolist(), [0.0] * len(pairs), step.constants.tolist(), offsets
    )
