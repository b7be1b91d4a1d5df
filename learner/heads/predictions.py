"""Interface of the heads of a device, and their predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from trappm.learner.estimator import Estimate
    from trappm.learner.workload import Array, BoolArray, Workload
    from trappm.profiler.records import StepSettings

Z90 = 1.645
"""Deviations of a Gaussian from the middle to either end of 90 %."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions for n workloads; every array is (n, metrics)."""

    metrics: tuple[str, ...]
    """Metrics that can be predicted for all workloads: some heads need kernels."""
    median: Array
    """Value in the metric's unit."""
    low: Array
    """Lower bound of the 90 % interval."""
    high: Array
    log_std: Array
    """Deviation of log(value)."""
    disagreement: Array
    """Deviation of log(value) that more labels can remove."""
    outside: BoolArray
    """True if the workload lies outside the training distribution."""
    labels_end: Array
    """Least or largest label, where the median is far beyond it; NaN elsewhere."""

    def with_intervals(self, metric: str, intervals: Mapping[int, Sequence[float]]) -> Self:
        """Return predictions with other medians and 90 % intervals of a metric.

        Args:
            metric: A metric of these predictions.
            intervals: Median, low and high by row.
        """
        at, rows = self.metrics.index(metric), [*intervals]
        median, low, high = np.array([*intervals.values()]).reshape(-1, 3).T

        def replaced(values: Array, others: Array | float) -> Array:
            copied = values.copy()
            copied[rows, at] = others
            return copied

        return replace(
            self,
            median=replaced(self.median, median),
            low=replaced(self.low, low),
            high=replaced(self.high, high),
            log_std=replaced(self.log_std, np.log(high / low) / (2 * Z90)),
            disagreement=replaced(self.disagreement, 0.0),
        )

    def beyond_labels(self, row: int) -> dict[str, float]:
        """Return the nearest label for each metric of a workload far beyond all labels."""
        ends = zip(self.metrics, self.labels_end[row].tolist(), strict=True)
        return {metric: end for metric, end in ends if not np.isnan(end)}


def predictions_of(metrics: tuple[str, ...], estimates: Sequence[Estimate], n: int) -> Predictions:
    """Return the estimates of n workloads by several heads, metric after metric."""

    def column(name: str, missing: float = 0.0, kind: type = float) -> Any:
        values = [getattr(estimate, name) for estimate in estimates]
        rows = [np.full(n, missing) if value is None else value for value in values]
        return np.array(rows, dtype=kind).reshape(len(rows), n).T

    return Predictions(
        metrics=metrics,
        median=column("median"),
        low=column("low"),
        high=column("high"),
        log_std=column("log_std"),
        disagreement=column("log_std_of_mean"),
        outside=column("outside", kind=bool),
        labels_end=column("labels_end", np.nan),
    )


class DeviceHeads(Protocol):
    """Trained heads of one device, with metrics in the order of METRICS."""

    @property
    def metrics(self) -> tuple[str, ...]: ...

    @property
    def label_count(self) -> int: ...

    @property
    def needs_embeddings(self) -> bool: ...

    @property
    def needs_kernels(self) -> bool: ...

    def predict(self, workloads: Sequence[Workload]) -> Predictions:
        """Predict n workloads; raise InputError if one lacks what the heads need."""

    def tensors(self) -> dict[str, Tensor]:
        """Return everything learned, by name."""

    def settings(self) -> dict[str, Any]:
        """Return plain JSON values for the manifest; `kind` names the kind of heads."""


@dataclass(frozen=True, eq=False)
class TrainedHeads:
    """Heads of one device and phase."""

    heads: DeviceHeads
    settings: tuple[StepSettings, ...]
    """Settings of the labels, the most frequent first, which is the default of predictions."""


Settings = Mapping[str, Any]
OTHER_START = "the heads to start from were made with another preset or encoder"
