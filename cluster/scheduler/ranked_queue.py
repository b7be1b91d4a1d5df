"""The ranked queue of one device: which assignment goes to which worker next."""

from __future__ import annotations

import heapq
from collections import Counter

from trappm.cluster.scheduler.messages import Waiting


class RankedQueue:
    """Assignments that wait for a device, each taken in O(log n).

    The order is that of the rounds; inside a round by number of failures, so that what failed waits
    for the rest of its round, and then by rank. What failed on a host goes to another one, as long
    as there is one: a host that is out of order must not use up an assignment's chances, and an
    assignment that kills its worker is to prove it on several.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, str, Waiting]] = []
        self._waiting: dict[str, int] = {}
        """The rounds of those that wait; `remove` leaves its assignments in the heap."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first_round(self) -> int:
        """The round of what comes first; the queue must not be empty."""
        self._forget_removed()
        return self._heap[0][0]

    def push(self, assignment: Waiting) -> None:
        self._waiting[assignment.id] = assignment.round_number
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
        return self._waiting.pop(assignment_id, None)

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
            if not self._heap:
                break
            entry = heapq.heappop(self._heap)
            if _may_go_to(host, entry[-1], hosts):
                taken = entry[-1]
                del self._waiting[taken.id]
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
