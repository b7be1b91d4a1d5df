"""The rules of a campaign: its next job, its end, and its share of GPUs.

They are pure functions of the campaign in the label store and of its learner's state. Only
`find_stop` and `find_end` read the store themselves.

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
planned counts as ended. A target error is checked after each training, budgets before each
measurement, the deadline once per second.

A campaign takes as many GPUs of a kind as it has work for, up to its `max_workers`. When others
have work for the same kind, each has an equal share. A campaign that has more than its share gives
a GPU up, once its measurement has ended, for each one that another campaign lacks of its own share.
So no GPU is idle while any campaign has work for it, and the second of two campaigns begins within
a measurement of the first.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from trappm.cluster.campaign.training import Judgement, Spent, training_reports
from trappm.cluster.spec import (
    CampaignBudget,
    CampaignSpec,
    StopRules,
    budget_seconds,
    runs_nothing,
)
from trappm.profiler.records import is_cpu_device, number_text
from trappm.store import AssignmentState, CampaignRecord, Store
from trappm.store.campaigns import STOP_EVENT
from trappm.store.records import Standing

MIN_ERROR_PERCENT = 1e-3
"""Errors below this percentage count as this."""

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


def plan_of(spec: CampaignSpec, traces_elsewhere: bool = False) -> CampaignPlan:
    """Return what a campaign file asks for.

    On CPU devices one thing runs at a time. The same holds for simulated and replayed devices:
    waiting for the learner costs no GPU there, each round learns from the one before, and the
    campaign can be repeated.
    """
    devices = spec.devices.keys
    return CampaignPlan(
        devices=devices,
        shares={device: spec.shares(device) for device in devices},
        one_at_a_time=any(is_cpu_device(d) or runs_nothing(d) for d in devices),
        traces_elsewhere=traces_elsewhere,
        rules=spec.stop or StopRules(),
    )


# The next job.


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
    ended_at_training: int | None = None
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
        return self.ended_at_training is not None and not self.has_heads


def next_job(
    standing: Standing, plan: CampaignPlan, learner: LearnerState, workers: Mapping[str, int]
) -> Job | None:
    """Return the next job; None while measurements must end first, or nothing is left to do.

    >>> plan = CampaignPlan(devices=("a100",), shares={"a100": [16, 16, 8]}, one_at_a_time=False)
    >>> begun = Standing(
    ...     state="running", rounds=[], pending=[], attempts={}, seconds={}, measured={},
    ...     labels=0, has_pool=True, is_enough=False,
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
    rounds = _RoundStates(standing, plan)
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
    rounds = _RoundStates(standing, plan)
    knows_all = learner.ended_at_training == standing.ended
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
    if learner.ended_at_training is None and 2 * to_come > plan.shares[source][1]:
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
    number = _RoundStates(standing, plan).first_unplanned(device)
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


class _RoundStates:
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
    is_planned = _RoundStates(standing, plan).first_unplanned(device) == plan.rounds
    if is_planned or not may_measure(standing, plan):
        return False
    count = count_waiting(standing, plan, learner)[device]
    if not count or plan.one_at_a_time:
        return not count
    at_once = max(1, workers.get(device, 0))
    attempts = standing.attempts.get(device, 0)
    mean_s = standing.seconds[device] / attempts if attempts else 0.0
    return count <= at_once or 0 < count * mean_s / at_once <= _MARGIN * learner.training_s


# Stop rules.


@dataclass(frozen=True)
class Stop:
    """The stop rule that holds, with its reason."""

    rule: str
    reason: str
    """One line for people."""


@dataclass(frozen=True, kw_only=True)
class CampaignEnd(Stop):
    """Stop rule that ended a campaign, or that will end it first at the present rate."""

    holds: bool
    """True if it has ended the campaign."""
    unmeasured: int | None = None
    """Number of configurations that were planned and not measured, if the rule holds."""
    labels: int | None = None
    """Number of labels at which it will hold, if it does not yet."""
    at: datetime.datetime | None = None
    """Time at which it will hold, in UTC."""


def may_measure(standing: Standing, plan: CampaignPlan, *, begun: int = 0) -> bool:
    """Return whether one more measurement may begin, in addition to all that run.

    Args:
        standing: The campaign in the store.
        plan: What the campaign file asks for.
        begun: Number of measurements that have begun since then.
    """
    return not standing.is_enough and _spent(standing, plan, begun) is None


def stop_that_holds(standing: Standing, plan: CampaignPlan, now: datetime.datetime) -> Stop | None:
    """Return the rule by which nothing more may begin: the deadline, or a budget that is spent."""
    if standing.is_enough:
        return None
    if (stop := stop_by_deadline(plan.rules, now)) is not None:
        return stop
    rounds = _RoundStates(standing, plan)
    unplanned = any(rounds.first_unplanned(d) < plan.rounds for d in plan.devices)
    if standing.leased or not (unplanned or standing.pending):
        return None
    return _spent(standing, plan)


def _spent(standing: Standing, plan: CampaignPlan, begun: int = 0) -> Stop | None:
    """Return the first budget that is spent; measurements that run count as labels."""
    labels = standing.labels + standing.leased + begun
    seconds = budget_seconds(standing.seconds, plan.devices)
    for rule, limit, spent in plan.rules.budgets(labels, seconds, plan.devices):
        if spent >= limit * (1.0 - 1e-9):  # sums of seconds are not exact
            return Stop(rule, f"{number_text(spent)} of {number_text(limit)} {rule} are spent")
    return None


def stop_by_target(
    rules: StopRules, evaluation: Sequence[Judgement], devices: Sequence[str]
) -> Stop | None:
    """Return a stop if all targets are reached on all devices with the wanted confidence."""
    reasons = []
    for metric, target in (rules.target_mape or {}).items():
        for device in devices:
            judged = [j for j in evaluation if (j.device, j.metric) == (device, metric)]
            bound = upper_bound(judged, rules.confidence)
            if bound > target:
                return None
            mape = fmean(judgement.error_percent for judgement in judged)
            reasons.append(
                f"{metric} on {device}: {mape:.2f} %, with {rules.confidence:.0%} "
                f"confidence below {bound:.2f} % (target {number_text(target)} %)"
            )
    return Stop("target", "; ".join(reasons)) if reasons else None


def upper_bound(judged: Sequence[Judgement], confidence: float) -> float:
    """Return the upper confidence bound of a mean error; infinite below two architectures.

    Batch sizes of one architecture have similar errors, so the bound is over architectures.
    Their errors are taken as log-normal (Cox's method with Student's t; Zhou and Gao 1997).
    Resampling needs no distribution, but its bound is too low with few architectures.
    """
    errors: dict[str | None, list[float]] = defaultdict(list)
    for judgement in judged:
        errors[judgement.architecture].append(judgement.error_percent)
    free = len(errors) - 1
    if free < 1:
        return np.inf
    logs = np.log(np.maximum([fmean(group) for group in errors.values()], MIN_ERROR_PERCENT))
    spread = float(np.var(logs, ddof=1))
    error = np.sqrt(spread / len(errors) + spread**2 / (2 * free))
    from scipy import stats  # type: ignore[import-untyped]  # half a second, for few campaigns

    bound = logs.mean() + spread / 2 + stats.t.ppf(confidence, free) * error
    return float(np.exp(min(bound, 50.0)))


def stop_by_deadline(rules: StopRules, now: datetime.datetime) -> Stop | None:
    """Return a stop if the deadline has passed."""
    if rules.ends_at is None or now < rules.ends_at:
        return None
    return Stop("clock", f"it is past {_time_text(rules.ends_at)}")


def forecast_end(
    rules: StopRules, begin: Spent, now: Spent, planned: int, devices: Sequence[str]
) -> CampaignEnd | None:
    """Return what will end a campaign first at the pace so far; None if there is no pace yet.

    The pace is that since `begin`, such as the launch, and the `planned` labels of all rounds end
    the campaign in any case. Targets are not forecast: errors do not fall at a rate.
    """
    labels, pace_s = now.labels - begin.labels, (now.at - begin.at).total_seconds()
    if labels <= 0 or pace_s <= 0:
        return None
    label_s = pace_s / labels
    ends = [(float(planned), "rounds", f"the {planned} labels of all rounds will be there")]
    ends += [
        (now.labels * limit / spent, rule, f"{number_text(limit)} {rule} will be spent")
        for rule, limit, spent in rules.budgets(now.labels, now.budget_seconds, devices)
        if spent > 0
    ]
    if rules.ends_at is not None:
        at_labels = now.labels + (rules.ends_at - now.at).total_seconds() / label_s
        ends.append((at_labels, "clock", f"it will be {_time_text(rules.ends_at)}"))
    at_labels, rule, reason = min(ends, key=lambda end: end[0])
    at_labels = max(at_labels, now.labels)
    wait = datetime.timedelta(seconds=(at_labels - now.labels) * label_s)
    return CampaignEnd(rule, reason, holds=False, labels=round(at_labels), at=now.at + wait)


def find_stop(store: Store, campaign_id: str) -> Stop | None:
    """Return the stop rule that has ended a campaign; None if none has."""
    events = store.campaigns.events(campaign_id, kind=STOP_EVENT)
    return next((Stop(e.message["rule"], e.message["told"]) for e in events), None)


def find_end(store: Store, campaign: CampaignRecord, budget: CampaignBudget) -> CampaignEnd | None:
    """Return the stop rule that ended a campaign, else a forecast, else None (no pace yet)."""
    held = find_stop(store, campaign.id)
    if held is not None:
        counts = store.assignments.counts(campaign.id).values()
        unmeasured = sum(states.get(AssignmentState.OPEN, 0) for states in counts)
        return CampaignEnd(held.rule, held.reason, holds=True, unmeasured=unmeasured)
    spent = [r.spent for r in training_reports(store, campaign.id) if r.spent is not None]
    if not spent:
        return None
    launch = Spent(0, 0.0, datetime.datetime.fromisoformat(campaign.created_at))
    begin = spent[0] if len(spent) > 1 else launch
    return forecast_end(
        budget.stop or StopRules(), begin, spent[-1], budget.total, budget.devices.keys
    )


def _time_text(at: datetime.datetime) -> str:
    return f"{at.astimezone(datetime.UTC):%Y-%m-%d %H:%M} UTC"


# Shares of GPUs, and the time to go.


@dataclass(frozen=True)
class Need:
    """Work of one campaign on one device."""

    waiting: int
    leased: int
    max_workers: int

    @property
    def workers(self) -> int:
        """Number of workers that it could use."""
        return min(self.waiting + self.leased, self.max_workers)


def most_workers(mine: Need, others: Iterable[Need], gpus: int) -> int:
    """Return how many workers a campaign may have on a device.

    Args:
        mine: The campaign's own work.
        others: Work of the other campaigns that run on the cluster, of the same label store.
        gpus: Number of workers that the cluster has room for; 0 while unknown.
    """
    rivals = [need for need in others if need.workers]
    if not rivals or not gpus:
        return mine.max_workers
    share = math.ceil(gpus / (1 + len(rivals)))
    lacking = sum(max(min(need.workers, share) - need.leased, 0) for need in rivals)
    if not lacking:
        return mine.max_workers
    return min(mine.max_workers, max(share, mine.leased - lacking))


def seconds_to_go(
    spec: CampaignSpec, standing: Standing, training_s: float, workers: Mapping[str, int]
) -> float | None:
    """Return the expected seconds to the end of a campaign; None before the first measurement.

    The time of a configuration is that of all its attempts, as many fail on a busy machine.
    Labels from earlier campaigns took no time here, so they do not count.
    """
    attempts = sum(standing.attempts.values())
    if not attempts:
        return None
    pending, planned = Counter[str](), Counter[str]()
    for part in standing.pending:
        pending[part.device] += part.waiting + part.leased
    for known in standing.rounds:
        planned.update(known.planned)
    measured = sum(standing.measured.values())
    overall_s = sum(standing.seconds.values()) / (measured or attempts)
    total_s = 0.0
    for device in spec.devices.keys:
        own_s = standing.seconds_per_configuration(device)
        each_s = overall_s if own_s is None else own_s
        to_come = max(spec.budget(device) - planned[device], 0) + pending[device]
        total_s += each_s * to_come / max(1, workers.get(device, 0))
    open_rounds = 2 + spec.rounds.count - sum(known.is_closed for known in standing.rounds)
    return total_s + max(open_rounds - 1, 1) * training_s
