"""Reads back from the store how far a campaign has come, for a machine that goes on from there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trappm.cluster.campaign.stop_check import rule_held, training_reports
from trappm.cluster.scheduler.messages import Course, Waiting, Worker
from trappm.cluster.scheduler.spend import Spend
from trappm.cluster.scheduler.state_machine import Machine
from trappm.cluster.scheduler.training_report import TrainingReport
from trappm.cluster.spec import CampaignSpec
from trappm.cluster.workers.rehearsal import runs_nothing
from trappm.profiler.records import is_cpu_device
from trappm.store import Assignment, AssignmentState, Store
from trappm.store.records import RoundState

ENDED = frozenset({AssignmentState.DONE, AssignmentState.FAILED})


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


def course_so_far(
    store: Store, campaign_id: str, spec: CampaignSpec, lease_s: float
) -> CourseSoFar:
    """How far a campaign has come whose leases were all released."""
    course = course_of(spec, lease_s)
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
        ended=Counter(a.device for a in assignments if a.state in ENDED),
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


def course_of(spec: CampaignSpec, lease_s: float) -> Course:
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
        lease_s=lease_s,
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
