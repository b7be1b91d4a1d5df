"""Interface of all predictors, built-in and published: workloads in, estimates and predictions out.

A workload is the traced step of a configuration without its name: the graph, the simulated memory
of the step and its kernels. Every prior, head and baseline receives the same input, with the labels
of a device to learn from. An estimator fits a model of one metric on one device, which returns
estimates; the heads of a device return predictions of all its metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from trappm.profiler.devices.catalogue import USABLE_SHARE
from trappm.profiler.errors import UnsupportedModelError
from trappm.profiler.graphs.features import static_features
from trappm.profiler.records import (
    METRICS,
    Graph,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
    StepSettings,
)
from trappm.profiler.records.step_scope import WHOLE_STEP, StepScope

if TYPE_CHECKING:
    from torch import Tensor

    from trappm.profiler.traced_step import StepKernels, Trace


Array = npt.NDArray[np.float64]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
_P = ParamSpec("_P")
_T = TypeVar("_T")

_MAX_RESULTS = 4096
"""Largest number of cached results per object: a server runs for long."""


def cache_on_first(
    function: Callable[Concatenate[Any, _P], _T],
) -> Callable[Concatenate[Any, _P], _T]:
    """Cache results as long as the first argument lives: fits need the same ones many times."""
    results: WeakKeyDictionary[Any, dict[Any, _T]] = WeakKeyDictionary()

    @wraps(function)
    def cached(first: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        known, key = results.setdefault(first, {}), (args, *kwargs.items())
        result = known.get(key)
        if result is None:
            if len(known) >= _MAX_RESULTS:
                known.clear()
            result = known[key] = function(first, *args, **kwargs)
        return result

    return cached


_VARIANTS = {
    Precision.TF32: 1, Precision.FP32_STRICT: 2, Precision.AMP_BF16: 1, Precision.BF16: 2,
}  # fmt: skip
"""Numbers of precisions, other than 0, among those in fp32 and among the others."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """One configuration as predictors see it."""

    graph: Graph
    """Graph at the configuration's batch size."""
    precision: Precision = Precision.FP32
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    optimizer: Optimizer = Optimizer.SGD
    phase: Phase = Phase.TRAIN
    trace: Trace | None = None
    """The traced step; None where it could not be traced."""
    kernels: StepKernels | None = None
    """Those of the trace; None where predictors shall not see them."""
    scope: StepScope = WHOLE_STEP
    """Timed parts of the step, which concern step time only."""
    embedding: FloatArray | None = None
    """Embedding of the graph by the frozen encoder (width)."""

    @classmethod
    def of(
        cls,
        trace: Trace,
        settings: StepSettings,
        *,
        batch_size: int,
        with_kernels: bool,
    ) -> Self:
        """Return the workload of a step traced in these settings, with its kernels or without.

        Raises:
            InputError: The model cannot have this batch size.
            UnsupportedModelError: The trace has no graph.
        """
        if trace.graph is None:
            raise UnsupportedModelError(trace.refusal or "its forward pass has no graph")
        return cls(
            graph=trace.graph.at(batch_size),
            precision=settings.precision,
            memory_format=settings.memory_format,
            optimizer=settings.optimizer,
            phase=trace.phase,
            trace=None if trace.allocations is None else trace,
            kernels=trace.kernels if with_kernels else None,
        )

    @property
    def batch_size(self) -> int:
        return self.graph.batch_size

    @property
    def static_features(self) -> Array:
        """Those of the graph, not scaled, and then how its step is run (f)."""
        settings = (
            not self.precision.is_fp32,
            _VARIANTS.get(self.precision, 0),
            self.memory_format is MemoryFormat.CHANNELS_LAST,
            self.phase is Phase.INFER,
            self.optimizer.states_per_parameter == 1,
            self.optimizer.states_per_parameter == 2,
        )
        return np.append(static_features(self.graph), np.array(settings, dtype=np.float64))


@dataclass(frozen=True)
class TrainingLabel:
    """Metrics of a configuration on a device, for training or evaluation.

    `values` follow the order of `profiler.records.METRICS`; a metric that is missing is None.
    """

    configuration_id: str
    device: str
    role: str
    """`train` or `evaluate`."""
    values: tuple[float | None, ...]
    provenance: str
    memory_above_mib: float | None = None
    """Lower bound of the memory if the run was out of memory."""
    card: str | None = None
    """Card of the device, if measurements name it; selects the data sheet."""
    step_time_error: float | None = None
    """Relative standard error of the step time, if its measurement had one."""


@dataclass(frozen=True)
class CompiledPair:
    """The same step measured eager and under `torch.compile` on one device."""

    device: str
    phase: Phase
    is_held_out: bool
    """True for the evaluation set."""
    eager: str
    """Id of the eager configuration."""
    compiled: str
    """Id of the compiled configuration."""
    log_ratio: float
    """Logarithm of the compiled step's time relative to the eager step's."""


def targets_of(labels: Sequence[TrainingLabel]) -> Array:
    """Return the labels' values, shape (n, metrics); NaN where missing."""
    rows = [[np.nan if v is None else v for v in label.values] for label in labels]
    return np.array(rows, dtype=np.float64).reshape(len(labels), len(METRICS))


def bounds_of(labels: Sequence[TrainingLabel]) -> Array:
    """Return lower bounds of the values, shape (n, metrics), from runs that were out of memory.

    NaN where there is no bound.
    """
    bounds = np.full((len(labels), len(METRICS)), np.nan)
    bounds[:, list(METRICS).index("memory_mib")] = [
        # A run is out of memory slightly below the device's total memory.
        np.nan if label.memory_above_mib is None else USABLE_SHARE * label.memory_above_mib
        for label in labels
    ]
    return bounds


def errors_of(labels: Sequence[TrainingLabel]) -> Array:
    """Return relative standard errors of the values, shape (n, metrics); 0 where unknown."""
    errors = np.zeros((len(labels), len(METRICS)))
    errors[:, list(METRICS).index("step_time_ms")] = [x.step_time_error or 0.0 for x in labels]
    return errors


MIN_SHARE_LEFT = 0.1
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
    extrapolated_from: Array | None = None
    """Smallest or largest label if the median lies far beyond it, else NaN."""

    def without(self, excess: float) -> Self:
        """Return estimates of values that are smaller by a constant part, in the metric's unit.

        Deviations stay the same in that unit, so those of the logarithm grow.
        """
        median = np.maximum(self.median - excess, MIN_SHARE_LEFT * self.median)
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
            extrapolated_from=None
            if self.extrapolated_from is None
            else self.extrapolated_from - excess,
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


def join_tensors(parts: Mapping[str, _HasTensors | None]) -> dict[str, Tensor]:
    """Return the tensors of all parts by `part.name`."""
    return {
        f"{part}.{name}": tensor
        for part, own in parts.items()
        if own is not None
        for name, tensor in own.tensors().items()
    }


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
    extrapolated_from: Array
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
        ends = zip(self.metrics, self.extrapolated_from[row].tolist(), strict=True)
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
        extrapolated_from=column("extrapolated_from", np.nan),
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
