"""A label as heads learn from it, and labels as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trappm.profiler.devices.catalogue import USABLE_SHARE
from trappm.profiler.records import METRICS


@dataclass(frozen=True)
class TrainingLabel:
    """A configuration's metrics on a device, from which a head learns or by which it is judged.

    `values` follow the order of `profiler.records.METRICS`; a metric that is missing is None.
    """

    configuration_id: str
    device: str
    role: str
    """`train` or `evaluate`."""
    values: tuple[float | None, ...]
    provenance: str
    memory_above_mib: float | None = None
    """Lower bound of the memory that the configuration needs: its run was out of memory."""
    card: str | None = None
    """The card behind the device's key, where measurements name it: its data sheet counts."""


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
        # Of the device's memory; a run fails where no more fits, which is a little earlier.
        np.nan if label.memory_above_mib is None else USABLE_SHARE * label.memory_above_mib
        for label in labels
    ]
    return bounds
