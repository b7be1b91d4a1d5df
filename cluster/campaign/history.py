"""State of a campaign in the label store: its plan, its labels, and what ends it.

A campaign continues from here after a restart, and reports use the same functions.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from trappm.cluster.campaign.next_job import CampaignPlan
from trappm.cluster.spec import CampaignBudget, CampaignSpec, runs_nothing
from trappm.cluster.stop_rules import CampaignEnd, Stop, StopRules, forecast
from trappm.cluster.training_report import LeftOut, Spent, TrainingReport
from trappm.learner.interface import CompiledPair, TrainingLabel
from trappm.profiler.devices.catalogue import card_name
from trappm.profiler.host.environment import stack_difference
from trappm.profiler.records import METRICS, Execution, Provenance, is_cpu_device
from trappm.store import AssignmentState, CampaignRecord, Store
from trappm.store.campaigns import STOP_EVENT
from trappm.store.records import Role


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


def training_reports(store: Store, campaign_id: str) -> list[TrainingReport]:
    """Return the reports with which rounds were closed, in their order."""
    reports = [TrainingReport.of(r.report) for r in store.rounds.all(campaign_id)]
    return [report for report in reports if report is not None]


def find_stop(store: Store, campaign_id: str) -> Stop | None:
    """Return the stop rule that has ended a campaign; None if none has."""
    events = store.campaigns.events(campaign_id, kind=STOP_EVENT)
    return next((Stop(e.message["rule"], e.message["told"]) for e in events), None)


def find_end(store: Store, campaign: CampaignRecord, budget: CampaignBudget) -> CampaignEnd | None:
    """Return what ended a campaign or will end it; None while there is no pace to forecast."""
    held = find_stop(store, campaign.id)
    if held is not None:
        counts = store.assignments.counts(campaign.id).values()
        unmeasured = sum(states.get(AssignmentState.OPEN, 0) for states in counts)
        return CampaignEnd(held.rule, held.reason, holds=True, unmeasured=unmeasured)
    spent = [r.spent for r in training_reports(store, campaign.id) if r.spent is not None]
    if not spent:
        return None
    launch = Spent(0, 0.0, datetime.fromisoformat(campaign.created_at))
    begin = spent[0] if len(spent) > 1 else launch
    return forecast(budget.stop or StopRules(), begin, spent[-1], budget.total)


@dataclass(frozen=True)
class TrainingLabels:
    """Labels of a campaign's heads, of one software stack and card per device key."""

    labels: Sequence[TrainingLabel]
    left_out: Sequence[LeftOut]


def training_labels(store: Store, campaign_id: str) -> TrainingLabels:
    """Return the eager labels that a campaign can learn from, of one software stack per device key.

    The same key on another software stack or card is another device, which needs a head of its own.
    The stack with most labels counts; if two have as many, the one planned first.
    """
    eager_labels = [
        label for label in store.labels.of_campaign(campaign_id)
        if label.configuration.execution is Execution.EAGER
    ]  # fmt: skip
    stacks: dict[str, Counter[str]] = defaultdict(Counter)
    for label in eager_labels:
        stacks[label.device][label.fingerprint] += 1
    most = {device: counts.most_common(1)[0][0] for device, counts in stacks.items()}
    left_out, cards = [], {}
    for device, counts in sorted(stacks.items()):
        known = store.measurements.device_environments(device)
        here = known[most[device]]
        cards[device] = card_name(device, [here])
        for stack, count in counts.items():
            if stack != most[device]:
                why = stack_difference(known[stack], here) or f"stack {stack}"
                left_out.append(LeftOut(device, stack, count, why))
    errors = store.labels.step_time_errors(campaign_id)
    labels = [
        TrainingLabel(
            configuration_id=label.configuration.id,
            device=label.device,
            role=str(label.role),
            values=tuple(getattr(label, metric) for metric in METRICS),
            provenance=label.provenance,
            memory_above_mib=label.memory_above_mib,
            card=cards[label.device],
            step_time_error=errors.get(label.id),
        )
        for label in eager_labels
        if label.fingerprint == most[label.device]
    ]
    return TrainingLabels(labels, tuple(left_out))


def compiled_pairs(store: Store, campaign_id: str) -> list[CompiledPair]:
    """Return the labels of equal steps, eager and compiled, of one role and software stack."""
    times_ms = {
        (x.device, x.fingerprint, x.role, x.configuration): x.step_time_ms
        for x in store.labels.of_campaign(campaign_id)
        if x.step_time_ms is not None
    }
    pairs = []
    for (device, stack, role, step), compiled_ms in times_ms.items():
        eager = replace(step, execution=Execution.EAGER)
        eager_ms = times_ms.get((device, stack, role, eager))
        if step.execution is Execution.COMPILE and eager_ms is not None:
            pairs.append(
                CompiledPair(
                    device=device,
                    phase=step.phase,
                    is_held_out=role == Role.EVALUATE,
                    eager=eager.id,
                    compiled=step.id,
                    log_ratio=math.log(compiled_ms / eager_ms),
                )
            )
    return pairs


def unfit_to_publish(labels: Iterable[TrainingLabel]) -> str | None:
    """Return why labels must not train a snapshot; None if they may."""
    simulated = Provenance.SIMULATED
    unfit = {x.device for x in labels if x.provenance == simulated or runs_nothing(x.device)}
    if not unfit:
        return None
    return f"the labels of {', '.join(sorted(unfit))} come from no device that was measured here"
