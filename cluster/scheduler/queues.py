"""Assignments that wait, workers that take them, and hosts that pause.

Each operation costs O(log n) of the assignments, and O(n) of the workers at most.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from trappm.cluster.scheduler.messages import AwaitQuiet, Worker
from trappm.store.records import Assignment

RESTART_S = 60.0
"""Seconds in which another worker is expected on a host that lost its last one."""

LATEST = 20
"""Number of recent attempts on a host that decide about a pause."""
_PAUSES_S = (20.0, 40.0, 80.0, 120.0)
"""Lengths of the first pause, the second, ...; the last one is repeated."""
_BETWEEN_PAUSES = 6
"""Attempts on a host before its first pause, and between two pauses."""


class RankedQueue:
    """Assignments that wait for one device, by round, number of failures and rank.

    An assignment that failed waits for the rest of its round. It goes to another host, if there is
    one: a faulty host must not use up an assignment's attempts, and an assignment that kills its
    worker counts as poisonous only after several hosts.

    Args:
        end: First round that is not handed out yet; assignments from there on do not count.
    """

    def __init__(self, end: int = sys.maxsize) -> None:
        self.end = end
        self._heap: list[tuple[int, int, int, str, Assignment]] = []
        self._waiting: dict[str, int] = {}
        """Rounds of waiting assignments; `remove` leaves its assignments in the heap."""
        self._by_round: Counter[int] = Counter()

    def __len__(self) -> int:
        return sum(count for number, count in self._by_round.items() if number < self.end)

    @property
    def deferred(self) -> int:
        """Number of assignments in rounds that are not handed out yet."""
        return len(self._waiting) - len(self)

    @property
    def first_round(self) -> int:
        """Round of the next assignment; the queue must not be empty."""
        self._drop_removed()
        return self._heap[0][0]

    def push(self, assignment: Assignment) -> None:
        number = assignment.round_number
        self._waiting[assignment.id] = number
        self._by_round[number] += 1
        order = (number, assignment.failures, assignment.rank, assignment.id)
        heapq.heappush(self._heap, (*order, assignment))

    def remove(self, assignment_id: str) -> int | None:
        """Remove an assignment, and return its round; None if it does not wait here."""
        number = self._waiting.pop(assignment_id, None)
        if number is not None:
            self._by_round[number] -= 1
        return number

    def pop_for(
        self, host: str, hosts: set[str], failed_on: Mapping[str, Sequence[str]]
    ) -> Assignment | None:
        """Return the next assignment that a worker on a host may measure; None if there is none.

        An assignment is for the device's other hosts first if it is in `failed_on`, where the hosts
        are on which assignments failed, by their ids.
        """
        passed_over = []
        taken = None
        while taken is None:
            self._drop_removed()
            if not self._heap or self._heap[0][0] >= self.end:
                break
            entry = heapq.heappop(self._heap)
            tried = failed_on.get(entry[3], ())
            if host not in tried or hosts.issubset(tried):
                taken = entry[-1]
                self.remove(taken.id)
            else:
                passed_over.append(entry)
        for entry in passed_over:
            heapq.heappush(self._heap, entry)
        return taken

    def _drop_removed(self) -> None:
        while self._heap and self._heap[0][3] not in self._waiting:
            heapq.heappop(self._heap)


class WorkerTable:
    """Workers that have joined, and what each of them does.

    Args:
        stopped: Workers that failed their checks and must not measure; the caller updates it.
    """

    def __init__(self, stopped: Collection[Worker]) -> None:
        self._joined: dict[str, Worker] = {}
        self._running: dict[str, Assignment | None] = {}
        """Assignments of busy workers by name; None during a check."""
        self._away: dict[tuple[str, str], float] = {}
        """Times at which hosts lost their last worker, by device and host."""
        self._stopped = stopped

    @property
    def joined(self) -> list[Worker]:
        """All workers, busy or not."""
        return list(self._joined.values())

    @property
    def at_work(self) -> int:
        """Number of busy workers."""
        return len(self._running)

    def able(self, device: str) -> list[Worker]:
        """Return the workers of a device that may measure, busy or not."""
        return [w for w in self._joined.values() if w.device == device and w not in self._stopped]

    def idle(self, device: str) -> list[Worker]:
        """Return the workers that wait for work, the longest waiting first."""
        return [worker for worker in self.able(device) if worker.name not in self._running]

    def hosts(self, device: str) -> set[str]:
        """Return the hosts of these workers, and those that have just lost their last worker."""
        restarting = {host for known, host in self._away if known == device}
        return restarting | {worker.host for worker in self.able(device)}

    def is_busy(self, host: str) -> bool:
        return any(self._joined[name].host == host for name in self._running)

    def join(self, worker: Worker) -> None:
        """Add a worker, which must have left before if it is already known."""
        self._away.pop((worker.device, worker.host), None)
        self._joined[worker.name] = worker

    def leave(self, worker: Worker, time: float) -> Assignment | None:
        """Remove a worker, and return the assignment that it was measuring."""
        if self._joined.pop(worker.name, None) is None:
            return None
        if worker not in self._stopped and worker.host not in self.hosts(worker.device):
            self._away[worker.device, worker.host] = time
        return self._running.pop(worker.name, None)

    def forget_hosts(self, time: float) -> None:
        """Remove hosts on which no other worker has started in time."""
        self._away = {key: since for key, since in self._away.items() if time - since < RESTART_S}

    def begin(self, worker: Worker, assignment: Assignment | None) -> None:
        """Note that an idle worker measures an assignment, or a check if there is none."""
        self._running[worker.name] = assignment

    def free(self, worker: Worker) -> None:
        """Note that a worker has ended what it was doing; it is the last in turn."""
        self._running.pop(worker.name, None)
        if (joined := self._joined.pop(worker.name, None)) is not None:
            self._joined[worker.name] = joined

    def running(self, worker: Worker) -> Assignment | None:
        return self._running.get(worker.name)

    def leases(self) -> Iterator[tuple[Worker, Assignment]]:
        """Yield workers with the assignments that they measure."""
        for name, assignment in self._running.items():
            if assignment is not None:
                yield self._joined[name], assignment


@dataclass
class _Host:
    attempts: deque[float | None] = field(default_factory=lambda: deque(maxlen=LATEST))
    """Share of the cores that others used, for each attempt that was unstable because of it."""
    since_pause: int = 0
    pauses: int = 0
    """Number of pauses since the host was last quiet."""
    paused_until: float = 0.0


class QuietWatch:
    """Pauses for hosts that other programs use; they grow while half the runs are unstable."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = defaultdict(_Host)

    def note(self, worker: Worker, others_share: float | None, time: float) -> AwaitQuiet | None:
        """Note how a worker's attempt ended, and return a pause that is due.

        `others_share` is the share of the cores that other programs used if the attempt was
        unstable for that reason.
        """
        host = self._hosts[worker.host]
        host.attempts.append(others_share)
        host.since_pause += 1
        shares = [share for share in host.attempts if share is not None]
        if 2 * len(shares) < len(host.attempts):
            host.pauses = 0
            return None
        if others_share is None or host.since_pause < _BETWEEN_PAUSES:
            return None
        seconds = _PAUSES_S[min(host.pauses, len(_PAUSES_S) - 1)]
        host.pauses += 1
        host.since_pause = 0
        host.paused_until = time + seconds
        return AwaitQuiet(worker, seconds, len(shares), len(host.attempts), fmean(shares))

    def is_paused(self, host: str, time: float) -> bool:
        return host in self._hosts and time < self._hosts[host].paused_until
