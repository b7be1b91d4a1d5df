"""Events and commands: what can happen to a campaign, and what the state machine answers.

Events go in, commands come out. Both are plain values without Ray and without SQL, so that a test
can play a whole cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trappm.cluster.scheduler.stop_rules import Stop
from trappm.profiler.records import Outcome


@dataclass(frozen=True)
class Worker:
    """One profiler: who it is, what it measures on, and under which software stack."""

    name: str
    device: str
    host: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """An assignment as the machine knows it: enough to rank it and to choose who measures it."""

    id: str
    device: str
    round_number: int
    rank: int
    failures: int = 0
    hosts: tuple[str, ...] = ()
    """Where it failed: another host is to try it next."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """The course that a campaign is to take, whoever measures.

    Raises:
        ValueError: a budget that is not given for every device alike.
    """

    devices: tuple[str, ...]
    """The source first."""
    shares: Mapping[str, Sequence[int]]
    """For each device, how many assignments each round has: evaluation, initial, then acquired."""
    max_attempts: int
    keeps_host_quiet: bool
    """Measurements and the learner need the host's cores for themselves: one thing at a time."""

    def __post_init__(self) -> None:
        if len({len(self.shares[device]) for device in self.devices}) != 1:
            raise ValueError(f"every device needs a share of every round: {self.shares}")

    @property
    def rounds(self) -> int:
        return len(self.shares[self.devices[0]])


# Events.


@dataclass(frozen=True)
class Joined:
    """A worker is there and can measure."""

    worker: Worker


@dataclass(frozen=True)
class Lost:
    """A worker is gone, and what it was measuring with it. It may join again."""

    worker: Worker
    why: str


@dataclass(frozen=True)
class Stopped:
    """By its canary a worker may measure no more, not even when it joins again."""

    worker: Worker


@dataclass(frozen=True)
class Measured:
    """A measurement came back, and has been recorded."""

    worker: Worker
    assignment_id: str
    outcome: Outcome
    seconds: float
    is_label: bool
    """It gives its configuration a label."""
    others_share: float | None = None
    """Share of its host's cores that other programs used, if it was unstable for that reason."""


@dataclass(frozen=True)
class DeviceChecked:
    """A canary or a run of kernels came back, and its worker goes on."""

    worker: Worker


@dataclass(frozen=True)
class Planned:
    """A device's part of a round has been chosen and written down."""

    device: str
    round_number: int
    assignments: Sequence[Waiting]


@dataclass(frozen=True)
class Settled:
    """These assignments need no measurement any more: their labels were there before.

    Some may be unknown to the machine, since they were settled as they were planned.
    """

    assignment_ids: Sequence[str]


@dataclass(frozen=True)
class Learned:
    """The learner has learned from all labels that there were when it began."""

    has_heads: bool
    """The source device has heads to choose by."""
    enough: bool = False
    """A stop rule holds, as after `Enough`."""


@dataclass(frozen=True)
class Enough:
    """A stop rule holds: nothing more is to begin, what runs is kept, and learned from."""


@dataclass(frozen=True)
class Tick:
    """Time has passed, and nothing else happened."""


Event = (
    Joined | Lost | Stopped | Measured | DeviceChecked | Planned | Settled | Learned | Enough | Tick
)


# Commands.


@dataclass(frozen=True)
class Measure:
    """Lease this assignment to this worker, and have it measured."""

    worker: Worker
    assignment_id: str


@dataclass(frozen=True)
class CheckDevice:
    """Have this worker do what is due before assignments: the canary, or its device's kernels."""

    worker: Worker


@dataclass(frozen=True)
class GiveUp:
    """Take an assignment back from a worker that was lost."""

    assignment_id: str
    why: str


@dataclass(frozen=True)
class Quarantine:
    """An assignment has failed for the last time; nobody is to meet it again."""

    assignment_id: str
    device: str
    failures: int
    hosts: tuple[str, ...]
    outcome: Outcome | None = None
    """Outcome of the last attempt; None if its worker was lost."""


@dataclass(frozen=True)
class AwaitQuiet:
    """Other programs make measurements on a host unstable: nothing begins there for some time."""

    worker: Worker
    seconds: float
    unstable: int
    """Number of the latest attempts that others made unstable."""
    attempts: int
    others_share: float
    """Mean share of the host's cores that others used in these."""


@dataclass(frozen=True)
class Plan:
    """Choose a device's part of a round and write it down; answered by `Planned`."""

    device: str
    round_number: int
    count: int


@dataclass(frozen=True)
class Learn:
    """Train on all labels that are there; answered by `Learned`."""

    initial_ended: bool
    """If the source has no heads after this one, no label is left to wait for."""


@dataclass(frozen=True)
class Close:
    """Every assignment of this round has ended, and the latest training knew them all."""

    round_number: int


@dataclass(frozen=True)
class BudgetSpent:
    """A budget is spent, and nothing more begins: record that."""

    stop: Stop


@dataclass(frozen=True)
class Publish:
    """Nothing is left to measure or to learn."""


Command = (
    Measure
    | CheckDevice
    | GiveUp
    | Quarantine
    | AwaitQuiet
    | Plan
    | Learn
    | Close
    | BudgetSpent
    | Publish
)
