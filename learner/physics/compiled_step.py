"""Step time under `torch.compile`: the fused kernels with the constants of the eager step.

What eager labels do not show has a few constants of its own here: how fast fused kernels are
relative to eager ones, what another layout is worth to a convolution, and how long the host takes
per kernel. The ratio of a compiled to an eager step is that of a reference card with such pairs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trappm.learner.interface import Array, Workload
from trappm.learner.physics.step_time import (
    MIN_MS,
    PASSES,
    PRODUCT_KINDS,
    SHARPNESS,
    Lookup,
    StepTimePrior,
    terms_of,
    times_of,
)
from trappm.profiler.devices.catalogue import read_name, spec_of
from trappm.profiler.records import Phase, Precision
from trappm.profiler.traced_step import KernelKind

PARTS = (
    "pixel",
    "dense",
    "grouped",
    "depthwise",
    "other products",
    "pointwise",
    "strided",
    "norm",
    "reduction",
    "host",
    "step",
)
"""Parts of a step with a constant each: the logarithm of their time relative to the eager prior."""
SPREAD = 0.15
"""Deviation of each constant before any label; a round number."""
_AT = {part: at for at, part in enumerate(PARTS)}
"""Column of each part."""
_STREAM_PARTS = {
    KernelKind.ELEMENTWISE: "pointwise",
    KernelKind.BATCH_NORM: "pointwise",
    KernelKind.LAYER_NORM: "norm",
    KernelKind.SOFTMAX: "norm",
    KernelKind.REDUCTION: "reduction",
}
"""Part by kind of a memory-bound kernel; others are strided."""


def part_times(prior: StepTimePrior, workloads: Sequence[Workload]) -> Array:
    """Return the time of each of `PARTS` in ms, with the constants of eager steps (n, parts).

    Args:
        prior: Prior of the eager steps of a card without pairs.
        workloads: Steps with fused kernels (n).
    """
    terms = terms_of(workloads, prior.spec)
    with torch.no_grad():
        times = times_of(terms, Lookup(prior.constants), prior.spec)
    result = torch.zeros(len(workloads), len(PARTS), dtype=torch.float64)
    kinds = terms.products.base // PASSES
    is_last = (terms.products.last > 0) & (kinds <= KernelKind.DEPTHWISE)
    places = torch.where(is_last, kinds, _AT["other products"])
    result.index_put_((terms.products.owner, places), times.products, accumulate=True)
    of_kind = torch.tensor(
        [_AT[_STREAM_PARTS.get(k, "strided")] for k in KernelKind if k >= PRODUCT_KINDS]
    )
    places = of_kind[terms.streams.kind]
    result.index_put_((terms.streams.owner, places), times.streams, accumulate=True)
    result[:, _AT["host"]], result[:, _AT["step"]] = times.host, times.step
    values: Array = result.numpy()
    return values


@dataclass(frozen=True, eq=False)
class CompiledStep:
    """Constants of compiled steps, the same for all cards."""

    constants: Array
    """Logarithms by part (parts)."""

    @classmethod
    def unknown(cls) -> CompiledStep:
        return cls(np.zeros(len(PARTS)))

    def log_times(self, parts: Array) -> Array:
        """Return the logarithm of the step time in ms (n) from times by part (n, parts)."""
        scaled = parts * np.exp(self.constants)
        host, step = scaled[:, _AT["host"]], scaled[:, _AT["step"]]
        both = np.stack([scaled[:, : _AT["host"]].sum(1), host]).clip(min=MIN_MS)
        busy = np.exp(np.logaddexp(*(SHARPNESS * np.log(both))) / SHARPNESS)
        values: Array = np.log(busy + step)
        return values

    def refit(self, parts: Array, log_values: Array) -> CompiledStep:
        """Return the most probable constants for labelled steps; their prior is centered here."""
        from scipy.optimize import least_squares  # type: ignore[import-untyped]

        def errors(constants: Array) -> Array:
            off = CompiledStep(constants).log_times(parts) - log_values
            return np.concatenate([off / 0.05, (constants - self.constants) / SPREAD])

        fitted = least_squares(errors, self.constants, loss="soft_l1")
        return CompiledStep(fitted.x)


FILE = Path(__file__).with_name("compiled_step.safetensors")
"""Reference: constants of an RTX 4090's eager steps and of its compiled ones, from timm's published
pairs (Apache-2.0; docs/research/step_time.md)."""
REFERENCE = "rtx-4090"
RATIO_90 = {Phase.INFER: 0.20, Phase.TRAIN: 0.37}
"""Bound of the ratio's logarithmic error that 90 % of the steps on a card without compiled labels
keep: of held-out architectures in inference, and of an A100's published steps in training."""

MEMORY_BELOW_90 = 0.25
"""Logarithm by which the memory of a compiled step may lie below that of the eager step.

Twelve published pairs of training steps lie 3 to 22 % below it, and none above it
(docs/research/step_time.md).
"""


def has_own_ratio(card: str, precision: Precision, phase: Phase) -> bool:
    """Return whether compiled steps follow the card's own constants, not the reference's.

    In fp32 inference, other cards than the reference divide the time differently: without tensor
    cores in products, arithmetic has a larger share. It was judged on V100, T4 and A100.
    """
    is_fp32 = precision in (Precision.FP32, Precision.FP32_STRICT)
    return is_fp32 and phase is Phase.INFER and read_name(card).model != REFERENCE


def log_ratio(
    eager: Workload,
    compiled: Workload,
    family: str | None = None,
    constants: Sequence[float] = (),
    offsets: Mapping[str, float] | None = None,
    prior: StepTimePrior | None = None,
) -> float:
    """Return the logarithm of the compiled step's time relative to the eager step's.

    It is that of the reference card: how a card's time divides into parts matters more than its
    speed, and its eager labels hardly show it. See `has_own_ratio` for the exception.

    Args:
        eager, compiled: The same step in both ways.
        family: Family of the architecture; None if it has no name.
        constants: Logarithms by part, from pairs of a device (default: those of the reference).
        offsets: Additions by family (default: those of the reference).
        prior: Prior of the eager steps of a card with a ratio of its own, and without pairs.
    """
    if prior is not None:
        own = part_times(prior, [compiled])
        return float(full_step().log_times(own)[0] - prior.log_values([eager])[0])
    parts, log_eager = times_of_pairs([eager], [compiled])
    step = CompiledStep(np.array(constants)) if constants else reference_step()
    known = reference_offsets() if offsets is None else offsets
    return float(step.log_times(parts)[0] - log_eager[0]) + known.get(family or "", 0.0)


def times_of_pairs(eager: Sequence[Workload], compiled: Sequence[Workload]) -> tuple[Array, Array]:
    """Return times of n pairs on the reference card, by its eager constants.

    Returns:
        The compiled steps by part in ms (n, parts), and the logarithms of the eager steps (n).
    """
    prior = _reference()[0]
    return part_times(prior, compiled), prior.log_values(eager)


def family_offsets(errors: Array, families: Sequence[str]) -> dict[str, float]:
    """Return what predicted logarithms lack by family of architectures.

    It is the median of the family's n errors, times n / (n + 1), as one pair says little.

    Args:
        errors: Measured less predicted logarithms (n).
        families: Family of each (n).
    """
    of_family: dict[str, list[float]] = defaultdict(list)
    for family, error in zip(families, errors.tolist(), strict=True):
        of_family[family].append(error)
    return {
        family: float(np.median(known)) * len(known) / (len(known) + 1)
        for family, known in of_family.items()
    }


def reference_step() -> CompiledStep:
    """Return the constants of compiled steps of the reference card."""
    return _reference()[1]


def full_step() -> CompiledStep:
    """Return the constants of compiled steps in fp32, whose convolutions keep their layout.

    Constants of convolutions in 16 bits are those of contiguous tensors, which inductor changes to
    channels-last.
    """
    constants = reference_step().constants.copy()
    constants[list(range(_AT["other products"]))] = 0.0
    return CompiledStep(constants)


def reference_offsets() -> Mapping[str, float]:
    """Return the reference's additions by family."""
    return _reference()[2]


def save_reference(prior: StepTimePrior, step: CompiledStep, offsets: Mapping[str, float]) -> None:
    """Write the constants of the reference card."""
    tensors = {
        "eager": prior.constants,
        "compiled": torch.from_numpy(step.constants),
        "families": torch.tensor(list(offsets.values()), dtype=torch.float64),
    }
    save_file(tensors, FILE, metadata={"families": json.dumps(list(offsets))})


@cache
def _reference() -> tuple[StepTimePrior, CompiledStep, Mapping[str, float]]:
    with safe_open(FILE, "pt") as file:
        eager, compiled, values = (
            file.get_tensor(name) for name in ("eager", "compiled", "families")
        )
        families = json.loads(file.metadata()["families"])
    offsets = dict(zip(families, values.tolist(), strict=True))
    prior = StepTimePrior(spec_of(REFERENCE), eager)
    return prior, CompiledStep(compiled.numpy()), offsets
