"""What a campaign may still spend of its labels, GPU-hours and money: counted as it goes.

Plain numbers without clock and store, so that the state machine can ask before each measurement
that it hands out. What is being measured counts as if it had ended: it is expected to bring its
label, and to take as long as the device's measurements take in the mean. Before the first has
ended nothing is known of that, and each is expected to take as long as its protocol allows. So a
budget is overrun by no more than what cannot be foretold of what runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from trappm.cluster.scheduler.stop_rules import Stop, StopRules, overspent

_NEWEST_WEIGHT = 0.05
"""Weight of the newest measurement in the mean duration of a device's measurements: a round number,
the last twenty count."""


class Spend:
    """The budgets among a campaign's stop rules, and what was spent of them.

    Args:
        rules: of the campaign; None: everything may be spent.
        labels: that there are, on all devices.
        seconds: of measuring so far, failed attempts included.
        mean_s: how long measurements took in the mean, by device.
        limit_s: how long one may take.
    """

    def __init__(
        self,
        rules: StopRules | None = None,
        *,
        labels: int = 0,
        seconds: float = 0.0,
        mean_s: Mapping[str, float] | None = None,
        limit_s: float = 0.0,
    ) -> None:
        self.labels = labels
        self.seconds = seconds
        self.mean_s = dict(mean_s or {})
        self._rules = rules if rules is not None and rules.have_budget else None
        self._limit_s = limit_s
        self._running: Counter[str] = Counter()

    @property
    def has_room(self) -> bool:
        """One more measurement would fit, beside all that run."""
        return self._too_much() is None

    @property
    def awaits_first(self) -> bool:
        """Whether the first measurements, whose duration is not known yet, might use up a budget.

        Never while nothing runs, or a budget below one measurement's limit would not be used.
        """
        is_unknown = bool(self._running.total()) and not self.mean_s
        return is_unknown and self._too_much(self._limit_s) is not None

    @property
    def spent(self) -> Stop | None:
        """The budget of which nothing more can be spent, once nothing runs any more."""
        return None if self._running.total() else self._too_much()

    def begin(self, device: str) -> None:
        """A measurement runs on this device from now on."""
        self._running[device] += 1

    def end(self, device: str) -> None:
        """A measurement runs no more, whatever came of it."""
        self._running[device] -= 1

    def spend(self, device: str, seconds: float) -> None:
        """Counts a measurement that took so long."""
        self.seconds += seconds
        mean = self.mean_s.get(device, seconds)
        self.mean_s[device] = mean + _NEWEST_WEIGHT * (seconds - mean)

    def _too_much(self, unknown_s: float = 0.0) -> Stop | None:
        """The first budget that one more measurement, on whatever device, would overrun.

        Args:
            unknown_s: how long each takes, as long as none has ended.
        """
        if self._rules is None:
            return None
        longest_s = max(self.mean_s.values(), default=unknown_s)
        to_come_s = sum(n * self.mean_s.get(d, longest_s) for d, n in self._running.items())
        return overspent(
            self._rules, self.labels, self.seconds, self._running.total() + 1, to_come_s + longest_s
        )
