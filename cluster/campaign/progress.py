"""The progress that a running campaign reports: stage, counts, time to go, lines of news."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from trappm.cluster.scheduler.messages import AwaitQuiet
from trappm.cluster.scheduler.training_report import TrainingReport
from trappm.cluster.spec import CampaignSpec
from trappm.profiler.records import Measurement, Outcome

LINES_KEPT = 1_000
"""So many lines of news are kept for watchers; the store keeps what happened."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a campaign is doing, for people to watch."""

    stage: str = "starting"
    done: int = 0
    total: int = 0
    eta_s: float | None = None
    """Expected time to the end of the whole campaign; None while nothing is known yet."""
    current: tuple[str, ...] = ()
    """What is being measured right now."""
    lines: tuple[str, ...] = field(default=(), repr=False)
    """The latest news, `LINES_KEPT` at most; a watcher prints those that it has not seen."""
    line_count: int = 0
    """How many lines of news there were in all."""

    def lines_after(self, seen: int) -> tuple[str, ...]:
        """The latest lines of news beyond the first so many, which a watcher has seen."""
        unseen = max(0, self.line_count - seen)
        return self.lines[max(0, len(self.lines) - unseen) :]


class _Mean:
    """The mean of numbers that come one by one; 0 before the first."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self._sum += value

    @property
    def mean(self) -> float:
        return self._sum / max(1, self.count)


class Pace:
    """Durations of measurements and trainings so far, which estimate the time to go."""

    def __init__(self, spec: CampaignSpec) -> None:
        self._spec = spec
        self._measured = {device: _Mean() for device in spec.devices.keys}
        self._everything = _Mean()
        self._learned = _Mean()

    def measured(self, device: str, seconds: float) -> None:
        self._measured[device].add(seconds)
        self._everything.add(seconds)

    def learned(self, seconds: float) -> None:
        self._learned.add(seconds)

    def eta_s(self, ended: Counter[str], number: int, workers: Counter[str]) -> float | None:
        """Seconds to the end of the campaign; None while nothing is known yet.

        Args:
            ended: assignments that have ended, by device.
            number: the earliest round that is not closed.
            workers: how many there are, by device.
        """
        if not self._everything.count:
            return None
        total = 0.0
        for device, times in self._measured.items():
            each = (times if times.count else self._everything).mean
            to_come = self._spec.budget(device) - ended[device]
            total += each * to_come / max(1, workers[device])
        rounds_to_come = 2 + self._spec.rounds.count - max(number, 1)
        return total + rounds_to_come * self._learned.mean


def measurement_line(measurement: Measurement) -> str:
    """One line for a measurement, as it comes in."""
    if measurement.step is None:
        result = f"{measurement.outcome}: {measurement.message}"
    else:
        memory = measurement.memory_mib
        result = f"{measurement.step.median_ms:,.1f} ms"
        result += "" if memory is None else f", {memory:,.0f} MiB"
        result += "" if measurement.outcome is Outcome.OK else f"  {measurement.outcome}"
    return f"{measurement.device}  {measurement.configuration}  {result}"


def quiet_line(pause: AwaitQuiet, whose: str) -> str:
    """One line for a pause because other programs use the cores of a host."""
    return (
        f"Other programs use {pause.others_share:.0%} of {whose} cores; {pause.unstable} of the "
        f"last {pause.attempts} runs were unstable. Waiting {pause.seconds:.0f} s for quiet."
    )


def round_line(number: int, report: TrainingReport) -> str:
    """One line for a round, when its heads have been judged."""
    parts = []
    for device, by_metric in report.devices.items():
        errors = [f"{metric} {e['mape']:.1f} %" for metric, e in by_metric.items()]
        parts.append(f"{device}: {', '.join(errors) or 'no label judges'}")
    return f"round {number}: error on held-out architectures: {'; '.join(parts)}"
