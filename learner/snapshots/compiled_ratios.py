"""Step times under `torch.compile` relative to eager ones, from pairs of labels of a device.

A ratio is that of the fused kernels, with constants that start from those of the reference card, or
the median of the pairs: whichever is better on architectures that its pairs do not have. What is
left of the pairs of a family is added for the family.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trappm.learner.interface import Array, CompiledPair, Workload
from trappm.learner.physics.compiled_step import (
    CompiledStep,
    family_offsets,
    reference_offsets,
    reference_step,
    times_of_pairs,
)
from trappm.learner.snapshots.manifest import CompiledRatio
from trappm.profiler.records import Phase

MIN_PAIRS = 3
"""Fewer pairs of a device and phase give no ratio of compiled to eager steps."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of one device and phase (n)."""

    measured: Array
    """Logarithms of the measured ratios (n)."""
    families: npt.NDArray[np.str_]
    """Families of their architectures (n)."""
    groups: npt.NDArray[np.str_]
    """Groups that are held out together (n)."""
    times: tuple[Array, Array] | None
    """The result of `times_of_pairs`; None if a step could not be traced."""

    @classmethod
    def of(
        cls,
        pairs: Sequence[CompiledPair],
        workloads: Mapping[str, Workload],
        families: Mapping[str, str],
        groups: Mapping[str, str],
    ) -> Pairs:
        steps = [(workloads[pair.eager], workloads[pair.compiled]) for pair in pairs]
        times = None
        if steps and all(step.kernels is not None for pair in steps for step in pair):
            eager, compiled = zip(*steps, strict=True)
            times = times_of_pairs(eager, compiled)
        return cls(
            np.array([pair.log_ratio for pair in pairs]),
            np.array([families[pair.eager] for pair in pairs]),
            np.array([groups[pair.eager] for pair in pairs]),
            times,
        )

    def __len__(self) -> int:
        return len(self.measured)

    def at(self, chosen: npt.NDArray[np.bool_]) -> Pairs:
        times = None if self.times is None else (self.times[0][chosen], self.times[1][chosen])
        return Pairs(self.measured[chosen], self.families[chosen], self.groups[chosen], times)

    def offsets_of(self, offsets: Mapping[str, float]) -> Array:
        """Return what is added to the ratio of each (n)."""
        return np.array([offsets.get(name, 0.0) for name in self.families.tolist()])


def fit_compiled_ratios(
    pairs: Sequence[CompiledPair],
    workloads: Mapping[str, Workload],
    families: Mapping[str, str],
    groups: Mapping[str, str],
) -> tuple[dict[str, dict[Phase, CompiledRatio]], list[str]]:
    """Return ratios by device and phase, and a line about each with its held-out error.

    Args:
        pairs: Pairs for training, and held-out ones, which only judge.
        workloads: Steps by the id of their configuration.
        families: Families of architectures by the id of a configuration.
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
        are_enough = sum(not pair.is_held_out for pair in traced) >= MIN_PAIRS
        training, held_out = (
            Pairs.of(
                [p for p in (traced if are_enough else of_part) if p.is_held_out == is_held_out],
                workloads, families, groups,
            )
            for is_held_out in (False, True)
        )  # fmt: skip
        if len(training) < MIN_PAIRS:
            continue
        ratio = better_ratio(training)
        ratios[device][phase] = ratio
        how = "fused kernels" if ratio.constants else "median"
        line = f"{device}: a compiled {phase} step takes {math.exp(ratio.log_ratio):.2f} times the "
        line += f"eager one (by the {how} of {ratio.pairs} pairs"
        if len(held_out):
            errors = np.abs(np.expm1(predict_ratios(ratio, held_out) - held_out.measured))
            line += f"; mean error {errors.mean():.0%} on {len(held_out)} held-out pairs"
        lines.append(f"{line})")
    return ratios, lines


def predict_ratios(ratio: CompiledRatio, pairs: Pairs) -> Array:
    """Return the logarithms of predicted ratios (n)."""
    logs = np.full(len(pairs), ratio.log_ratio)
    if ratio.constants and pairs.times is not None:
        parts, eager = pairs.times
        logs = CompiledStep(np.array(ratio.constants)).log_times(parts) - eager
    return logs + pairs.offsets_of(ratio.families)


def better_ratio(pairs: Pairs) -> CompiledRatio:
    """Return the ratio with the smaller bound of errors, of two or more pairs."""
    fits = [by_median] if pairs.times is None else [by_median, by_kernels]
    ratios = [
        fit(pairs).model_copy(update={"log_error": _bound(held_out_errors(pairs, fit))})
        for fit in fits
    ]
    return min(ratios, key=lambda ratio: ratio.log_error)


def held_out_errors(pairs: Pairs, fit: Callable[[Pairs], CompiledRatio]) -> Array:
    """Return measured less predicted logarithms, each by pairs of the other groups (n).

    If all pairs are one group, each is held out alone.
    """
    groups = pairs.groups
    if len(np.unique(groups)) == 1:
        groups = np.arange(len(pairs)).astype(np.str_)
    errors = np.empty(len(pairs))
    for group in np.unique(groups):
        out = groups == group
        unseen = pairs.at(out)
        errors[out] = unseen.measured - predict_ratios(fit(pairs.at(~out)), unseen)
    return errors


def _bound(errors: Array) -> float:
    """Return the bound of a further error with 90 % probability, by Student's t."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    return float(stdtrit(len(errors) - 1, 0.95) * np.sqrt((errors**2).mean()))


def by_median(pairs: Pairs) -> CompiledRatio:
    """Return the median of the pairs, with additions by family; its errors are not judged."""
    middle = float(np.median(pairs.measured))
    return CompiledRatio(
        log_ratio=middle,
        log_error=0.0,
        pairs=len(pairs),
        families=family_offsets(pairs.measured - middle, pairs.families.tolist()),
    )


def by_kernels(pairs: Pairs) -> CompiledRatio:
    """Return the ratio of the fused kernels, with additions of the reference and of the pairs."""
    assert pairs.times is not None  # noqa: S101  (the caller has asked)
    parts, eager = pairs.times
    known = reference_offsets()
    times = eager + pairs.measured - pairs.offsets_of(known)
    step = reference_step().refit(parts, times)
    own = family_offsets(times - step.log_times(parts), pairs.families.tolist())
    return CompiledRatio(
        log_ratio=float(np.median(pairs.measured)),
        log_error=0.0,
        pairs=len(pairs),
        constants=tuple(step.constants.tolist()),
        families={name: known.get(name, 0.0) + own.get(name, 0.0) for name in {**known, **own}},
    )
