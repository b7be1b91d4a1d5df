"""Messages of a campaign: values without Ray and SQL.

Workers get tasks and return how they finished. The learner gets requests for choices.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trappm.profiler.records import Configuration, Measurement
from trappm.store.records import Assignment


@dataclass(frozen=True)
class Worker:
    """A profiler: its name, its device, its host and its software stack."""

    name: str
    device: str
    host: str
    fingerprint: str


@dataclass(frozen=True)
class CanaryCheck:
    """A measurement of the canary."""

    configuration: Configuration
    attempt_key: str = field(default_factory=lambda: uuid.uuid4().hex)


Task = Assignment | CanaryCheck
"""Task of a worker; each has a configuration and an attempt key."""


@dataclass(frozen=True)
class Finished:
    """Result of a task, or why there is none."""

    worker: Worker
    task: Task
    measurement: Measurement | None
    why: str | None = None
    """Reason why there is no measurement."""
    is_lost: bool = False
    """True if the worker or its node is gone, which says nothing about the task."""


@dataclass(frozen=True, kw_only=True)
class ChoiceRequest:
    """A device's part of a round, to be chosen by acquisition; configurations by their ids."""

    device: str
    count: int
    candidates: Sequence[str]
    known: Sequence[str]
    """Configurations that training on this device learns from, measured or to be measured."""
    unsteady: Mapping[str, int] = field(default_factory=dict)
    """Candidates that failed as unstable, with their numbers of failed attempts."""
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
