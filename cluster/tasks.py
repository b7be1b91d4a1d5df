"""Tasks of a campaign's workers and requests to its learner, with their results."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trappm.cluster.scheduler.messages import Worker
from trappm.profiler.kernels.kernel_call import KernelMeasurement
from trappm.profiler.records import Configuration, Measurement
from trappm.store import Assignment


@dataclass(frozen=True)
class CanaryCheck:
    """A measurement of the canary."""

    configuration: Configuration
    attempt_key: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class KernelRun:
    """Timing of a device's kernels."""

    seconds: float
    """Seconds for all of them."""


Task = Assignment | CanaryCheck | KernelRun
"""Task of a worker; the first two have a configuration and an attempt key."""


@dataclass(frozen=True)
class Finished:
    """Result of a task, or the loss of its worker."""

    worker: Worker
    task: Task
    measurement: Measurement | None
    loss: str | None = None
    """Reason why there is no measurement."""
    kernels: Sequence[KernelMeasurement] | None = None
    """Kernels of a `KernelRun`, none if it failed; None if its worker was lost."""

    @property
    def is_lost(self) -> bool:
        """Return whether the worker is gone."""
        return self.measurement is None and self.kernels is None


@dataclass(frozen=True, kw_only=True)
class ChoiceRequest:
    """A device's part of a round, to be chosen by acquisition; configurations by their ids."""

    device: str
    count: int
    candidates: Sequence[str]
    known: Sequence[str]
    """Configurations that training on this device learns from, measured or to be measured."""
    unsteady: Mapping[str, int] = field(default_factory=dict)
    """Candidates that failed as unstable, with their numbers of attempts."""
    capacity_mib: float | None = None
    """Memory of the device: measured, or else from its name or host."""
    card: str | None = None
    """Card of the device by all measurements, as in `TrainingLabel`."""
    seed: Sequence[int]


@dataclass(frozen=True)
class Choice:
    """A configuration to measure, and the reason."""

    configuration_id: str
    reason: Mapping[str, Any]


@dataclass(frozen=True)
class PublishedSnapshot:
    """A snapshot in the registry."""

    id: str
    folder: str
    """Name of its folder in the registry."""
    manifest: Mapping[str, Any]
    """Manifest as JSON values."""
    notes: tuple[str, ...] = ()
    """Remarks, a line each."""
