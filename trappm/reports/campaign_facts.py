"""Facts of campaigns from their label store, wherever they run.

`trappm campaign status` and `report`, their JSON and the page show them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import TypeAdapter

from trappm.cluster.campaign.process import has_live_owner
from trappm.cluster.campaign.rules import CampaignEnd, find_end, find_stop
from trappm.cluster.campaign.training import TrainingReport
from trappm.cluster.launch import LOST, RETRIED
from trappm.cluster.spec import CampaignBudget, SecondsByKind, runs_nothing
from trappm.profiler.measuring.canary import CanaryDecision, CanaryReading
from trappm.profiler.records import Outcome, is_cpu_device
from trappm.profiler.steps.sampling import is_contended
from trappm.store import (
    Assignment,
    AssignmentState,
    CampaignRecord,
    CampaignState,
    LabelFilter,
    Store,
)
from trappm.store.campaigns import ENDED
from trappm.store.records import EventRecord, Purpose, Standing, record_of

WINDOW_MIN = 10.0
"""Window of rates in minutes."""
UNKNOWN = "unknown"
"""Decision about a device whose last reading was `ok`, but half of whose readings failed."""
STARTING = "starting"
"""State of a campaign that is to run, and whose process has not begun."""
INTERRUPTED = "interrupted"
"""State of a campaign that is running by its store, but whose process is gone."""


@dataclass(frozen=True, kw_only=True)
class CampaignSummary:
    """A campaign in the list of all campaigns."""

    id: str
    name: str
    state: str
    next_command: str | None
    """Command that continues the campaign if it was interrupted or paused."""
    missing: int
    """Number of configurations that were tried and have no label."""
    labels: int
    seed: int
    created_at: str
    finished_at: str | None
    devices: Mapping[str, Mapping[str, int]]
    """Number of assignments by device and state."""


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Progress and rate of a campaign on one device."""

    done: int
    failed: int
    budget: int
    """Number of configurations that the whole campaign measures."""
    measuring: int
    workers: int
    attempts_per_minute: float


@dataclass(frozen=True, kw_only=True)
class Missing:
    """Configurations that a campaign planned to measure and that have no label."""

    count: int
    planned: int
    outcomes: Mapping[str, int]
    """Number by outcome of the last attempt; `lost` if the worker was lost."""
    reasons: Sequence[str]
    """One line for each device and outcome: the number, and the message of one attempt."""
    command: str | None
    """Command that tries them again; None if the campaign measures no more."""
    text: str
    """All of this in one or two sentences."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of measuring, failed attempts included."""

    gpu_hours: float
    cpu_hours: float
    """Hours of measuring on CPU devices, of any number of cores."""
    gpu_hours_to_come: float | None
    """Expected if no stop rule holds; None before the first attempt on a device that has work."""
    cpu_hours_to_come: float | None
    money: float | None
    """None without `stop.price_per_gpu_hour` in the campaign file; CPU hours cost nothing."""
    money_to_come: float | None

    def __str__(self) -> str:
        def amount(gpu_hours: float, cpu_hours: float, money: float | None) -> str:
            hours = {"GPU-hours": gpu_hours, "CPU-hours": cpu_hours}
            parts = [f"{value:,.2f} {unit}" for unit, value in hours.items() if value]
            text = " and ".join(parts) or "nothing"
            return text + ("" if money is None else f" (money: {money:,.2f})")

        line = f"spent on measuring: {amount(self.gpu_hours, self.cpu_hours, self.money)}"
        if self.gpu_hours_to_come is None or self.cpu_hours_to_come is None:
            return line
        to_come = amount(self.gpu_hours_to_come, self.cpu_hours_to_come, self.money_to_come)
        return f"{line}; to come: about {to_come}"


@dataclass(frozen=True, kw_only=True)
class RoundFacts:
    """A round, with the report of the first training on all of its labels."""

    number: int
    purpose: Purpose
    is_closed: bool
    report: TrainingReport | None


@dataclass(frozen=True, kw_only=True)
class CanarySeries:
    """Comparable readings of one worker's canary."""

    device: str
    host: str
    stack_fingerprint: str
    canary: str
    readings: int
    step_times_ms: Sequence[float | None]
    reference_ms: float | None
    last_ms: float | None
    last_drift: float | None
    failed: int
    """Number of readings without a step time."""
    decision: str
    """Decision of the last reading; `unknown` if it is `ok` but half of all readings failed."""
    taken_at: str
    message: str | None
    """Reason for the decision, and the number of failed readings if there are any."""


@dataclass(frozen=True)
class Working:
    """A running measurement."""

    worker: str | None
    device: str
    configuration: str
    attempt: int


@dataclass(frozen=True, kw_only=True)
class CampaignFacts:
    """Everything that is shown of one campaign."""

    id: str
    name: str
    state: str
    next_command: str | None
    seed: int
    created_at: str
    finished_at: str | None
    spec: Mapping[str, Any]
    """Campaign file as it was launched."""
    devices: Mapping[str, DeviceFacts]
    """Progress by device, the source first."""
    minutes_to_go: float | None
    """Expected minutes to the end (of tracing, while steps are traced), as the campaign's process
    last said; None without one."""
    assignments: Mapping[str, Mapping[AssignmentState, int]]
    outcomes: Mapping[str, Mapping[str, int]]
    rounds: Sequence[RoundFacts]
    canary: Sequence[CanarySeries]
    rehearsal_on: Sequence[str]
    """Simulated devices."""
    snapshot: str | None
    end: CampaignEnd | None
    missing: Missing | None
    """None if every assignment that ended has a label or does not fit into memory."""
    cost: Cost
    working: Sequence[Working]
    events: Sequence[EventRecord]
    """Latest events in chronological order."""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def standing(self) -> str:
        """The state, with the command that continues the campaign."""
        text = self.state
        if self.next_command is not None:
            text += f"; continue with: {self.next_command}"
        if self.missing is not None and self.state == CampaignState.FINISHED:
            text += f", {self.missing.count} of {self.missing.planned} configurations are missing"
        return text

    @property
    def trained(self) -> list[tuple[RoundFacts, TrainingReport]]:
        """The rounds with a report, and their reports."""
        return [(r, r.report) for r in self.rounds if r.report is not None]

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON values."""
        values: dict[str, Any] = TypeAdapter(CampaignFacts).dump_python(self, mode="json")
        return values


def campaign_rows(store: Store) -> list[CampaignSummary]:
    """Return all campaigns, the latest first."""
    labels = store.campaigns.label_counts()
    return [
        record_of(
            CampaignSummary,
            campaign,
            state=live_state(campaign),
            next_command=_next_command(campaign),
            missing=len(store.assignments.list_failed(campaign.id)),
            labels=labels.get(campaign.id, 0),
            devices=_by_state(campaign, store.assignments.counts(campaign.id)),
        )
        for campaign in store.campaigns.all()
    ]


def campaign_facts(store: Store, campaign_id: str, *, latest_events: int = 5) -> CampaignFacts:
    """Return the facts of one campaign.

    Raises:
        InputError: There is no such campaign.
        CampaignError: Another version launched it, and its file cannot be read.
    """
    campaign = store.campaigns.get(campaign_id)
    budget = CampaignBudget.of(campaign)
    working = store.assignments.of_campaign(campaign_id, state=AssignmentState.LEASED)
    standing = store.campaigns.standing(campaign.id)
    devices = _devices(store, campaign, budget, working)
    eta_s = campaign.activity.eta_s
    rounds = [
        record_of(RoundFacts, r, report=TrainingReport.of(r.report))
        for r in store.rounds.all(campaign_id)
    ]
    return record_of(
        CampaignFacts,
        campaign,
        state=live_state(campaign),
        next_command=_next_command(campaign),
        devices=devices,
        minutes_to_go=None if eta_s is None else eta_s / 60,
        assignments=store.assignments.counts(campaign_id),
        outcomes=store.campaigns.outcome_counts(campaign_id),
        rounds=rounds,
        canary=_canary(store.canaries.all(campaign_id=campaign_id)),
        rehearsal_on=[d for d in budget.devices.keys if runs_nothing(d)],
        end=find_end(store, campaign, budget),
        missing=_find_missing(store, campaign),
        cost=_cost(campaign, budget, devices, standing),
        working=[Working(a.worker, a.device, str(a.configuration), a.attempts) for a in working],
        events=store.campaigns.events(campaign_id, last=latest_events),
    )


def live_state(campaign: CampaignRecord) -> str:
    """Return the state of a campaign; a running one may be starting, or its process gone."""
    if campaign.state is CampaignState.RUNNING and campaign.owner is None:
        return STARTING
    if campaign.state is CampaignState.RUNNING and not has_live_owner(campaign):
        return INTERRUPTED
    return str(campaign.state)


def _next_command(campaign: CampaignRecord) -> str | None:
    stands_still = live_state(campaign) in {STARTING, INTERRUPTED, CampaignState.PAUSED}
    return f"trappm campaign resume {campaign.id}" if stands_still else None


def _find_missing(store: Store, campaign: CampaignRecord) -> Missing | None:
    losses = store.assignments.losses(campaign.id)
    if not losses:
        return None
    failed: Counter[Outcome | None] = Counter()
    for loss in losses:
        failed[loss.outcome] += loss.count
    outcomes = {str(outcome or LOST): count for outcome, count in failed.items()}
    counts = store.assignments.counts(campaign.id)
    count, planned = sum(failed.values()), sum(sum(n.values()) for n in counts.values())
    unstable = failed.get(Outcome.UNSTABLE, 0)
    command = None
    if campaign.state is CampaignState.FINISHED and find_stop(store, campaign.id) is None:
        kinds = [o for o in outcomes if o not in RETRIED]
        only = f" --outcome {kinds[0]}" if len(kinds) == len(outcomes) else ""
        command = f"trappm campaign resume {campaign.id} --retry-failed{only}"
    if 2 * unstable >= count and all(map(is_cpu_device, counts)):
        is_busy = 2 * _count_contended(store, campaign.id) >= count
        reason = "other programs used the cores" if is_busy else "their steps were not steady"
        text = f"{count} of {planned} configurations could not be measured: {reason}."
        advice = " When it is quiet: " if is_busy else " Try them again with: "
    else:
        parts = ", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items()))
        text = f"{count} of {planned} configurations have no label (last attempts: {parts})."
        advice = " Try them again with: "
    return Missing(
        count=count,
        planned=planned,
        outcomes=outcomes,
        reasons=[
            f"{loss.device}: {loss.count} {loss.outcome or LOST}"
            + (f", such as: {loss.message.strip().splitlines()[0]}" if loss.message else "")
            for loss in losses
        ],
        command=command,
        text=text if command is None else text + advice + command,
    )


def _count_contended(store: Store, campaign_id: str) -> int:
    """Return the number of failed assignments whose last unstable attempt was contended."""
    unstable = LabelFilter(campaign=campaign_id, outcome=Outcome.UNSTABLE)
    contended: dict[tuple[str, str], bool] = {}
    for attempt in store.measurements.each(unstable):  # in the order in which they were recorded
        contended[attempt.device, attempt.configuration.id] = is_contended(attempt)
    failed = store.assignments.of_campaign(campaign_id, state=AssignmentState.FAILED)
    return sum(contended.get((a.device, a.configuration.id), False) for a in failed)


def _by_state(
    campaign: CampaignRecord, counts: Mapping[str, Mapping[AssignmentState, int]]
) -> dict[str, dict[str, int]]:
    devices = dict(campaign.spec.get("devices") or {})  # another version may have launched it
    return {
        device: {str(state): counts.get(device, {}).get(state, 0) for state in AssignmentState}
        for device in (devices.get("source"), devices.get("target"))
        if device
    }


def _devices(
    store: Store,
    campaign: CampaignRecord,
    budget: CampaignBudget,
    working: Sequence[Assignment],
) -> dict[str, DeviceFacts]:
    now = datetime.now(UTC)
    began = max(now - timedelta(minutes=WINDOW_MIN), datetime.fromisoformat(campaign.created_at))
    minutes = max((now - began).total_seconds() / 60, 1 / 60)
    counts = store.assignments.counts(campaign.id)
    lately = store.campaigns.outcome_counts(campaign.id, since=began.isoformat())

    def facts(device: str) -> DeviceFacts:
        states = counts.get(device, {})
        done = states.get(AssignmentState.DONE, 0)
        failed = states.get(AssignmentState.FAILED, 0)
        leases = [a.worker for a in working if a.device == device]
        return DeviceFacts(
            done=done,
            failed=failed,
            budget=budget.budget(device),
            measuring=len(leases),
            workers=len(set(leases)),
            attempts_per_minute=sum(lately.get(device, {}).values()) / minutes,
        )

    return {device: facts(device) for device in budget.devices.keys}


def _cost(
    campaign: CampaignRecord,
    budget: CampaignBudget,
    devices: Mapping[str, DeviceFacts],
    standing: Standing,
) -> Cost:
    to_come = {
        device: count
        for device, facts in devices.items()
        if campaign.state not in ENDED and (count := facts.budget - facts.done - facts.failed) > 0
    }
    price = None if budget.stop is None else budget.stop.price_per_gpu_hour
    spent = SecondsByKind.of(standing.seconds)
    known_s = {device: standing.seconds_per_configuration(device) for device in to_come}
    each_s = {device: own_s for device, own_s in known_s.items() if own_s is not None}
    left = None
    if len(each_s) == len(to_come):
        left = SecondsByKind.of(
            {device: to_come[device] * own_s for device, own_s in each_s.items()}
        )
    return Cost(
        gpu_hours=spent.gpu / 3600,
        cpu_hours=spent.cpu / 3600,
        gpu_hours_to_come=left and left.gpu / 3600,
        cpu_hours_to_come=left and left.cpu / 3600,
        money=None if price is None else price * spent.gpu / 3600,
        money_to_come=None if price is None or left is None else price * left.gpu / 3600,
    )


def _canary(readings: Iterable[CanaryReading]) -> list[CanarySeries]:
    series: dict[tuple[object, ...], list[CanaryReading]] = {}
    for reading in readings:
        series.setdefault(reading.series, []).append(reading)
    return [_canary_series(taken) for taken in series.values()]


def _canary_series(taken: Sequence[CanaryReading]) -> CanarySeries:
    last, failed = taken[-1], sum(reading.step_time_ms is None for reading in taken)
    is_unknown = last.decision is CanaryDecision.OK and 2 * failed >= len(taken)
    count = f"{failed} of {len(taken)} readings of the canary gave no step time" if failed else None
    return record_of(
        CanarySeries,
        last,
        canary=str(last.configuration),
        readings=len(taken),
        step_times_ms=[reading.step_time_ms for reading in taken],
        last_ms=last.step_time_ms,
        last_drift=last.relative_drift,
        failed=failed,
        decision=UNKNOWN if is_unknown else str(last.decision),
        message="; ".join(filter(None, (last.message, count))) or None,
    )
