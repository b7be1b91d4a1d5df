"""What the store gives out and takes in, besides the records of `profiler`: frozen and plain.

Times are ISO 8601 strings in UTC, as in `profiler.records.Measurement`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trappm.profiler.records import Configuration, Outcome, Provenance


class CampaignState(enum.StrEnum):
    """Where a campaign stands; only `finished` and `cancelled` ones are never resumed."""

    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Purpose(enum.StrEnum):
    """Why a round is measured: to judge by, to begin with, or because acquisition chose it."""

    EVALUATION = "evaluation"
    INITIAL = "initial"
    ACQUIRED = "acquired"


class RoundState(enum.StrEnum):
    """A round is open until its report is written."""

    OPEN = "open"
    CLOSED = "closed"


class Role(enum.StrEnum):
    """What an assignment's label is for: heads learn from it, or are judged by it."""

    TRAIN = "train"
    EVALUATE = "evaluate"


class AssignmentState(enum.StrEnum):
    """An assignment is open, is with a worker, has its result, or was given up."""

    OPEN = "open"
    LEASED = "leased"
    DONE = "done"
    FAILED = "failed"


_FINAL = frozenset({Outcome.OK, Outcome.OOM, Outcome.UNSUPPORTED})
_MAX_TIMEOUTS = 2


def is_final(outcome: Outcome) -> bool:
    """Whether an attempt that ended so settles its assignment: the next would end the same way."""
    return outcome in _FINAL


def attempts_allowed(outcome: Outcome | None, max_attempts: int) -> int:
    """How many failures, the last of them this one, an assignment may have before it is given up.

    What runs into its time limit may have met a busy machine once, but costs too much thrice.

    Args:
        outcome: of the failed attempt; None if its worker was lost.
        max_attempts: of the campaign.
    """
    return min(max_attempts, _MAX_TIMEOUTS) if outcome is Outcome.TIMEOUT else max_attempts


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An architecture of which no graph can be made at this input size, and why."""

    architecture: str
    input_size: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class PoolRecord:
    """A pool under its name, with the spec that it was built from."""

    name: str
    spec: Mapping[str, Any]
    built_at: str
    size: int
    """Number of configurations."""


@dataclass(frozen=True, kw_only=True)
class PoolPart:
    """An architecture at one input size in a pool: how much of the pool it is, and its profile.

    It has a graph, or a refusal, or neither as long as nobody has tried. With a graph it has a
    step profile, or a refusal of that, or neither if the graph was made by an earlier version.
    """

    family: str
    architecture: str
    input_size: int
    configurations: int
    graph_hash: str | None
    refusal: str | None
    has_step_profile: bool
    step_refusal: str | None

    @property
    def is_profiled(self) -> bool:
        """Whether its profiles were made or refused, and nothing is left to try."""
        tried_step = self.has_step_profile or self.step_refusal is not None
        return self.refusal is not None or (self.graph_hash is not None and tried_step)


@dataclass(frozen=True, kw_only=True)
class OwnerProcess:
    """A process, as others can look for it."""

    host: str
    """Its name, for people."""
    machine: str
    """Equal where process ids mean the same: one boot of one machine, one namespace of processes;
    empty where that cannot be known."""
    pid: int
    began: int
    """Clock ticks from the machine's start to its own: with it the id is never another's."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that runs a campaign."""

    id: str
    process: OwnerProcess
    since: str
    silent_s: float
    """Since its last heartbeat, by the clock of the database."""


@dataclass(frozen=True, kw_only=True)
class CampaignRecord:
    """A campaign, with the spec that it was launched from."""

    id: str
    name: str
    spec: Mapping[str, Any]
    seed: int
    state: CampaignState
    created_at: str
    finished_at: str | None
    owner: Owner | None


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One acquisition and its measurements; the report is None while it is open."""

    campaign_id: str
    number: int
    purpose: Purpose
    state: RoundState
    report: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class PlannedAssignment:
    """What a round wants measured, before it is written down."""

    configuration: Configuration
    device: str
    role: Role | str
    rank: int
    """Order within the round and device, the most wanted first."""
    reason: Mapping[str, Any] = field(default_factory=dict)
    """Why it was chosen."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One configuration of a campaign to be measured on one device."""

    id: str
    campaign_id: str
    round_number: int
    configuration: Configuration
    device: str
    role: Role
    rank: int
    reason: Mapping[str, Any]
    state: AssignmentState
    attempts: int
    """How often it has been leased."""
    failures: int
    """How many of these ended without a result; what was interrupted on request does not count."""
    worker: str | None

    @property
    def attempt_key(self) -> str:
        """The key under which this lease's measurement is recorded."""
        return f"{self.id}-{self.attempts}"


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What became of a measurement that was handed in."""

    measurement_id: int
    label_id: int | None
    """The label of its configuration, device and protocol; None if the outcome gives none."""


@dataclass(frozen=True, kw_only=True)
class LabelRecord:
    """What training uses: the accepted summary of a configuration's measurements on a device."""

    id: int
    configuration: Configuration
    device: str
    fingerprint: str
    """The software stack and hardware, as `profiler.host.environment.stack_fingerprint`."""
    protocol: str
    step_time_ms: float | None
    memory_mib: float | None
    memory_above_mib: float | None
    """Memory ran out, and this is the least that it needs: the label is censored."""
    power_w: float | None
    energy_j: float | None
    provenance: Provenance
    measurement_id: int
    created_at: str
    role: Role | None = None
    """In a campaign's labels: what it is for there."""


@dataclass(frozen=True, kw_only=True)
class SnapshotRecord:
    """A published snapshot; its files are at `location`, below the folder of snapshots."""

    id: str
    campaign_id: str | None
    location: str
    manifest: Mapping[str, Any]
    created_at: str


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """Something that happened to a campaign."""

    at: str
    kind: str
    message: Mapping[str, Any]
