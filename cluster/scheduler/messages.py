"""Messages of a campaign: values without Ray and SQL.

The scheduler takes events and returns commands. Workers get tasks and return how they finished. The
learner gets requests for choices.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trappm.cluster.scheduler.stop_rules import Stop
from trappm.profiler.records import Configuration, Measurement, Outcome
from trappm.store.records import Assignment


@dataclass(frozen=True)
class Worker:
    """A profiler: its name, its device, its host and its software stack."""

    name: str
    device: str
    host: str
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Course:
    """Assignments of a campaign by device and round; each device has a share of every round."""

    devices: tuple[str, ...]
    """Device keys, the source first."""
    shares: Mapping[str, Sequence[int]]
    """Number of assignments per round by device: evaluation, initial, then acquired rounds."""
    max_attempts: int
    keeps_host_quiet: bool
    """True if measurements and the learner use the host one at a time, as they share its cores."""

    @property
    def rounds(self) -> int:
        return len(self.shares[self.devices[0]])


# Events.


@dataclass(frozen=True)
class Joined:
    """A worker can measure."""

    worker: Worker


@dataclass(frozen=True)
class Lost:
    """A worker is gone with what it was measuring. It may join again."""

    worker: Worker
    why: str


@dataclass(frozen=True)
class Measured:
    """A measurement came back and has been recorded."""

    worker: Worker
    assignment_id: str
    outcome: Outcome
    seconds: float
    is_label: bool
    """True if it gives its configuration a label."""
    others_share: float | None = None
    """Share of the host's cores that other programs used, if that made it unstable."""


@dataclass(frozen=True)
class DeviceChecked:
    """A canary came back."""

    worker: Worker


@dataclass(frozen=True)
class Planned:
    """A device's part of a round has been chosen and stored."""

    device: str
    round_number: int
    assignments: Sequence[Assignment]


@dataclass(frozen=True)
class Settled:
    """Assignments have labels of earlier campaigns; some may be unknown to the scheduler."""

    assignment_ids: Sequence[str]


@dataclass(frozen=True)
class Learned:
    """The learner has trained on all labels that existed when it began."""

    has_heads: bool
    """True if the source device has heads to choose by."""


@dataclass(frozen=True)
class Enough:
    """A stop rule holds: nothing more begins; what runs is recorded and learned from."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Joined | Lost | Measured | DeviceChecked | Planned | Settled | Learned | Enough | Tick


# Commands.


@dataclass(frozen=True)
class Measure:
    """Lease an assignment to a worker and start it."""

    worker: Worker
    assignment_id: str


@dataclass(frozen=True)
class CheckDevice:
    """Start the canary that is due on a worker."""

    worker: Worker


@dataclass(frozen=True)
class GiveUp:
    """Take an assignment back from a worker that was lost."""

    assignment_id: str
    why: str


@dataclass(frozen=True)
class Quarantine:
    """Stop measuring an assignment that has failed for the last time."""

    assignment: Assignment
    failures: int
    hosts: tuple[str, ...]
    outcome: Outcome | None = None
    """Outcome of the last attempt; None if its worker was lost."""


@dataclass(frozen=True)
class AwaitQuiet:
    """Report a pause: other programs make measurements on a host unstable."""

    worker: Worker
    seconds: float
    unstable: int
    """Number of recent attempts that others made unstable."""
    attempts: int
    others_share: float
    """Mean share of the host's cores that others used in these."""


@dataclass(frozen=True)
class Plan:
    """Choose and store a device's part of a round; the reply is `Planned`."""

    device: str
    round_number: int
    count: int


@dataclass(frozen=True)
class Learn:
    """Train on all labels; the reply is `Learned`."""

    initial_ended: bool
    """True if no label is left to wait for if the source has no heads afterwards."""


@dataclass(frozen=True)
class Close:
    """Close a round: its assignments have ended, and the latest training knew them all."""

    round_number: int


@dataclass(frozen=True)
class BudgetSpent:
    """Record that a budget is spent and nothing more begins."""

    stop: Stop


Command = (
    Measure | CheckDevice | GiveUp | Quarantine | AwaitQuiet | Plan | Learn | Close | BudgetSpent
)


# Tasks of workers, and requests to the learner.


@dataclass(frozen=True)
class CanaryCheck:
    """A measurement of the canary."""

    configuration: Configuration
    attempt_key: str = field(default_factory=lambda: uuid.uuid4().hex)


Task = Assignment | CanaryCheck
"""Task of a worker; each has a configuration and an attempt key."""


@dataclass(frozen=True)
class Finished:
    """Result of a task, or the loss of its worker."""

    worker: Worker
    task: Task
    measurement: Measurement | None
    loss: str | None = None
    """Reason why there is no measurement."""

    @property
    def is_lost(self) -> bool:
        """Return whether the worker is gone."""
        return self.measurement is None


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
