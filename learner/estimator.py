"""The interface of every predictor, ours and the published ones: one bench trains and judges all.

An estimator is the recipe, what it fits is the model: for one metric on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trappm.learner.workload import Workload

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Targets:
    """The labels of one metric on one device for n workloads."""

    values: Array
    """In the metric's unit (n); NaN where the run died of a limit and only a bound is known."""
    above: Array
    """Lower bounds for those (n), in the same unit; NaN elsewhere."""
    groups: Sequence[str]
    """The architecture of each (n): folds never divide one."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """Predictions of a model for n workloads, in the metric's unit, each (n)."""

    median: Array
    low: Array | None = None
    """Bounds of the 90 % interval, where the model knows one."""
    high: Array | None = None
    log_quantiles: Array | None = None
    """Of log(value), at `learner.stats.calibration.LEVELS` (n, levels): the whole distribution."""
    log_std: Array | None = None
    """Deviation of log(value)."""
    log_std_of_mean: Array | None = None
    """The part of it that more labels can remove."""
    outside: npt.NDArray[np.bool_] | None = None
    """Whether the workload is unlike everything that the model was fitted on."""
    labels_end: Array | None = None
    """The least or largest label, where the median lies far beyond it; NaN elsewhere."""


class Model(Protocol):
    """A fitted predictor of one metric on one device."""

    def predict(self, workloads: Sequence[Workload]) -> Estimate: ...


class Estimator(Protocol):
    """A recipe that fits models."""

    @property
    def name(self) -> str: ...

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> Model:
        """Fits a model, from scratch or from that of another device (`start`).

        Raises:
            InputError: too few labels, shapes that differ, or values that are not positive.
        """
        ...
