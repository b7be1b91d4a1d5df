"""Labels of a campaign as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trappm.cluster.workers.interfaces import TrainingLabel
from trappm.profiler.devices.capacity import USABLE_SHARE
from trappm.profiler.records import METRICS


def targets_of(labels: Sequence[TrainingLabel]) -> npt.NDArray[np.float64]:
    """The labels' values (n, metrics), NaN where missing."""
    rows = [[np.nan if v is None else v for v in label.values] for label in labels]
    return np.array(rows, dtype=np.float64).reshape(len(labels), len(METRICS))


def bounds_of(labels: Sequence[TrainingLabel]) -> npt.NDArray[np.float64]:
    """Lower bounds of the values (n, metrics), NaN where there is none: memory that ran out."""
    bounds = np.full((len(labels), len(METRICS)), np.nan)
    bounds[:, list(METRICS).index("memory_mib")] = [
        # Of the device's memory; a run dies where no more fits, which is a little earlier.
        np.nan if label.memory_above_mib is None else USABLE_SHARE * label.memory_above_mib
        for label in labels
    ]
    return bounds
