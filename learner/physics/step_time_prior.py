"""Physical prior of step times: kernels one by one, with constants of the device.

`kernel_times` has the formula. Its constants start from a specification sheet, so the prior
predicts without labels. A new device starts from another's constants: the share of the peak that a
kernel reaches is similar, the peaks are not. docs/research/step_time.md has the reason for
each term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from trappm.learner.physics.device_fit import DeviceFit
from trappm.learner.physics.device_specs import DeviceSpec
from trappm.learner.physics.kernel_times import (
    SHARE_GROUPS,
    Lookup,
    chunks_of,
    linear,
    log_times,
    spreads,
    starting_constants,
    times_of,
)
from trappm.learner.physics.prior import Prior
from trappm.learner.stats.folds import drawn_rows
from trappm.learner.workload import Array, Workload

# The form of the fit was chosen on folds of all published rows of step times
# (docs/research/step_time.md). Round numbers.
MANY_LABELS = 300
"""Number of labels from which spreads are not learned again without a fold: with fewer, errors on
the fold would look too small."""
MOST_LABELS = 1500
"""Largest number of labels for the constants; more only help the residual."""


class StepTimePrior(Prior):
    """Simulated time of a step in ms."""

    def __init__(
        self,
        spec: DeviceSpec,
        constants: Tensor | None = None,
        learned_spreads: Tensor | None = None,
        between: Tensor | None = None,
    ) -> None:
        """Set up the prior; `tensors` stores spec and constants only.

        Args:
            spec: Specification of the device.
            constants: Constants (c; default: those without labels).
            learned_spreads: Spreads of the constants that labels taught (c).
            between: Spreads of the constants between devices (c), if they are another device's.
        """
        self.spec = spec
        self.constants = starting_constants() if constants is None else constants
        self.learned_spreads = learned_spreads
        self.between = between

    def started_from(self, other: Self) -> Self:
        """Return this device with the constants of another, relative to its specification."""
        return type(self)(self.spec, other.constants, between=self.between)

    @property
    def feature_groups(self) -> tuple[int, ...]:
        return SHARE_GROUPS

    def log_values(self, workloads: Sequence[Workload]) -> Array:
        if not len(workloads):
            return np.zeros(0)
        values: Array = log_times(
            chunks_of(workloads, self.spec), self.constants, self.spec
        ).numpy()
        return values

    def logs_and_features(self, workloads: Sequence[Workload]) -> tuple[Array, Array]:
        if not len(workloads):
            return np.zeros(0), np.zeros((0, sum(self.feature_groups)))
        with torch.no_grad():
            chunks = [
                (times.total().log(), times.shares(terms))
                for terms in chunks_of(workloads, self.spec)
                for times in [times_of(terms, Lookup(self.constants), self.spec)]
            ]
        logs, features = (torch.cat(parts).numpy() for parts in zip(*chunks, strict=True))
        return logs, features

    def refit(
        self,
        workloads: Sequence[Workload],
        log_values: Array,
        *,
        log_above: Array | None = None,
        tightness: float = 1.0,
        near: Self | None = None,
    ) -> Self:
        """Return the most probable constants: Student-t errors of the logarithm, Gaussian priors.

        With fewer than `MANY_LABELS`, constants of another device move as far as devices differ.
        Otherwise the spread of each group is learned, too; with `MANY_LABELS` it is that of `near`.
        Lower bounds (`log_above`) hardly constrain a time and are unused.
        """
        known = np.flatnonzero(np.isfinite(log_values))
        if not len(known):
            return self
        is_few = len(known) < MANY_LABELS
        if len(known) > MOST_LABELS:
            known = known[drawn_rows(len(known), MOST_LABELS)]
        learned = near.learned_spreads if near is not None and not is_few else None
        given = self.between if is_few else learned
        fit = DeviceFit(
            chunks_of([workloads[i] for i in known.tolist()], self.spec),
            log_values[known],
            self.spec,
            centre=self.constants,
            spreads=spreads(tightness) if given is None else given,
            learns=given is None,
        )
        if is_few and self.between is not None:
            return type(self)(self.spec, fit.constants, between=self.between)
        return type(self)(self.spec, fit.constants, fit.spreads)

    def pass_share(self, workloads: Sequence[Workload]) -> Array:
        """Return the share of a training step that its forward and backward pass take (n).

        What a step waits for once is not repeated, either.
        """
        with torch.no_grad():
            chunks = chunks_of(workloads, self.spec)
            times = [times_of(terms, Lookup(self.constants), self.spec) for terms in chunks]
            shares = [each.passes() / each.total() for each in times]
        values: Array = torch.cat(shares).numpy()
        return values

    def sensitivities(self, workloads: Sequence[Workload]) -> Array:
        if not len(workloads):
            return np.zeros((0, len(self.constants)))
        _, jacobian = linear(chunks_of(workloads, self.spec), self.constants, self.spec)
        deviations = spreads(1.0) if self.between is None else self.between
        values: Array = (jacobian * deviations).numpy()
        return values

    def tensors(self) -> dict[str, Tensor]:
        numbers = [0.0 if value is None else value for value in asdict(self.spec).values()]
        spec = torch.tensor(numbers, dtype=torch.float64)
        return {"constants": self.constants.clone(), "spec": spec}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        constants, spec = tensors["constants"], tensors["spec"].tolist()
        if constants.shape != starting_constants().shape or len(spec) != len(fields(DeviceSpec)):
            raise ValueError(
                f"{tuple(constants.shape)} constants and {len(spec)} numbers of a spec"
            )
        *others, tf32 = spec
        if not constants.isfinite().all() or min(others) <= 0 or not tf32 >= 0:
            raise ValueError("constants that are not finite, or a spec that is not positive")
        read = DeviceSpec(*others)
        read = replace(read, units=round(read.units), tf32_tflops=tf32 or None)
        return cls(read, constants.double())
