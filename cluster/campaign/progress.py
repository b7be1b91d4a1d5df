"""The progress that a running campaign reports: stage, counts, time to go, lines of news."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean

from trappm.cluster.scheduler.messages import AwaitQuiet, Task
from trappm.cluster.scheduler.state_machine import Machine
from trappm.cluster.scheduler.training_report import TrainingReport
from trappm.cluster.spec import CampaignSpec
from trappm.profiler.records import Measurement, Outcome

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
    spec: CampaignSpec, machine: Machine, ended: Counter[str], workers: Counter[str]
) -> float | None:
    """Return the expected seconds to the end of a campaign; None while unknown.

    Args:
        spec: The campaign file.
        machine: State of the campaign, with the durations of measurements and trainings.
        ended: Number of assignments that have ended by device.
        workers: Number of workers by device.
    """
    mean_s = machine.spend.mean_s
    if not mean_s:
        return None
    total_s = 0.0
    for device in spec.devices.keys:
        each_s = mean_s.get(device, fmean(mean_s.values()))
        total_s += each_s * (spec.budget(device) - ended[device]) / max(1, workers[device])
    rounds_to_come = 2 + spec.rounds.count - max(machine.rounds.current, 1)
    return total_s + rounds_to_come * (machine.learner.training_s or 0.0)


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


def quiet_line(pause: AwaitQuiet, whose: str) -> str:
    """Return one line for a pause because other programs use the cores of a host."""
    return (
        f"Other programs use {pause.others_share:.0%} of {whose} cores; {pause.unstable} of the "
        f"last {pause.attempts} runs were unstable. Waiting {pause.seconds:.0f} s for quiet."
    )


def round_line(number: int, report: TrainingReport) -> str:
    """Return one line for a round whose heads have been judged."""
    parts = []
    for device, by_metric in report.devices.items():
        errors = [f"{metric} {e['mape']:.1f} %" for metric, e in by_metric.items()]
        parts.append(f"{device}: {', '.join(errors) or 'no label judges'}")
    return f"round {number}: error on held-out architectures: {'; '.join(parts)}"


def task_line(task: Task) -> str:
    """Return a few words for what a worker does."""
    return str(task.configuration)
