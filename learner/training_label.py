"""Labels for training and evaluation of heads, and their arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trappm.profiler.devices.catalogue import USABLE_SHARE
from trappm.profiler.records import METRICS


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


def targets_of(labels: Sequence[TrainingLabel]) -> npt.NDArray[np.float64]:
    """Return the labels' values, shape (n, metrics); NaN where missing."""
    rows = [[np.nan if v is None else v for v in label.values] for label in labels]
    return np.array(rows, dtype=np.float64).reshape(len(labels), len(METRICS))


def bounds_of(labels: Sequence[TrainingLabel]) -> npt.NDArray[np.float64]:
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
