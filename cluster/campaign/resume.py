"""Reads back from the store how far a campaign has come, for a machine that goes on from there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trappm.cluster.campaign.spec import CampaignSpec
from trappm.cluster.campaign.stop_check import rule_held
from trappm.cluster.scheduler.machine import Machine
from trappm.cluster.scheduler.messages import Course, Waiting, Worker
from trappm.cluster.scheduler.spend import Allowance
from trappm.profiler.records import is_cpu_device
from trappm.store import Assignment, Store


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
    report: Mapping[str, Any]
    """The latest; empty before the first training."""
    enough: bool
    """A stop rule held."""
    allowance: Allowance

    def machine(self, canary_is_due: Callable[[Worker], bool]) -> Machine:
        return Machine(
            self.course,
            canary_is_due=canary_is_due,
            waiting=self.waiting,
            next_rounds=self.next_rounds,
            closed=self.closed,
            enough=self.enough,
            allowance=self.allowance,
        )


def course_so_far(
    store: Store, campaign_id: str, spec: CampaignSpec, lease_s: float
) -> CourseSoFar:
    """How far a campaign has come whose leases were all released."""
    course = course_of(spec, lease_s)
    rounds = store.rounds.all(campaign_id)
    assignments = store.assignments.of_campaign(campaign_id)
    closed = [r.number for r in rounds if r.state == "closed"]
    planned = {(a.device, a.round_number) for a in assignments}
    planned |= {(device, number) for device in course.devices for number in closed}

    def first_unplanned(device: str) -> int:
        left = (n for n in range(course.rounds) if (device, n) not in planned)
        return next(left, course.rounds)

    return CourseSoFar(
        course=course,
        waiting=[waiting(a) for a in assignments if a.state == "open"],
        next_rounds={device: first_unplanned(device) for device in course.devices},
        closed=closed,
        ended=Counter(a.device for a in assignments if a.state in {"done", "failed"}),
        report=next((r.report for r in reversed(rounds) if r.report), {}),
        enough=rule_held(store, campaign_id) is not None,
        allowance=_allowance(store, campaign_id, spec),
    )


def _allowance(store: Store, campaign_id: str, spec: CampaignSpec) -> Allowance:
    """What may still be spent, by what the store knows to be spent."""
    if spec.stop is None or not spec.stop.have_budget:
        return Allowance()
    seconds = store.campaigns.measuring_seconds_by_device(campaign_id)
    attempts = store.campaigns.outcome_counts(campaign_id)
    return Allowance(
        spec.stop,
        labels=store.campaigns.label_counts(campaign_id).get(campaign_id, 0),
        seconds=sum(seconds.values()),
        mean_s={device: s / sum(attempts[device].values()) for device, s in seconds.items()},
        limit_s=spec.measuring_protocol.timeout_s,
    )


def course_of(spec: CampaignSpec, lease_s: float) -> Course:
    """What the state machine is to know of a campaign file.

    On CPU devices everything takes its turn. So it does where recorded labels answer, since an
    experiment with them is to be repeatable.
    """
    devices = spec.devices.keys
    shares = (spec.evaluation, spec.initial, *[spec.rounds] * spec.rounds.count)
    return Course(
        devices=devices,
        shares={device: [share.on(device, spec.devices) for share in shares] for device in devices},
        max_attempts=spec.max_attempts,
        keeps_host_quiet=any(is_cpu_device(d) or d.startswith("replay:") for d in devices),
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
