"""The next job of a campaign: pure functions of what SQL says and of what its learner knows.

    no pool  -> MakePool: trace a step of each model
             -> Prepare: trace the other steps, train the encoder
    round 0  -> Choose: the evaluation set, drawn uniformly
    round 1  -> Choose, without labels
    rounds 2.. -> Train, then Choose for each device that runs out of work
    the first open round has ended, and a training has begun since -> Close, with its report
    all rounds are closed -> Publish

One job runs at a time, while workers measure. On GPUs the learner runs ahead: the next round is
chosen while there is still work for as long as choosing will take. On CPU devices, whose cores
measurements and the learner share, one thing runs at a time, and nothing is learned before all that
is planned has been measured.

Once a stop rule holds, nothing more begins: what runs ends and is learned from, and what was only
planned counts as ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from trappm.cluster.stop_rules import Stop, StopRules, stop_by_deadline
from trappm.profiler.records import number_text
from trappm.store.records import Standing

_MARGIN = 2.0
"""Training starts when the waiting work lasts this many times as long as the last training."""


@dataclass(frozen=True, kw_only=True)
class CampaignPlan:
    """Assignments of a campaign by device and round; each device has a share of every round."""

    devices: tuple[str, ...]
    """Device keys, the source first."""
    shares: Mapping[str, Sequence[int]]
    """Number of assignments per round by device: evaluation, initial, then acquired rounds."""
    one_at_a_time: bool
    """True if measurements and the learner use the host in turn, as they share its cores."""
    traces_elsewhere: bool = False
    """True if steps are traced on nodes that do not measure."""
    rules: StopRules = field(default_factory=StopRules)

    @property
    def rounds(self) -> int:
        return len(self.shares[self.devices[0]])


@dataclass(frozen=True)
class MakePool:
    """Trace a step of each model; those that have a graph make the pool."""


@dataclass(frozen=True)
class Prepare:
    """Trace the other steps, give the learner the pool, and have it train its encoder."""


@dataclass(frozen=True)
class Choose:
    """Choose and store a device's part of a round; that of round 0 is drawn."""

    device: str
    round_number: int
    count: int


@dataclass(frozen=True)
class Train:
    """Train on all labels."""

    is_last_chance: bool
    """True if no label is left to wait for if the source has no heads afterwards."""


@dataclass(frozen=True)
class Close:
    """Close a round: its assignments have ended, and the latest training knew them all."""

    round_number: int


@dataclass(frozen=True)
class Publish:
    """Publish a snapshot, move the alias, and finish."""


Job = MakePool | Prepare | Choose | Train | Close | Publish


@dataclass(frozen=True)
class LearnerState:
    """Knowledge of the learner's process, which ends with it."""

    is_ready: bool = False
    """True if it has the pool and its encoder."""
    has_heads: bool = False
    """True if the source device has heads to choose by."""
    known: int | None = None
    """Number of assignments that had ended when its last training began."""
    training_s: float = 0.0
    """Duration of its last training; that of the encoder before the first one."""
    may_choose: bool = False
    """True directly after a training, and as long as choices follow it."""
    has_failed: bool = False
    """True if it cannot be started again: what is planned is still measured."""

    @property
    def lacks_heads(self) -> bool:
        """Return whether a training has ended without heads."""
        return self.known is not None and not self.has_heads


def next_job(
    standing: Standing, plan: CampaignPlan, learner: LearnerState, workers: Mapping[str, int]
) -> Job | None:
    """Return the next job; None while measurements must end first, or nothing is left to do.

    >>> plan = CampaignPlan(devices=("a100",), shares={"a100": [16, 16, 8]}, one_at_a_time=False)
    >>> begun = Standing(
    ...     state="running", rounds=[], pending=[], attempts={}, seconds={}, labels=0,
    ...     has_pool=True, is_enough=False,
    ... )
    >>> next_job(begun, plan, LearnerState(is_ready=True), {"a100": 8})
    Choose(device='a100', round_number=0, count=16)

    Args:
        standing: The campaign in the store.
        plan: What the campaign file asks for.
        learner: What the learner knows. It is idle.
        workers: Number of workers that may measure, by device.
    """
    if not standing.has_pool:
        return MakePool()
    rounds = _Rounds(standing, plan)
    if 0 in rounds.open and rounds.has_ended(0):
        return Close(0)  # nothing is learned from the evaluation set
    if learner.has_failed:
        return None
    is_ready = learner.is_ready or plan.traces_elsewhere
    if is_ready and (draw := next(rounds.unplanned_parts(0), None)):
        return draw
    if not learner.is_ready:
        return Prepare()
    return _job_of_learner(standing, plan, learner, workers)


def _job_of_learner(
    standing: Standing, plan: CampaignPlan, learner: LearnerState, workers: Mapping[str, int]
) -> Job | None:
    """Return the next job of a learner that has its encoder: close, publish, choose or train."""
    rounds = _Rounds(standing, plan)
    knows_all = learner.known == standing.ended
    if knows_all and (learner.has_heads or standing.is_enough):
        if not rounds.open:
            return None if standing.leased else Publish()
        if rounds.has_ended(rounds.open[0]):
            return Close(rounds.open[0])
    if choice := next(rounds.unplanned_parts(1), None):
        return choice
    short_of_work = [d for d in plan.devices if _is_short(d, standing, plan, learner, workers)]
    if short_of_work and learner.has_heads and (learner.may_choose or knows_all):
        return rounds.first_unplanned_part(short_of_work[0])
    if plan.one_at_a_time and (standing.leased or count_waiting(standing, plan, learner)):
        return None
    has_all_ended = all(map(rounds.has_ended, rounds.open))
    if knows_all or not (short_of_work or has_all_ended):
        return None  # planned assignments are measured first
    source = plan.devices[0]
    mine = [part for part in standing.pending if part.device == source]
    is_last_chance = not mine
    to_come = count_waiting(standing, plan, learner)[source] + sum(part.leased for part in mine)
    if learner.known is None and 2 * to_come > plan.shares[source][1]:
        return None  # half of the initial round is the least to choose by
    if learner.lacks_heads and not (is_last_chance or standing.is_enough):
        return None  # there were too few labels: wait for all of the initial round
    return Train(is_last_chance)


def due_before(
    standing: Standing, plan: CampaignPlan, learner: LearnerState, device: str
) -> int | None:
    """Return the round from which on assignments wait; None: all may be measured.

    What failed is due a round later, once that is planned. After the last round, and while there
    are too few labels to choose by, nothing is worth waiting for. A learner that has failed plans
    no other round.
    """
    number = _Rounds(standing, plan).first_unplanned(device)
    is_last = number == plan.rounds or learner.has_failed
    return None if is_last or learner.lacks_heads else number


def count_waiting(standing: Standing, plan: CampaignPlan, learner: LearnerState) -> Counter[str]:
    """Return the number of assignments by device that may be measured now."""
    counts = Counter[str]()
    if may_measure(standing, plan):
        for part in standing.pending:
            before = due_before(standing, plan, learner, part.device)
            if part.waiting and (before is None or part.due < before):
                counts[part.device] += part.waiting
    return counts


def may_measure(standing: Standing, plan: CampaignPlan, *, begun: int = 0) -> bool:
    """Return whether one more measurement may begin, in addition to all that run.

    Args:
        standing: The campaign in the store.
        plan: What the campaign file asks for.
        begun: Number of measurements that have begun since then.
    """
    return not standing.is_enough and _spent(standing, plan, begun) is None


def stop_that_holds(standing: Standing, plan: CampaignPlan, now: datetime) -> Stop | None:
    """Return the rule by which nothing more may begin: the deadline, or a budget that is spent."""
    if standing.is_enough:
        return None
    if (stop := stop_by_deadline(plan.rules, now)) is not None:
        return stop
    rounds = _Rounds(standing, plan)
    unplanned = any(rounds.first_unplanned(d) < plan.rounds for d in plan.devices)
    if standing.leased or not (unplanned or standing.pending):
        return None
    return _spent(standing, plan)


def _spent(standing: Standing, plan: CampaignPlan, begun: int = 0) -> Stop | None:
    """Return the first budget that is spent; measurements that run count as labels."""
    labels = standing.labels + standing.leased + begun
    seconds = sum(standing.seconds.values())
    for rule, limit, spent in plan.rules.budgets(labels, seconds):
        if spent >= limit * (1.0 - 1e-9):  # sums of seconds are not exact
            return Stop(rule, f"{number_text(spent)} of {number_text(limit)} {rule} are spent")
    return None


class _Rounds:
    """Rounds of a campaign: planned by device, ended, closed. One has ended when all parts have."""

    def __init__(self, standing: Standing, plan: CampaignPlan) -> None:
        self._standing, self._plan = standing, plan
        known = {part.number: part for part in standing.rounds}
        numbers = sorted(known) if standing.is_enough else range(plan.rounds)
        self.open = [n for n in numbers if n not in known or not known[n].is_closed]
        """Rounds that are not closed, the earliest first."""
        self._planned = {number: part.planned for number, part in known.items()}
        self._unended = Counter[tuple[int, str]]()
        for part in standing.pending:  # what is due after the last open round belongs to it
            number = next((n for n in self.open if n >= part.due), max(self.open, default=0))
            waiting = 0 if standing.is_enough else part.waiting
            self._unended[number, part.device] += waiting + part.leased

    def has_ended(self, number: int) -> bool:
        planned = self._planned.get(number, {})
        return all(
            (device in planned or self._standing.is_enough) and not self._unended[number, device]
            for device in self._plan.devices
        )

    def first_unplanned(self, device: str) -> int:
        """Return the first round whose part is not planned; the number of rounds if all are."""
        numbers = range(self._plan.rounds)
        return next((n for n in numbers if device not in self._planned.get(n, {})), len(numbers))

    def first_unplanned_part(self, device: str) -> Choose:
        number = self.first_unplanned(device)
        return Choose(device, number, self._plan.shares[device][number])

    def unplanned_parts(self, number: int) -> Iterator[Choose]:
        """Yield the parts up to a round that are not planned, if one may still begin."""
        if may_measure(self._standing, self._plan):
            for device in self._plan.devices:
                if self.first_unplanned(device) <= number:
                    yield self.first_unplanned_part(device)


def _is_short(
    device: str,
    standing: Standing,
    plan: CampaignPlan,
    learner: LearnerState,
    workers: Mapping[str, int],
) -> bool:
    """Return whether the device's part of its next round should be planned now."""
    is_planned = _Rounds(standing, plan).first_unplanned(device) == plan.rounds
    if is_planned or not may_measure(standing, plan):
        return False
    count = count_waiting(standing, plan, learner)[device]
    if not count or plan.one_at_a_time:
        return not count
    at_once = max(1, workers.get(device, 0))
    attempts = standing.attempts.get(device, 0)
    mean_s = standing.seconds[device] / attempts if attempts else 0.0
    return count <= at_once or 0 < count * mean_s / at_once <= _MARGIN * learner.training_s
