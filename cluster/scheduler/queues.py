"""Assignments that wait, workers that take them, and hosts that pause.

Each operation costs O(log n) of the assignments or workers at most.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from trappm.cluster.scheduler.messages import AwaitQuiet, Worker
from trappm.store.records import Assignment

RESTART_S = 60.0
"""Seconds in which another worker is expected on a host that lost its last one."""

LATEST = 20
"""Number of recent attempts on a host that decide about a pause."""
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
        self, host: str, hosts: Counter[str], failed_on: Mapping[str, Sequence[str]]
    ) -> Assignment | None:
        """Return the next assignment that a worker may measure; None if there is none.

        Args:
            host: Host of the worker.
            hosts: Number of workers of this device by host.
            failed_on: Hosts on which assignments failed, by their ids.
        """
        passed_over = []
        taken = None
        while taken is None:
            self._drop_removed()
            if not self._heap or self._heap[0][0] >= self.end:
                break
            entry = heapq.heappop(self._heap)
            tried = failed_on.get(entry[3], ())
            if host not in tried or all(hosts[other] == 0 or other in tried for other in hosts):
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
    """Workers that have joined, and what each of them does."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.idle: dict[str, dict[str, Worker]] = {device: {} for device in devices}
        """Idle workers that may measure, by device and name."""
        self.hosts: dict[str, Counter[str]] = {device: Counter() for device in devices}
        """Number of workers that may measure, by device and host. A host that has just lost its
        last worker counts as 1, since another one starts there."""
        self.busy: Counter[str] = Counter()
        """Number of busy workers by host."""
        self.able: Counter[str] = Counter()
        """Number of workers that may measure by device, busy or not."""
        self._joined: dict[str, Worker] = {}
        self._running: dict[str, Assignment | None] = {}
        """Assignments of busy workers by name; None during a check."""
        self._away: dict[tuple[str, str], float] = {}
        """Times at which hosts lost their last worker, by device and host."""
        self._stopped: set[Worker] = set()

    @property
    def at_work(self) -> int:
        """Number of busy workers."""
        return len(self._running)

    def join(self, worker: Worker) -> None:
        """Add a worker, which must have left before if it is already known."""
        if self._away.pop((worker.device, worker.host), None) is not None:
            self.hosts[worker.device][worker.host] -= 1
        self._joined[worker.name] = worker
        self._count(worker, 1)

    def leave(self, worker: Worker, time: float) -> Assignment | None:
        """Remove a worker, and return the assignment that it was measuring."""
        if worker.name not in self._joined:
            return None
        running = self.running(worker)
        self.free(worker)
        self._count(worker, -1)
        del self._joined[worker.name]
        hosts = self.hosts[worker.device]
        if worker not in self._stopped and not hosts[worker.host]:
            hosts[worker.host] = 1
            self._away[worker.device, worker.host] = time
        return running

    def forget_hosts(self, time: float) -> None:
        """Remove hosts on which no other worker has started in time."""
        for (device, host), since in list(self._away.items()):
            if time - since >= RESTART_S:
                del self._away[device, host]
                self.hosts[device][host] -= 1

    def stop(self, worker: Worker) -> None:
        """Bar a worker from measuring, now and when it comes back."""
        self._count(worker, -1)
        self._stopped.add(worker)

    def begin(self, worker: Worker, assignment: Assignment | None) -> None:
        """Note that an idle worker measures an assignment, or a check if there is none."""
        del self.idle[worker.device][worker.name]
        self._running[worker.name] = assignment
        self.busy[worker.host] += 1

    def free(self, worker: Worker) -> None:
        """Note that a worker has ended what it was doing."""
        if worker.name in self._running:
            del self._running[worker.name]
            self.busy[worker.host] -= 1
            if worker not in self._stopped:
                self.idle[worker.device][worker.name] = worker

    def running(self, worker: Worker) -> Assignment | None:
        return self._running.get(worker.name)

    def leases(self) -> Iterator[tuple[Worker, Assignment]]:
        """Yield workers with the assignments that they measure."""
        for name, assignment in self._running.items():
            if assignment is not None:
                yield self._joined[name], assignment

    def _count(self, worker: Worker, change: int) -> None:
        """Add a worker to those that may measure, or remove it."""
        if worker.name not in self._joined or worker in self._stopped:
            return
        self.able[worker.device] += change
        self.hosts[worker.device][worker.host] += change
        if change > 0:
            self.idle[worker.device][worker.name] = worker
        else:
            self.idle[worker.device].pop(worker.name, None)


@dataclass
class _Host:
    attempts: deque[float | None] = field(default_factory=lambda: deque(maxlen=LATEST))
    """Share of the cores that others used, for each attempt that was unstable because of it."""
    since_pause: int = 0
    pauses: int = 0
    """Number of pauses since the host was last quiet."""
    paused_until: float = 0.0


class QuietWatch:
    """Pauses for hosts whose cores other programs use; they grow while half the runs are unstable.

    Args:
        pauses_s: Lengths of the first pause, the second, ...; the last one is repeated.
    """

    def __init__(self, pauses_s: Sequence[float] = (20.0, 40.0, 80.0, 120.0)) -> None:
        self._pauses_s = pauses_s
        self._hosts: dict[str, _Host] = defaultdict(_Host)

    def note(self, worker: Worker, others_share: float | None, time: float) -> AwaitQuiet | None:
        """Note how an attempt ended, and return a pause that is due.

        Args:
            worker: Worker that measured.
            others_share: Share of the cores that other programs used if the attempt was unstable
                for that reason; None if not.
            time: Current time in seconds.
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
        seconds = self._pauses_s[min(host.pauses, len(self._pauses_s) - 1)]
        host.pauses += 1
        host.since_pause = 0
        host.paused_until = time + seconds
        return AwaitQuiet(worker, seconds, len(shares), len(host.attempts), fmean(shares))

    def is_paused(self, host: str, time: float) -> bool:
        return host in self._hosts and time < self._hosts[host].paused_until
