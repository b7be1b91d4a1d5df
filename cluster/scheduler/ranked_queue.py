"""The ranked queue of one device: which assignment goes to which worker next."""

from __future__ import annotations

import heapq
import sys
from collections import Counter

from trappm.cluster.scheduler.messages import Waiting


class RankedQueue:
    """Assignments that wait for a device, each taken in O(log n).

    The order is that of the rounds; inside a round by number of failures, so that what failed waits
    for the rest of its round, and then by rank. What failed on a host goes to another one, as long
    as there is one: a host that is out of order must not use up an assignment's chances, and an
    assignment that kills its worker is to prove it on several.

    Args:
        end: The first round that is not handed out yet. What waits for it and later rounds does not
            count.
    """

    def __init__(self, end: int = sys.maxsize) -> None:
        self.end = end
        self._heap: list[tuple[int, int, int, str, Waiting]] = []
        self._waiting: dict[str, int] = {}
        """The rounds of those that wait; `remove` leaves its assignments in the heap."""
        self._by_round: Counter[int] = Counter()

    def __len__(self) -> int:
        return sum(count for number, count in self._by_round.items() if number < self.end)

    @property
    def deferred(self) -> int:
        """Number of assignments that wait for rounds that are not handed out yet."""
        return len(self._waiting) - len(self)

    @property
    def first_round(self) -> int:
        """The round of what comes first; the queue must not be empty."""
        self._forget_removed()
        return self._heap[0][0]

    def push(self, assignment: Waiting) -> None:
        self._waiting[assignment.id] = assignment.round_number
        self._by_round[assignment.round_number] += 1
        entry = (
            assignment.round_number,
            assignment.failures,
            assignment.rank,
            assignment.id,
            assignment,
        )
        heapq.heappush(self._heap, entry)

    def remove(self, assignment_id: str) -> int | None:
        """Takes an assignment out, wherever it stands.

        Returns:
            Its round; None if it does not wait here.
        """
        number = self._waiting.pop(assignment_id, None)
        if number is not None:
            self._by_round[number] -= 1
        return number

    def pop_for(self, host: str, hosts: Counter[str]) -> Waiting | None:
        """The next assignment that a worker on this host may measure; None if there is none.

        Args:
            host: of the worker.
            hosts: how many workers each host has for this device.
        """
        passed_over = []
        taken = None
        while taken is None:
            self._forget_removed()
            if not self._heap or self._heap[0][0] >= self.end:
                break
            entry = heapq.heappop(self._heap)
            if _may_go_to(host, entry[-1], hosts):
                taken = entry[-1]
                self.remove(taken.id)
            else:
                passed_over.append(entry)
        for entry in passed_over:
            heapq.heappush(self._heap, entry)
        return taken

    def _forget_removed(self) -> None:
        while self._heap and self._heap[0][3] not in self._waiting:
            heapq.heappop(self._heap)


def _may_go_to(host: str, assignment: Waiting, hosts: Counter[str]) -> bool:
    return host not in assignment.hosts or all(
        hosts[other] == 0 or other in assignment.hosts for other in hosts
    )
