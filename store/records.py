"""Frozen records that the store returns and accepts, besides those of `profiler`.

Times are ISO 8601 strings in UTC, as in `profiler.records.Measurement`.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from trappm.profiler.records import Configuration, Outcome, Provenance

if TYPE_CHECKING:
    from trappm.profiler.traced_step import TraceKey


class CampaignState(enum.StrEnum):
    """State of a campaign; only `finished` and `cancelled` ones are never resumed."""

    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Purpose(enum.StrEnum):
    """Purpose of a round: held-out labels, the first training labels, or chosen ones."""

    EVALUATION = "evaluation"
    INITIAL = "initial"
    ACQUIRED = "acquired"


class Role(enum.StrEnum):
    """Use of an assignment's label: to train heads, or to evaluate them."""

    TRAIN = "train"
    EVALUATE = "evaluate"


class AssignmentState(enum.StrEnum):
    """State of an assignment: waiting, with a worker, with a result, or abandoned."""

    OPEN = "open"
    LEASED = "leased"
    DONE = "done"
    FAILED = "failed"


_FINAL = frozenset({Outcome.OK, Outcome.OOM, Outcome.UNSUPPORTED})
_MAX_TIMEOUTS = 2


def is_final(outcome: Outcome) -> bool:
    """Return whether this outcome ends its assignment, because a retry would end the same way."""
    return outcome in _FINAL


MAX_LOSSES = 10
"""Number of times that an assignment may lose its worker before it is abandoned."""


def attempts_allowed(outcome: Outcome, max_attempts: int) -> int:
    """Return after how many failures an assignment is abandoned.

    A run beyond its time limit may have met a busy machine once, but a third one costs too much.
    """
    return min(max_attempts, _MAX_TIMEOUTS) if outcome is Outcome.TIMEOUT else max_attempts


class TraceState(NamedTuple):
    """State of a traced step."""

    graph_hash: str | None
    """Content of its graph, or None."""
    refusal: str | None
    """Why graph, or allocations and kernels, are missing; None if it is whole."""


class PoolPart(NamedTuple):
    """A step that configurations of a pool share."""

    family: str
    key: TraceKey
    configurations: int
    state: TraceState | None
    """None before it is traced."""


@dataclass(frozen=True, kw_only=True)
class OwnerProcess:
    """The process of an owner, for people who look for it."""

    host: str
    pid: int
    cluster: str | None = None
    """Address of its Ray cluster, or the host of a private one; None if it was not recorded."""


@dataclass(frozen=True, kw_only=True)
class Activity:
    """Activity of a campaign's process, as it has told the store within the last seconds."""

    stage: str = "starting"
    done: int = 0
    total: int = 0
    eta_s: float | None = None
    """Expected time to the end of the campaign, or of tracing; None while unknown."""
    current: Sequence[str] = ()
    """Running measurements, a line each."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that runs a campaign."""

    id: str
    process: OwnerProcess
    since: str
    silent_s: float
    """Seconds since its last heartbeat, by the clock of the database."""


@dataclass(frozen=True, kw_only=True)
class CampaignRecord:
    """A campaign and the spec that it was launched from."""

    id: str
    name: str
    spec: Mapping[str, Any]
    seed: int
    state: CampaignState
    created_at: str
    finished_at: str | None
    snapshot: str | None
    """Id of the snapshot that it published."""
    owner: Owner | None
    activity: Activity


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One acquisition and its measurements, which is open until its report is written."""

    campaign_id: str
    number: int
    purpose: Purpose
    planned: Mapping[str, int]
    """Number of assignments by device, for the devices whose part is planned."""
    report: Mapping[str, Any] | None

    @property
    def is_closed(self) -> bool:
        return self.report is not None


class Pending(NamedTuple):
    """Assignments of a campaign that have not ended: on one device, due in one round."""

    device: str
    due: int
    """Round in which they were planned, and one more for each failure."""
    waiting: int
    leased: int


@dataclass(frozen=True, kw_only=True)
class Standing:
    """All that decides what a campaign does next, as one transaction read it."""

    state: CampaignState
    rounds: Sequence[RoundRecord]
    """Rounds by number. Reports are left out: a closed round has an empty one."""
    pending: Sequence[Pending]
    attempts: Mapping[str, int]
    """Number of attempts by device, failed ones included."""
    seconds: Mapping[str, float]
    """Duration of these attempts by device."""
    measured: Mapping[str, int]
    """Number of ended assignments by device that have such an attempt; adopted labels have none."""
    labels: int
    """Number of assignments with a label."""
    has_pool: bool
    is_enough: bool
    """True if a stop rule has held: nothing more begins."""

    @property
    def leased(self) -> int:
        """Number of assignments that are being measured."""
        return sum(part.leased for part in self.pending)

    @property
    def ended(self) -> int:
        """Number of ended assignments; one that was planned again counts for each round."""
        planned = sum(sum(part.planned.values()) for part in self.rounds)
        return planned - sum(part.waiting + part.leased for part in self.pending)

    def seconds_per_configuration(self, device: str) -> float | None:
        """Return the mean measuring time of a configuration, with all its attempts.

        While no configuration of the device has ended, each attempt counts as one. The result is
        None before the first attempt.
        """
        count = self.measured.get(device) or self.attempts.get(device)
        return self.seconds[device] / count if count else None


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Abandoned assignments of a campaign on one device with one outcome of the last attempt."""

    device: str
    outcome: Outcome | None
    """None if the worker was lost."""
    count: int
    message: str | None
    """Message of one of the attempts."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One configuration of a campaign to be measured on one device.

    `CampaignRounds.plan` sets the campaign and round of a new one.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    campaign_id: str = ""
    round_number: int = 0
    configuration: Configuration
    device: str
    role: Role
    rank: int
    """Order within the round and device, the most important first."""
    reason: Mapping[str, Any] = field(default_factory=dict)
    """Why acquisition chose it."""
    state: AssignmentState = AssignmentState.OPEN
    attempts: int = 0
    """Number of its leases."""
    failures: int = 0
    """Number of attempts that the step itself failed."""
    losses: int = 0
    """Number of leases that ended because a worker was lost, or could not measure anything."""
    worker: str | None = None
    host: str | None = None
    """Node of the worker."""

    @property
    def attempt_key(self) -> str:
        """Key under which this lease's measurement is recorded."""
        return f"{self.id}-{self.attempts}"

    def with_state(self, state: AssignmentState) -> Self:
        """Return the assignment in this state, without a worker."""
        return replace(self, state=state, worker=None, host=None)

    def with_failure(self, limit: int) -> Self:
        """Return the assignment after a failure: open, or abandoned after `limit` failures."""
        return replace(self._open_below(self.failures + 1, limit), failures=self.failures + 1)

    def with_loss(self) -> Self:
        """Return the assignment after a fault of its worker: open, or abandoned at last."""
        return replace(self._open_below(self.losses + 1, MAX_LOSSES), losses=self.losses + 1)

    def _open_below(self, count: int, limit: int) -> Self:
        return self.with_state(AssignmentState.OPEN if count < limit else AssignmentState.FAILED)


@dataclass(frozen=True, kw_only=True)
class LabelRecord:
    """Accepted result of a configuration on a device, for training."""

    id: int
    configuration: Configuration
    device: str
    fingerprint: str
    """Software stack and hardware, as `profiler.host.environment.stack_fingerprint`."""
    protocol: str
    step_time_ms: float | None
    memory_mib: float | None
    memory_above_mib: float | None
    """Lower bound of a run that ran out of memory (a censored label)."""
    power_w: float | None
    energy_j: float | None
    provenance: Provenance
    measurement_id: int
    created_at: str
    role: Role | None = None
    """Its use in a campaign, for labels of a campaign."""


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """An attempt of a campaign, without its samples."""

    id: int
    at: str
    """Time at which it began."""
    device: str
    configuration: Configuration
    outcome: Outcome
    message: str | None
    step_time_ms: float | None
    memory_mib: float | None


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """An event of a campaign."""

    id: int
    at: str
    kind: str
    message: Mapping[str, Any]


_Record = TypeVar("_Record")


def record_of(kind: type[_Record], row: Any, **given: Any) -> _Record:
    """Return a record whose fields are given, or else the columns of the same names of a row."""
    names = [x.name for x in fields(kind) if x.name not in given]  # type: ignore[arg-type]
    return kind(**{name: getattr(row, name) for name in names}, **given)


def configuration_of(row: Any) -> Configuration:
    """Return the configuration in a row with the columns `schema.CONFIGURATION`."""
    return record_of(Configuration, row)
