"""Where a campaign got worse: errors that rose by round, and transfer that lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trappm.cluster.scheduler.training_report import TrainingReport, difference_of
from trappm.profiler.number_text import number_text


@dataclass(frozen=True)
class Setback:
    """An error that is larger than it was or would be otherwise, in percent."""

    device: str
    metric: str
    what: str
    before: float
    after: float
    judged: int
    """Configurations, on architectures that no training saw."""
    chance: float | None
    """How far apart chance alone may bring the two, in percentage points; None if unknown."""

    @property
    def beyond_chance(self) -> bool:
        return self.chance is not None and self.after - self.before > self.chance

    def __str__(self) -> str:
        rise = number_text(self.after - self.before, 2)
        size = "unknown" if self.chance is None else f"± {number_text(self.chance, 2)}"
        than = "more than chance" if self.beyond_chance else "which chance may be"
        return (
            f"{self.device} {self.metric}: {self.what}, {number_text(self.before, 3)} to "
            f"{number_text(self.after, 3)} %, {rise} points, {than} ({self.judged} judged, chance "
            f"{size})"
        )


def setbacks(trained: Sequence[tuple[int, TrainingReport]]) -> list[Setback]:
    """What is worse after the last training than after the best one before it, or from scratch.

    Args:
        trained: rounds with their reports, in order.
    """
    if not trained:
        return []
    number, last = trained[-1]
    worse = []
    for device, errors in last.devices.items():
        for metric, of_metric in errors.items():
            after = of_metric["mape"]
            earlier = [
                (before, at, report)
                for at, report in trained[:-1]
                if (before := report.devices.get(device, {}).get(metric, {}).get("mape"))
                is not None
            ]
            best = min(earlier, key=lambda row: row[0], default=None)
            if after is None or best is None or after <= best[0]:
                continue
            gap = difference_of(best[2].evaluation, last.evaluation, device, metric)
            what = f"errors rose from round {best[1]} to {number}"
            judged = gap.judged or int(of_metric.get("count") or 0)
            worse.append(Setback(device, metric, what, best[0], after, judged, gap.chance))
    for device, by_metric in last.transfer.items():
        for metric, both in by_metric.items():
            if both.transferred > both.from_scratch:
                judged = int(last.devices.get(device, {}).get(metric, {}).get("count") or 0)
                lost = Setback(
                    device, metric, "transfer lost to a start from scratch", both.from_scratch,
                    both.transferred, judged, both.chance,
                )  # fmt: skip
                worse.append(lost)
    return worse
