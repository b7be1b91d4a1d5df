"""Interface of all predictors, built-in and published, for one metric on one device.

An estimator fits a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from trappm.learner.workload import Array, BoolArray, Workload

if TYPE_CHECKING:
    from torch import Tensor


LEAST_LEFT = 0.1
"""Least share of an estimate that is left without a constant part; a round number."""


@dataclass(frozen=True, eq=False)
class Targets:
    """Labels of one metric on one device for n workloads."""

    values: Array
    """Values in the metric's unit (n); NaN where only a lower bound was measured."""
    above: Array
    """Lower bounds in the same unit (n); NaN where the value was measured."""
    groups: Sequence[str]
    """Architecture of each workload (n); a fold never splits one."""
    errors: Array | None = None
    """Relative standard errors of the values (n); None without any."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """Predictions of a model for n workloads, in the metric's unit, each (n)."""

    median: Array
    low: Array | None = None
    """Lower bound of the 90 % interval, if the model has intervals."""
    high: Array | None = None
    log_quantiles: Array | None = None
    """Quantiles of log(value) at `learner.stats.calibration.LEVELS` (n, levels)."""
    log_std: Array | None = None
    """Standard deviation of log(value)."""
    log_std_of_mean: Array | None = None
    """Part of `log_std` that more labels can remove."""
    outside: BoolArray | None = None
    """True if the workload lies outside the training distribution."""
    labels_end: Array | None = None
    """Smallest or largest label if the median lies far beyond it, else NaN."""

    def without(self, excess: float) -> Self:
        """Return estimates of values that are smaller by a constant part, in the metric's unit.

        Deviations stay the same in that unit, so those of the logarithm grow.
        """
        median = np.maximum(self.median - excess, LEAST_LEFT * self.median)
        growth = self.median / median

        def scaled(values: Array | None) -> Array | None:
            return None if values is None else growth * values

        def moved(values: Array | None) -> Array | None:
            return None if values is None else median * (values / self.median) ** growth

        quantiles = self.log_quantiles
        if quantiles is not None:
            from_median = quantiles - np.log(self.median)[:, None]
            quantiles = np.log(median)[:, None] + growth[:, None] * from_median
        return replace(
            self,
            median=median,
            low=moved(self.low),
            high=moved(self.high),
            log_quantiles=quantiles,
            log_std=scaled(self.log_std),
            log_std_of_mean=scaled(self.log_std_of_mean),
            labels_end=None if self.labels_end is None else self.labels_end - excess,
        )


class Model(Protocol):
    """Fitted predictor of one metric on one device."""

    def predict(self, workloads: Sequence[Workload]) -> Estimate: ...


class Estimator(Protocol):
    """Method that fits models."""

    @property
    def name(self) -> str: ...

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> Model:
        """Fit a model, from scratch or from the model `start` of another device.

        Raises:
            InputError: Too few labels, different shapes, or values that are not positive.
        """


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors with a name prefix, without that prefix."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


class _HasTensors(Protocol):
    def tensors(self) -> dict[str, Tensor]: ...


def joined_tensors(parts: Mapping[str, _HasTensors | None]) -> dict[str, Tensor]:
    """Return the tensors of all parts by `part.name`."""
    return {
        f"{part}.{name}": tensor
        for part, own in parts.items()
        if own is not None
        for name, tensor in own.tensors().items()
    }
