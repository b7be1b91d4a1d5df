"""Input of all predictors: the traced step of a configuration without its name.

A workload consists of the graph, the simulated memory of the step and its kernels. Every prior,
head and baseline receives the same input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar
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
    from trappm.profiler.records.kernels import StepKernels
    from trappm.profiler.records.trace import Trace

Array = npt.NDArray[np.float64]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
_P = ParamSpec("_P")
_T = TypeVar("_T")

_MOST_RESULTS = 4096
"""Largest number of cached results per object: a server runs for long."""


def cached_with_first(
    function: Callable[Concatenate[Any, _P], _T],
) -> Callable[Concatenate[Any, _P], _T]:
    """Cache results as long as the first argument lives: fits need the same ones many times."""
    results: WeakKeyDictionary[Any, dict[Any, _T]] = WeakKeyDictionary()

    @wraps(function)
    def cached(first: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        known, key = results.setdefault(first, {}), (args, *kwargs.items())
        result = known.get(key)
        if result is None:
            if len(known) >= _MOST_RESULTS:
                known.clear()
            result = known[key] = function(first, *args, **kwargs)
        return result

    return cached


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
            self.precision is not Precision.FP32,
            (self.precision is Precision.AMP_BF16) + 2 * (self.precision is Precision.BF16),
            self.memory_format is MemoryFormat.CHANNELS_LAST,
            self.phase is Phase.INFER,
            self.optimizer is Optimizer.MOMENTUM,
            self.optimizer.is_adam,
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
