"""Interfaces of workers and learner, as a campaign uses them.

`cluster.actors` implements both with Ray actors; tests implement them without Ray.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from trappm.cluster.scheduler.messages import Worker
from trappm.cluster.scheduler.training_report import TrainingReport
from trappm.learner.training_label import TrainingLabel
from trappm.profiler.kernels.kernel_measurement import KernelMeasurement
from trappm.profiler.records import Configuration, Measurement
from trappm.profiler.records import Protocol as MeasuringProtocol
from trappm.store import Assignment

if TYPE_CHECKING:
    from trappm.cluster.profiles.static_profiles import ProfiledGraph
    from trappm.cluster.profiles.step_profiles import StepKey, TracedStep


Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True)
class CanaryCheck:
    """The canary, to be measured once more."""

    configuration: Configuration
    attempt_key: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class KernelRun:
    """The kernels of a device, to be timed before its assignments."""

    seconds: float
    """For all of them."""


Task = Assignment | CanaryCheck | KernelRun
"""What a worker does; the first two have a configuration and an attempt key."""


@dataclass(frozen=True)
class Finished:
    """A measurement that came back, or the news that its worker was lost."""

    worker: Worker
    task: Task
    measurement: Measurement | None
    loss: str | None = None
    """Why there is no measurement."""
    kernels: Sequence[KernelMeasurement] | None = None
    """Of a `KernelRun` that has ended; its worker is there still, though there may be none."""

    @property
    def is_lost(self) -> bool:
        """Whether the worker is gone with what it did."""
        return self.measurement is None and self.kernels is None


class Workers(Protocol):
    """Profilers: they make graphs, and measure one task each at a time."""

    def profile(self, pairs: Sequence[tuple[str, int]]) -> Iterator[ProfiledGraph]:
        """Static profiles of (architecture, input size) pairs, in the order of completion."""
        ...

    def trace(self, keys: Sequence[StepKey]) -> Iterator[TracedStep]:
        """Steps in settings of their own, in the order of completion."""
        ...

    def joined(self) -> Sequence[Worker]:
        """The workers that have joined."""
        ...

    def awaited(self) -> Sequence[str]:
        """Devices whose workers may still join."""
        ...

    def want(self, to_come: Mapping[str, int]) -> None:
        """Announces how much is to be measured on each device; at 0, no worker need join."""
        ...

    def start(self, worker: Worker, task: Task, protocol: MeasuringProtocol) -> None: ...

    def running(self) -> Sequence[tuple[Worker, Task]]: ...

    def wait(self, timeout_s: float) -> Sequence[Finished]:
        """What has finished; returns early when something has."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChoiceRequest:
    """A device's part of a round, to be chosen by acquisition; configurations by their ids."""

    device: str
    count: int
    candidates: Sequence[str]
    """Those that may be chosen."""
    known: Sequence[str]
    """Those that training on this device learns from, or will: measured, or to be measured."""
    unsteady: Mapping[str, int] = field(default_factory=dict)
    """Candidates that were given up as unstable, and how often each was tried."""
    capacity_mib: float | None = None
    """Memory of the device: from a measurement on it, or before one from its name or host."""
    card: str | None = None
    """As in `TrainingLabel`, of all that was ever measured on the device."""
    seed: Sequence[int]


@dataclass(frozen=True)
class Choice:
    """A configuration that acquisition wants measured, and why."""

    configuration_id: str
    reason: Mapping[str, Any]


@dataclass(frozen=True)
class PublishedSnapshot:
    """A snapshot in the registry."""

    id: str
    folder: str
    """Its name there."""
    manifest: Mapping[str, Any]
    """As JSON values."""
    notes: tuple[str, ...] = ()
    """What else should be known of it, a line each."""


class Call(Protocol[Result_co]):
    """Work that the learner was given, and that the campaign polls for."""

    @property
    def progress(self) -> tuple[int, int]:
        """Parts done, and parts in all; (0, 0) while unknown."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Return whether the work has ended, after waiting for it this long at most.

        Raises:
            TrappmError: The learner failed.
        """
        ...

    def result(self) -> Result_co:
        """Return the result of work that has ended."""
        ...


class Learner(Protocol):
    """The learner: encodes the pool, trains heads, chooses what to measure next, publishes.

    Each method returns at once. The learner does one thing after the other.
    """

    def set_pool(
        self,
        pool: Sequence[tuple[Configuration, bytes]],
        steps: Mapping[tuple[str, int], bytes],
        traced: Mapping[StepKey, bytes],
    ) -> Call[None]:
        """Pre-train the encoder on a pool.

        Args:
            pool: Configurations with their graph templates.
            steps: Step profiles by architecture and input size.
            traced: Step profiles in other precisions and memory formats.
        """
        ...

    def fit(
        self,
        labels: Sequence[TrainingLabel],
        kernels: Mapping[str, Sequence[KernelMeasurement]],
    ) -> Call[TrainingReport]:
        """Train the heads of all devices; report their errors on the evaluation set.

        Args:
            labels: Labels of all devices.
            kernels: Kernel measurements by device.
        """
        ...

    def choose(self, request: ChoiceRequest) -> Call[Sequence[Choice]]:
        """Choose what to measure next, the most wanted first; without any label as well."""
        ...

    def publish(self, registry: Path, fields: Mapping[str, Any]) -> Call[PublishedSnapshot]:
        """Save a snapshot of encoder and heads, with more fields for its manifest."""
        ...

    def promote(self, registry: Path, snapshot_id: str) -> Call[str | None]:
        """Make a snapshot the latest one unless it is worse; return a remark on it, if any."""
        ...
