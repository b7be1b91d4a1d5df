"""Baselines that stand on a simulation: physics alone, and PyTorch's FakeTensor estimate.

Physics alone is our head without its residual. FakeTensor sums parameters and activations in fp32
without the context of the driver, so it is 45 % off on an A100. The fair peer is a fitted line:
memory = c0 + c1 * estimate, with the least absolute relative error, since some runs have workspace
that no line explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from research.held_out import Array, robust_line
from trappm.learner.estimator import Estimate, Model, Targets
from trappm.learner.paper.regressor import LEAST_LABELS, labelled
from trappm.learner.physics.prior import Prior
from trappm.learner.workload import Workload
from trappm.profiler.errors import InputError

FLOOR = 1e-4
"""Smallest relative error that weights of FakeTensor's line are divided by."""


@dataclass(frozen=True, eq=False)
class PriorModel:
    """A prior with fitted constants."""

    prior: Prior

    def predict(self, workloads: Sequence[Workload]) -> Estimate:
        return Estimate(np.exp(self.prior.log_values(workloads)))


@dataclass(frozen=True, eq=False)
class PriorAlone:
    """Fit of a prior's constants and nothing else; it needs no labels."""

    prior: Prior
    name: str = "prior"

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> PriorModel:
        """Fit as `learner.estimator.Estimator`; from another device's constants with a start.

        Raises:
            InputError: The start is of another method.
        """
        if start is not None and not isinstance(start, PriorModel):
            raise InputError(f"{self.name} cannot start from a {type(start).__name__}")
        centre = self.prior if start is None else self.prior.started_from(start.prior)
        fitted = centre.refit(
            workloads,
            np.log(targets.values),
            log_above=np.log(targets.above),
            tightness=1.0 if start is None else centre.transfer_tightness,
        )
        return PriorModel(fitted)


@dataclass(frozen=True, eq=False)
class FakeTensorModel:
    """A line over the estimates, with offset in MiB and factor, shape (2,)."""

    estimates_mib: Mapping[Workload, float]
    coefficients: Array

    def predict(self, workloads: Sequence[Workload]) -> Estimate:
        offset, factor = self.coefficients
        return Estimate(offset + factor * _column(self.estimates_mib, workloads))


@dataclass(frozen=True, eq=False)
class FakeTensor:
    """Fit of the line to FakeTensor's estimate of each workload."""

    estimates_mib: Mapping[Workload, float]
    name: str = "faketensor"
    least_labels: ClassVar[int] = LEAST_LABELS

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> FakeTensorModel:
        """Fit as `learner.estimator.Estimator`; two coefficients need no start.

        Raises:
            InputError: There are too few labels, or a workload has no estimate.
        """
        rows, logs = labelled(workloads, targets)
        estimates = _column(self.estimates_mib, [workloads[i] for i in rows])
        return FakeTensorModel(self.estimates_mib, robust_line(estimates, np.exp(logs), FLOOR))


def _column(estimates_mib: Mapping[Workload, float], workloads: Sequence[Workload]) -> Array:
    try:
        return np.array([estimates_mib[workload] for workload in workloads], dtype=np.float64)
    except KeyError as error:
        raise InputError(
            "faketensor needs FakeTensor's estimate of every label; GPUMemNet's sheet has them"
        ) from error
