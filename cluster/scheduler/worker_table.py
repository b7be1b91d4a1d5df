"""The workers of a campaign: who is there, who may measure, and who does what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trappm.cluster.scheduler.messages import Waiting, Worker

RESTART_S = 60.0
"""Within so many seconds another worker starts where one was lost, if its host is still there."""


@dataclass(eq=False, slots=True)
class Seat:
    """A worker of the campaign, and the assignment that it measures."""

    worker: Worker
    running: Waiting | None = None
    on_check: bool = False

    @property
    def is_busy(self) -> bool:
        return self.running is not None or self.on_check


class WorkerTable:
    """The workers that have joined; each operation costs O(log n) of them at most."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.idle: dict[str, dict[str, Seat]] = {device: {} for device in devices}
        """By device and name: those that may measure and do not."""
        self.hosts: dict[str, Counter[str]] = {device: Counter() for device in devices}
        """By device and host: how many workers may measure, busy or not; 1 for a host that lost
        its last one a moment ago, since another one starts there."""
        self.busy: Counter[str] = Counter()
        """By host: how many workers are measuring."""
        self.at_work = 0
        """How many workers are measuring."""
        self.able: Counter[str] = Counter()
        """By device: how many workers may measure, busy or not."""
        self._seats: dict[str, Seat] = {}
        self._away: dict[tuple[str, str], float] = {}
        """Hosts, by device, that lost their last worker, and when."""
        self._stopped: set[Worker] = set()

    def join(self, worker: Worker) -> None:
        """A worker that is there already must have left before."""
        if self._away.pop((worker.device, worker.host), None) is not None:
            self.hosts[worker.device][worker.host] -= 1
        self._seats[worker.name] = Seat(worker)
        self._let_measure(worker, True)

    def leave(self, worker: Worker, time: float) -> Waiting | None:
        """Takes a worker out; what it was measuring, if it was."""
        seat = self._seats.get(worker.name)
        if seat is None:
            return None
        running = seat.running
        self.free(worker)
        could_measure = worker not in self._stopped
        self._let_measure(worker, False)
        del self._seats[worker.name]
        hosts = self.hosts[worker.device]
        if could_measure and not hosts[worker.host]:
            hosts[worker.host] = 1
            self._away[worker.device, worker.host] = time
        return running

    def forget_hosts(self, time: float) -> None:
        """Hosts on which no other worker has started in time are no hosts any more."""
        for (device, host), since in list(self._away.items()):
            if time - since >= RESTART_S:
                del self._away[device, host]
                self.hosts[device][host] -= 1

    def stop(self, worker: Worker) -> None:
        """A worker that is to measure no more, now and when it comes back."""
        self._let_measure(worker, False)
        self._stopped.add(worker)

    def begin(self, seat: Seat, running: Waiting | None) -> None:
        """An idle worker measures an assignment from now on, or a check if there is none."""
        seat.running, seat.on_check = running, running is None
        self.busy[seat.worker.host] += 1
        self.at_work += 1
        del self.idle[seat.worker.device][seat.worker.name]

    def free(self, worker: Worker) -> None:
        """A worker has ended what it was doing."""
        seat = self._seats.get(worker.name)
        if seat is not None and seat.is_busy:
            seat.running, seat.on_check = None, False
            self.busy[worker.host] -= 1
            self.at_work -= 1
            if worker not in self._stopped:
                self.idle[worker.device][worker.name] = seat

    def running(self, worker: Worker) -> Waiting | None:
        seat = self._seats.get(worker.name)
        return None if seat is None else seat.running

    def leases(self) -> Iterator[tuple[Worker, Waiting]]:
        """All assignments that are being measured, and by whom."""
        for seat in self._seats.values():
            if seat.running is not None:
                yield seat.worker, seat.running

    def _let_measure(self, worker: Worker, may_measure: bool) -> None:
        """Counts a worker among those that may measure, or takes it out of them."""
        seat = self._seats.get(worker.name)
        if seat is None or worker in self._stopped:
            return
        self.able[worker.device] += 1 if may_measure else -1
        self.hosts[worker.device][worker.host] += 1 if may_measure else -1
        if may_measure:
            self.idle[worker.device][worker.name] = seat
        else:
            self.idle[worker.device].pop(worker.name, None)
