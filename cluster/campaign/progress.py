"""The progress that a running campaign reports: stage, counts, time to go, lines of news."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from trappm.cluster.campaign.training_report import TrainingReport
from trappm.cluster.spec import CampaignSpec
from trappm.profiler.records import Measurement, Outcome
from trappm.store.records import Standing

LINES_KEPT = 1_000
"""Number of lines of news that are kept for watchers; the store keeps all events."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a campaign, for people to watch."""

    stage: str = "starting"
    done: int = 0
    total: int = 0
    eta_s: float | None = None
    """Expected time to the end of the whole campaign; None while unknown."""
    current: tuple[str, ...] = ()
    """Running measurements, a line each."""
    lines: tuple[str, ...] = field(default=(), repr=False)
    """The latest news, `LINES_KEPT` at most."""
    line_count: int = 0
    """Number of lines of news in all."""

    def lines_after(self, seen: int) -> tuple[str, ...]:
        """Return the lines of news after the first `seen`."""
        unseen = max(0, self.line_count - seen)
        return self.lines[max(0, len(self.lines) - unseen) :]


def seconds_to_go(
    spec: CampaignSpec, standing: Standing, training_s: float, workers: Mapping[str, int]
) -> float | None:
    """Return the expected seconds to the end of a campaign; None before the first measurement."""
    attempts = sum(standing.attempts.values())
    if not attempts:
        return None
    overall_s = sum(standing.seconds.values()) / attempts
    pending, planned = Counter[str](), Counter[str]()
    for part in standing.pending:
        pending[part.device] += part.waiting + part.leased
    for known in standing.rounds:
        planned.update(known.planned)
    total_s = 0.0
    for device in spec.devices.keys:
        count = standing.attempts.get(device)
        each_s = standing.seconds[device] / count if count else overall_s
        to_come = max(spec.budget(device) - planned[device], 0) + pending[device]
        total_s += each_s * to_come / max(1, workers.get(device, 0))
    open_rounds = 2 + spec.rounds.count - sum(known.is_closed for known in standing.rounds)
    return total_s + max(open_rounds - 1, 1) * training_s


def measurement_line(measurement: Measurement) -> str:
    """Return one line for a measurement."""
    if measurement.step is None:
        result = f"{measurement.outcome}: {measurement.message}"
    else:
        memory = measurement.memory_mib
        result = f"{measurement.step.median_ms:,.1f} ms"
        result += "" if memory is None else f", {memory:,.0f} MiB"
        result += "" if measurement.outcome is Outcome.OK else f"  {measurement.outcome}"
    return f"{measurement.device}  {measurement.configuration}  {result}"


def round_line(number: int, report: TrainingReport) -> str:
    """Return one line for a round whose heads have been judged."""
    parts = []
    for device, by_metric in report.devices.items():
        errors = [f"{metric} {e['mape']:.1f} %" for metric, e in by_metric.items()]
        parts.append(f"{device}: {', '.join(errors) or 'no label judges'}")
    return f"round {number}: error on held-out architectures: {'; '.join(parts)}"
