"""What the label store knows of a campaign: its course so far, its labels, and what ends it.

A campaign goes on from here after a restart, and reports read the same functions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from trappm.cluster.rehearsal import runs_nothing
from trappm.cluster.scheduler.messages import Course, Waiting, Worker
from trappm.cluster.scheduler.spend import Spend
from trappm.cluster.scheduler.state_machine import Machine
from trappm.cluster.scheduler.stop_rules import Stop, StopRules, forecast
from trappm.cluster.scheduler.training_report import LeftOut, Spent, TrainingReport
from trappm.cluster.spec import CampaignBudget, CampaignSpec
from trappm.learner.training_label import TrainingLabel
from trappm.profiler.devices.catalogue import card_name
from trappm.profiler.host.environment import stack_difference
from trappm.profiler.kernels.kernel_measurement import KernelMeasurement
from trappm.profiler.records import METRICS, is_cpu_device
from trappm.store import Assignment, AssignmentState, CampaignRecord, Store
from trappm.store.records import RoundState

ENOUGH = "enough"
"""The kind of event that records which stop rule held."""

_ENDED = frozenset({AssignmentState.DONE, AssignmentState.FAILED})


@dataclass(frozen=True, kw_only=True)
class CourseSoFar:
    """What the store knows of a campaign's course."""

    course: Course
    waiting: Sequence[Waiting]
    next_rounds: Mapping[str, int]
    """For each device, the first round whose part of it is not planned."""
    closed: Sequence[int]
    ended: Counter[str]
    """Assignments that need no measurement any more, by device."""
    report: TrainingReport
    """The latest; empty before the first training."""
    enough: bool
    """A stop rule held."""
    spend: Spend

    def machine(self, check_is_due: Callable[[Worker], bool]) -> Machine:
        return Machine(
            self.course,
            check_is_due=check_is_due,
            waiting=self.waiting,
            next_rounds=self.next_rounds,
            closed=self.closed,
            enough=self.enough,
            spend=self.spend,
        )


def course_so_far(store: Store, campaign_id: str, spec: CampaignSpec) -> CourseSoFar:
    """Return how far a campaign has come whose leases were all released."""
    course = course_of(spec)
    rounds = store.rounds.all(campaign_id)
    assignments = store.assignments.of_campaign(campaign_id)
    closed = [r.number for r in rounds if r.state is RoundState.CLOSED]
    planned = {(a.device, a.round_number) for a in assignments}
    planned |= {(device, number) for device in course.devices for number in closed}

    def first_unplanned(device: str) -> int:
        unplanned = (n for n in range(course.rounds) if (device, n) not in planned)
        return next(unplanned, course.rounds)

    return CourseSoFar(
        course=course,
        waiting=[waiting(a) for a in assignments if a.state is AssignmentState.OPEN],
        next_rounds={device: first_unplanned(device) for device in course.devices},
        closed=closed,
        ended=Counter(a.device for a in assignments if a.state in _ENDED),
        report=next(reversed(training_reports(store, campaign_id)), TrainingReport()),
        enough=rule_held(store, campaign_id) is not None,
        spend=_spend(store, campaign_id, spec),
    )


def _spend(store: Store, campaign_id: str, spec: CampaignSpec) -> Spend:
    """What may still be spent, by what the store knows to be spent."""
    if spec.stop is None or not spec.stop.have_budget:
        return Spend()
    seconds = store.campaigns.measuring_seconds_by_device(campaign_id)
    attempts = store.campaigns.outcome_counts(campaign_id)
    return Spend(
        spec.stop,
        labels=store.campaigns.label_counts(campaign_id).get(campaign_id, 0),
        seconds=sum(seconds.values()),
        mean_s={device: s / sum(attempts[device].values()) for device, s in seconds.items()},
        limit_s=spec.measuring_protocol.timeout_s,
    )


def course_of(spec: CampaignSpec) -> Course:
    """What the state machine is to know of a campaign file.

    On CPU devices everything takes its turn. So it does on devices that run nothing: there waiting
    for the learner costs no GPU, each round learns from the one before, and the experiment can be
    repeated.
    """
    devices = spec.devices.keys
    return Course(
        devices=devices,
        shares={device: spec.shares(device) for device in devices},
        max_attempts=spec.max_attempts,
        keeps_host_quiet=any(is_cpu_device(d) or runs_nothing(d) for d in devices),
    )


def waiting(assignment: Assignment) -> Waiting:
    """An open assignment, as the machine knows it."""
    return Waiting(
        assignment.id,
        assignment.device,
        assignment.round_number,
        assignment.rank,
        assignment.failures,
    )


def training_reports(store: Store, campaign_id: str) -> list[TrainingReport]:
    """Those with which rounds were closed, in their order."""
    reports = [TrainingReport.of(r.report) for r in store.rounds.all(campaign_id)]
    return [report for report in reports if report is not None]


def rule_held(store: Store, campaign_id: str) -> Stop | None:
    """The rule that has ended a campaign, or is just ending it."""
    events = store.campaigns.events(campaign_id, kind=ENOUGH)
    return next((Stop(e.message["rule"], e.message["told"]) for e in events), None)


@dataclass(frozen=True, kw_only=True)
class CampaignEnd:
    """What ended a campaign, or what will end it first at the pace so far."""

    rule: str
    reason: str
    """For people."""
    holds: bool
    """It has ended the campaign, or is just ending it."""
    unmeasured: int | None = None
    """Configurations that were planned for nothing, where a rule holds."""
    labels: int | None = None
    """At which it will hold, where it does not yet."""
    at: datetime | None = None
    """When it will hold."""


def end_of(store: Store, campaign: CampaignRecord, budget: CampaignBudget) -> CampaignEnd | None:
    """What ended a campaign or will end it; None while there is no pace to forecast from."""
    held = rule_held(store, campaign.id)
    if held is not None:
        counts = store.assignments.counts(campaign.id).values()
        unmeasured = sum(states.get(AssignmentState.OPEN, 0) for states in counts)
        return CampaignEnd(rule=held.rule, reason=held.reason, holds=True, unmeasured=unmeasured)
    spent = [r.spent for r in training_reports(store, campaign.id) if r.spent is not None]
    if not spent:
        return None
    launch = Spent(0, 0.0, datetime.fromisoformat(campaign.created_at))
    begin = spent[0] if len(spent) > 1 else launch
    coming = forecast(budget.stop or StopRules(), begin, spent[-1], budget.total)
    if coming is None:
        return None
    return CampaignEnd(
        rule=coming.rule,
        reason=coming.reason,
        holds=False,
        labels=round(coming.labels),
        at=coming.at.astimezone(UTC),
    )


@dataclass(frozen=True)
class TrainingLabels:
    """What a campaign's heads learn from and are judged by: one software stack and card a key."""

    labels: Sequence[TrainingLabel]
    left_out: Sequence[LeftOut]
    kernels: Mapping[str, Sequence[KernelMeasurement]]
    """By device: those that were timed under the stack of its labels, if any were."""


def training_labels(store: Store, campaign_id: str) -> TrainingLabels:
    """The labels that a campaign can learn from now, of one software stack for each device key.

    The same key on another software stack, or another card, is another device, whose labels would
    make one head of two things. That of most labels counts, of two alike the one planned first.
    """
    everything = store.labels.of_campaign(campaign_id)
    stacks: dict[str, Counter[str]] = defaultdict(Counter)
    for label in everything:
        stacks[label.device][label.fingerprint] += 1
    most = {device: counts.most_common(1)[0][0] for device, counts in stacks.items()}
    left_out, cards = [], {}
    for device, counts in sorted(stacks.items()):
        known = store.measurements.device_environments(device)
        cards[device] = card_name(device, [known[most[device]]])
        if len(counts) > 1:
            left_out += [
                LeftOut(
                    device,
                    stack,
                    count,
                    stack_difference(known[stack], known[most[device]]) or f"stack {stack}",
                )
                for stack, count in counts.items()
                if stack != most[device]
            ]
    labels = [
        TrainingLabel(
            configuration_id=label.configuration.id,
            device=label.device,
            role=str(label.role),
            values=tuple(getattr(label, metric) for metric in METRICS),
            provenance=label.provenance,
            memory_above_mib=label.memory_above_mib,
            card=cards[label.device],
        )
        for label in everything
        if label.fingerprint == most[label.device]
    ]
    kernels = {device: _kernels(store, device, most[device]) for device in most}
    return TrainingLabels(labels, tuple(left_out), kernels)


def _kernels(store: Store, device: str, stack: str) -> Sequence[KernelMeasurement]:
    """The last good attempts of each kernel of a device under a stack; simulated ones never."""
    environment = store.measurements.device_environments(device)[stack]
    same = [x for x in store.kernels.newest(device) if x.is_of(stack, environment)]
    latest = max(same, key=lambda stack: stack.timed_at, default=None)
    return () if latest is None else store.kernels.latest(device, latest.fingerprint)
