"""The peer that needs no labels: PyTorch's FakeTensor estimate of memory, fitted by a line.

FakeTensor sums parameters and activations in fp32 without the context of the driver, so raw it is
45 % off on an A100. The fair peer is the fitted one: memory = c0 + c1 * estimate, with the least
absolute relative error, since some runs have workspace that no line explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from trappm.learner.estimator import Estimate, Model, Targets
from trappm.learner.paper.regressor import LEAST_LABELS, labelled
from trappm.learner.workload import Workload
from trappm.profiler.errors import InputError

Array = npt.NDArray[np.float64]

_ROUNDS = 50
_LEAST_ERROR = 1e-4
"""Reweightings of the line, and the least error that a weight is divided by: round numbers."""


@dataclass(frozen=True, eq=False)
class FakeTensorModel:
    """A line over the estimates."""

    estimates_mib: Mapping[Workload, float]
    coefficients: Array
    """Offset in MiB and factor (2)."""

    def predict(self, workloads: Sequence[Workload]) -> Estimate:
        return Estimate(_terms(self.estimates_mib, workloads) @ self.coefficients)


@dataclass(frozen=True, eq=False)
class FakeTensor:
    """Fits the line to FakeTensor's estimate of each workload."""

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
        """As `learner.estimator.Estimator`; two coefficients need no start.

        Raises:
            InputError: also where a workload has no estimate.
        """
        rows, values = labelled(workloads, targets)
        terms = _terms(self.estimates_mib, [workloads[i] for i in rows])
        weight = 1 / values
        # Iteratively reweighted least squares towards the least absolute relative error.
        for _ in range(_ROUNDS):
            fitted = np.linalg.lstsq(terms * weight[:, None], values * weight, rcond=None)[0]
            coefficients = fitted.astype(np.float64)
            error = np.abs(terms @ coefficients / values - 1)
            weight = 1 / (values * np.sqrt(np.maximum(error, _LEAST_ERROR)))
        return FakeTensorModel(self.estimates_mib, coefficients)


def _terms(estimates_mib: Mapping[Workload, float], workloads: Sequence[Workload]) -> Array:
    try:
        column = [estimates_mib[workload] for workload in workloads]
    except KeyError as error:
        raise InputError(
            "faketensor needs FakeTensor's estimate of every label; GPUMemNet's sheet has them"
        ) from error
    return np.column_stack([np.ones(len(column)), np.array(column, dtype=np.float64)])
