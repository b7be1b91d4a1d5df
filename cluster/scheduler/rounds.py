"""The rounds of a campaign: what of them is planned, what is left to do, and which are closed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from trappm.cluster.scheduler.messages import Course, Plan, Waiting

UNLEARNED_ROUNDS = 2
"""Evaluation set and initial round: nothing has to be learned to plan them."""


class Rounds:
    """Each device has its part of each round; a round has ended when all parts have.

    Args:
        course: of the campaign.
        next_rounds: for each device, the first round that has not been planned; 0 by default.
        closed: rounds that were closed before.
    """

    def __init__(
        self, course: Course, next_rounds: Mapping[str, int] | None, closed: Iterable[int]
    ) -> None:
        self.next = dict.fromkeys(course.devices, 0) | dict(next_rounds or {})
        """For each device, the first round that has not been planned."""
        was_closed = frozenset(closed)
        self.open = [n for n in range(course.rounds) if n not in was_closed]
        """Those that are not closed, the earliest first."""
        self._course = course
        self._unended: Counter[tuple[int, str]] = Counter()
        """By round and device: how many assignments have not ended."""

    @property
    def current(self) -> int:
        """The number of the earliest round that is not closed, or of the last round."""
        return self.open[0] if self.open else self._course.rounds - 1

    @property
    def ended(self) -> list[int]:
        """Those that have ended, and are not closed."""
        return [number for number in self.open if self.has_ended(number)]

    def has_ended(self, number: int) -> bool:
        return all(
            self.next[device] > number and self._unended[number, device] == 0
            for device in self._course.devices
        )

    def unended(self, number: int, device: str) -> int:
        """How many assignments of a device's part were planned, and have not ended."""
        return self._unended[number, device]

    def is_planned(self, device: str) -> bool:
        """Whether this device's parts of all rounds are."""
        return self.next[device] >= self._course.rounds

    def unplanned(self, device: str) -> int:
        """How many assignments its parts have that are not planned yet."""
        return sum(self._course.shares[device][self.next[device] :])

    def draws(self) -> list[Plan]:
        """Plans that need no learner, and have not been carried out."""
        return [
            self._plan(device, number)
            for number in range(UNLEARNED_ROUNDS)
            for device in self._course.devices
            if self.next[device] <= number
        ]

    def plan(self, device: str) -> Plan:
        """This device's part of its next round."""
        return self._plan(device, self.next[device])

    def add(self, assignment: Waiting) -> None:
        self._unended[assignment.round_number, assignment.device] += 1

    def end(self, number: int, device: str) -> None:
        self._unended[number, device] -= 1

    def end_early(self, running: Iterable[Waiting]) -> None:
        """Plans no more rounds: only these running assignments are still to end."""
        planned = max(self.next.values())
        self.open = [number for number in self.open if number < planned]
        self.next = dict.fromkeys(self._course.devices, self._course.rounds)
        self._unended = Counter(
            (assignment.round_number, assignment.device) for assignment in running
        )

    def _plan(self, device: str, number: int) -> Plan:
        return Plan(device, number, self._course.shares[device][number])
