"""Heads of a device of any kind: their interface, their predictions, what they were trained for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from trappm.profiler.records import MemoryFormat, Optimizer, Precision

if TYPE_CHECKING:
    from torch import Tensor

    from trappm.learner.workload import Workload

Array = npt.NDArray[np.float64]

Z90 = 1.645
"""Deviations of a Gaussian from the middle to either end of 90 %."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions for n workloads; every array is (n, metrics)."""

    metrics: tuple[str, ...]
    """Those that can be predicted for all of them: some heads need kernels."""
    median: Array
    """In the metric's unit."""
    low: Array
    """Lower bound of the 90 % interval."""
    high: Array
    log_std: Array
    """Deviation of log(value): the disagreement and the error on architectures not seen."""
    disagreement: Array
    """Deviation of log(value) that more labels can remove."""
    outside: npt.NDArray[np.bool_]
    """Whether the workload is unlike everything that the head was trained on."""
    labels_end: Array | None = None
    """The least or largest label, where the median lies far beyond it, and NaN elsewhere; None of
    heads that do not keep it."""

    def where_outside(self, metric: str, median: Array, error: float) -> Self:
        """With other medians (n), and the deviation of their logarithm, in the rows of a metric
        that are unlike all labels."""
        if metric not in self.metrics:
            return self
        at = self.metrics.index(metric)
        width = Z90 * error

        def replaced(values: Array, others: Array | float) -> Array:
            column = np.where(self.outside[:, at], others, values[:, at])
            return np.column_stack([values[:, :at], column, values[:, at + 1 :]])

        return replace(
            self,
            median=replaced(self.median, median),
            low=replaced(self.low, median * np.exp(-width)),
            high=replaced(self.high, median * np.exp(width)),
            log_std=replaced(self.log_std, error),
            disagreement=replaced(self.disagreement, 0.0),
        )

    def beyond_labels(self, row: int) -> dict[str, float]:
        """For each metric of a workload that lies far beyond all labels: the nearest of these."""
        if self.labels_end is None:
            return {}
        ends = zip(self.metrics, self.labels_end[row].tolist(), strict=True)
        return {metric: end for metric, end in ends if not np.isnan(end)}


class DeviceHeads(Protocol):
    """The trained heads of one device."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Those that had labels, in the order of METRICS."""
        ...

    @property
    def label_count(self) -> int: ...

    @property
    def needs_embeddings(self) -> bool:
        """Whether workloads must come with their embedding."""
        ...

    @property
    def needs_kernels(self) -> bool:
        """Whether some head predicts more of a workload that comes with its kernels."""
        ...

    def predict(self, workloads: Sequence[Workload]) -> Predictions:
        """Raises InputError where a workload lacks what the heads need."""
        ...

    def gradients(self, workloads: Sequence[Workload]) -> npt.NDArray[np.float32]:
        """Of the predicted logarithms by what the heads have learned (n, g)."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Everything learned, by name; with `settings` what a snapshot keeps."""
        ...

    def settings(self) -> dict[str, Any]:
        """The plain values that go beside `tensors`, as JSON; `kind` names the kind of heads."""
        ...


class StepSettings(NamedTuple):
    """How a step is run, beside its batch size."""

    precision: Precision
    memory_format: MemoryFormat
    optimizer: Optimizer


@dataclass(frozen=True, eq=False)
class TrainedHeads:
    """The heads of one device and phase."""

    heads: DeviceHeads
    settings: tuple[StepSettings, ...]
    """Those that the labels had, the most frequent first: what a question means that names none."""


Settings = Mapping[str, Any]
OTHER_START = "the heads to start from were made with another preset or encoder"
