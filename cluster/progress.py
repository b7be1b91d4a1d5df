"""What a campaign tells while it runs: where it is, how long the rest will take, and its news."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.spec import CampaignSpec
from profiler.records import Measurement


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
    """All news so far; a watcher prints those that it has not seen."""


class Pace:
    """How long things take, learnt as they happen, to tell how long the rest will take."""

    def __init__(self, spec: CampaignSpec) -> None:
        self._spec = spec
        self._measured: dict[str, list[float]] = {d: [] for d in spec.devices.keys}
        self._learned: list[float] = []

    def measured(self, device: str, seconds: float) -> None:
        self._measured[device].append(seconds)

    def learned(self, seconds: float) -> None:
        self._learned.append(seconds)

    def eta_s(self, ended: Counter[str], number: int, workers: Counter[str]) -> float | None:
        """Seconds to the end of the campaign; None while nothing is known yet.

        Args:
            ended: assignments that have ended, by device.
            number: the earliest round that is not closed.
            workers: how many there are, by device.
        """
        everything = [s for times in self._measured.values() for s in times]
        if not everything:
            return None
        total = 0.0
        for device, times in self._measured.items():
            each = float(np.mean(times or everything))
            left = self._spec.budget(device) - ended[device]
            total += each * left / max(1, workers[device])
        rounds_left = 2 + self._spec.rounds.count - max(number, 1)
        return total + rounds_left * float(np.mean(self._learned or [0.0]))


def measurement_line(measurement: Measurement) -> str:
    """One line for a measurement, as it comes in."""
    if measurement.step is None:
        result = f"{measurement.outcome}: {measurement.message}"
    else:
        memory = measurement.memory_mib
        result = f"{measurement.step.median_ms:8.1f} ms"
        result += "" if memory is None else f" {memory:7.0f} MiB"
        result += "" if measurement.outcome == "ok" else f"  {measurement.outcome}"
    return f"{measurement.device}  {measurement.configuration}  {result}"


def round_line(number: int, report: Mapping[str, Any]) -> str:
    """One line for a round, when its heads have been judged."""
    parts = []
    for device, by_metric in report.get("devices", {}).items():
        errors = [f"{metric} {e['mape']:.1f} %" for metric, e in by_metric.items()]
        parts.append(f"{device}: {', '.join(errors)}")
    return f"round {number}: error on held-out architectures: {'; '.join(parts)}"
