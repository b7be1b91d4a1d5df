"""The campaign as a state machine: events in, commands out; no Ray, no SQL, no clock of its own.

    Joined, Lost, Stopped          -->  workers    --> Measure, CheckDevice
    Measured, Planned, Settled     -->  queues     --> GiveUp, Quarantine
    Learned                        -->  learner    --> Plan, Learn, Close, Publish

Assignments are handed out one by one, so that long and short ones mix and no worker waits for a
round to end. On GPUs the learner runs ahead: the next round is chosen while there is still work for
as long as choosing will take. On a CPU device, which measurements and learner share, the same
machine does one thing at a time. Each event costs O(log n) of the assignments that wait.

Each device has its share of each round. A round is closed with the report of the first training
that began after its last assignment had ended. Once a stop rule holds nothing more begins: what
runs ends and is learned from, what was only planned counts as ended. Nothing is handed out that,
beside what runs, would overrun a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from trappm.cluster.scheduler.learner_jobs import LearnerJobs
from trappm.cluster.scheduler.messages import (
    BudgetSpent,
    CheckDevice,
    Close,
    Command,
    Course,
    DeviceChecked,
    Enough,
    Event,
    GiveUp,
    Joined,
    Learn,
    Learned,
    Lost,
    Measure,
    Measured,
    Plan,
    Planned,
    Publish,
    Quarantine,
    Settled,
    Stopped,
    Waiting,
    Worker,
)
from trappm.cluster.scheduler.quiet_watch import QuietWatch
from trappm.cluster.scheduler.ranked_queue import RankedQueue
from trappm.cluster.scheduler.rounds import UNLEARNED_ROUNDS, Rounds
from trappm.cluster.scheduler.spend import Spend
from trappm.cluster.scheduler.worker_table import Seat, WorkerTable
from trappm.profiler.records import Outcome
from trappm.store.records import attempts_allowed, is_final

_MARGIN = 2.0
"""The learner starts when what waits lasts so many times as long as the learner took last time."""


class Machine:
    """The state of one campaign: takes events, and returns the commands that follow from them.

    Args:
        course: what the campaign is to do.
        check_is_due: whether a worker is to measure the canary or kernels before anything else.
        waiting: assignments that were planned before and have not ended.
        next_rounds: for each device, the first round that has not been planned; 0 by default.
        closed: rounds that were closed before.
        enough: a stop rule held before.
        spend: what may still be spent; by default everything.
    """

    def __init__(
        self,
        course: Course,
        *,
        check_is_due: Callable[[Worker], bool] = lambda worker: False,
        waiting: Iterable[Waiting] = (),
        next_rounds: Mapping[str, int] | None = None,
        closed: Iterable[int] = (),
        enough: bool = False,
        spend: Spend | None = None,
    ) -> None:
        self.course = course
        self.is_over = False
        self._check_is_due = check_is_due
        self._workers = WorkerTable(course.devices)
        self._rounds = Rounds(course, next_rounds, closed)
        self._queues = {d: RankedQueue(self._rounds.next[d]) for d in course.devices}
        self._quiet = QuietWatch()
        self._to_close: list[int] = []
        self._learner = LearnerJobs()
        self._spend = spend or Spend()
        self._is_ending = False
        """A stop rule held: nothing more begins."""
        self._time = 0.0
        self._commands: list[Command] = []
        for assignment in waiting:
            self._add(assignment)
        if enough:
            self._begin_no_more()

    @property
    def to_come(self) -> dict[str, int]:
        """Assignments by device that are still to begin, planned or not; 0 if none may."""
        if not self._may_begin:
            return dict.fromkeys(self.course.devices, 0)
        return {
            d: len(queue) + queue.deferred + self._rounds.unplanned(d)
            for d, queue in self._queues.items()
        }

    @property
    def measuring(self) -> int:
        """How many workers are at something, be it a canary."""
        return self._workers.at_work

    @property
    def round_number(self) -> int:
        """The earliest round that is not closed, or the last one."""
        return self._rounds.current

    def leases(self) -> Iterator[tuple[Worker, Waiting]]:
        """The current leases: which worker measures which assignment."""
        return self._workers.leases()

    def stalled(self) -> set[str]:
        """Devices with work that no worker is there for, while nothing else goes on either."""
        if self._learner.current or self.measuring or self.is_over:
            return set()
        able = self._workers.able
        return {device for device, queue in self._queues.items() if queue and not able[device]}

    # Events.

    def handle(self, event: Event, now: float) -> list[Command]:
        """Takes an event in, and returns what is to be done now, in this order.

        Args:
            event: what happened.
            now: Monotonic time in seconds.
        """
        self._time = now
        self._commands = []
        if not self.is_over:
            self._take(event)
            self._look_at_budgets()
            self._begin_job()
            if not (self.course.keeps_host_quiet and self._learner.current):
                self._hand_out()
        return self._commands

    def _take(self, event: Event) -> None:  # noqa: PLR0912  (one line for each)
        match event:
            case Joined(worker):
                if worker.device in self._queues:
                    self._lose(worker, "it has started anew")
                    self._workers.join(worker)
            case Lost(worker, why):
                self._lose(worker, why)
            case Stopped(worker):
                self._workers.stop(worker)
            case Measured():
                self._end(event)
            case DeviceChecked(worker):
                self._workers.free(worker)
            case Planned(device, number, assignments):
                if not self._is_ending:
                    self._rounds.next[device] = number + 1
                    self._queues[device].end = max(self._queues[device].end, number + 1)
                    for assignment in assignments:
                        self._add(assignment)
                if number >= UNLEARNED_ROUNDS and not self.course.keeps_host_quiet:
                    # Rounds that are short beside a training: more of them before the next one.
                    self._learner.add(self._plans([device]))
                self._learner.end(self._time)
            case Settled(assignment_ids):
                self._spend.labels += len(assignment_ids)
                self._settle(assignment_ids)
            case Learned(has_heads, enough):
                self._learner.has_heads = has_heads
                if not has_heads:  # it needs the labels of what was put off
                    for queue in self._queues.values():
                        queue.end = self.course.rounds
                if enough:
                    self._begin_no_more()
                for number in self._to_close if has_heads or self._is_ending else ():
                    self._close(number)
                self._learner.end(self._time)
            case Enough():
                self._begin_no_more()
            case _:
                self._workers.forget_hosts(self._time)

    def _add(self, assignment: Waiting) -> None:
        if assignment.round_number not in self._rounds.open:  # put off when its round was closed
            assignment = replace(assignment, round_number=self._rounds.current)
        self._rounds.add(assignment)
        self._queues[assignment.device].push(assignment)

    def _end(self, event: Measured) -> None:
        worker, running = event.worker, self._workers.running(event.worker)
        self._spend.spend(worker.device, event.seconds)
        if running is None or running.id != event.assignment_id:
            return  # its worker was lost before, and the assignment waits again
        self._workers.free(worker)
        self._spend.end(worker.device)
        self._spend.labels += event.is_label
        if self.course.keeps_host_quiet:
            pause = self._quiet.note(worker, event.others_share, self._time)
            if pause is not None:
                self._commands.append(pause)
        if is_final(event.outcome):
            self._ended(running.round_number, running.device)
        else:
            self._fail(running, worker, event.outcome)

    def _lose(self, worker: Worker, why: str) -> None:
        running = self._workers.leave(worker, self._time)
        if running is not None:
            self._spend.end(worker.device)
            self._commands.append(GiveUp(running.id, why))
            self._fail(running, worker, None)

    def _fail(self, assignment: Waiting, worker: Worker, outcome: Outcome | None) -> None:
        failures, hosts = assignment.failures + 1, (*assignment.hosts, worker.host)
        if failures >= attempts_allowed(outcome, self.course.max_attempts):
            self._commands.append(
                Quarantine(assignment.id, assignment.device, failures, hosts, outcome)
            )
            self._ended(assignment.round_number, assignment.device)
        elif self._is_ending:
            self._ended(assignment.round_number, assignment.device)
        else:
            again = replace(assignment, failures=failures, hosts=hosts)
            if outcome is Outcome.UNSTABLE and self.course.keeps_host_quiet:
                again = self._put_off(again)
            self._queues[assignment.device].push(again)

    def _put_off(self, assignment: Waiting) -> Waiting:
        """Move an assignment to the next round, when the host may be quieter."""
        number, device = assignment.round_number, assignment.device
        next_number = next((n for n in self._rounds.open if n > number), number)
        later = replace(assignment, round_number=next_number)
        self._rounds.add(later)
        self._rounds.end(number, device)
        return later

    def _settle(self, assignment_ids: Iterable[str]) -> None:
        """End assignments that need no measurement any more."""
        for assignment_id in assignment_ids:
            for device, queue in self._queues.items():
                number = queue.remove(assignment_id)
                if number is not None:
                    self._ended(number, device)

    def _ended(self, number: int, device: str) -> None:
        self._rounds.end(number, device)
        self._learner.knows_all = False

    def _hand_out(self) -> None:
        for device in self._in_order():
            queue, idle = self._queues[device], self._workers.idle[device]
            if queue and idle:
                for seat in list(idle.values()):
                    if not queue or not self._may_begin or self._spend.awaits_first:
                        break
                    self._give_work(seat)

    def _in_order(self) -> Iterable[str]:
        """The devices; those that share a host's cores take turns by round."""
        if not self.course.keeps_host_quiet:
            return self.course.devices
        with_work = [device for device in self.course.devices if self._queues[device]]
        return sorted(with_work, key=lambda device: self._queues[device].first_round)

    def _give_work(self, seat: Seat) -> None:
        worker = seat.worker
        if self.course.keeps_host_quiet and (
            self._workers.busy[worker.host] or self._quiet.is_paused(worker.host, self._time)
        ):
            return
        assignment = None
        if self._check_is_due(worker):
            self._commands.append(CheckDevice(worker))
        else:
            hosts = self._workers.hosts[worker.device]
            assignment = self._queues[worker.device].pop_for(worker.host, hosts)
            if assignment is None:
                return
            self._commands.append(Measure(worker, assignment.id))
            self._spend.begin(worker.device)
        self._workers.begin(seat, assignment)

    # The learner: what to measure next, and what has been learned.

    def _begin_job(self) -> None:
        """Gives the learner its next job, when it is time for one and it has none."""
        if self._rounds.open and self._rounds.current == 0 and self._rounds.has_ended(0):
            self._close(0)  # the evaluation set teaches nothing
        if self._learner.current is not None:
            return
        if self._has_learned():  # what was planned since then, and is empty, ends at once
            for number in self._rounds.ended:
                self._close(number)
        if not self._may_begin:
            self._learner.drop_plans()
        if self._learner.is_idle:
            self._learner.begin(self._next_jobs(), self._time)
        job = self._learner.next()
        if job is not None:
            if isinstance(job, Learn):
                self._to_close = self._rounds.ended
            self._commands.append(job)
        elif not self._rounds.open and not self.measuring and self._has_learned():
            self.is_over = True
            self._commands.append(Publish())

    def _next_jobs(self) -> list[Plan | Learn]:
        draws = self._rounds.draws()
        if draws and self._may_begin:
            return [*draws]
        is_at_work = bool(self.measuring) or any(self._queues.values())
        if self.course.keeps_host_quiet and is_at_work:
            return []
        choices = self._plans(self.course.devices)
        if not choices and self._rounds.ended != self._rounds.open:
            return []  # what is planned is to be measured first
        if self._has_learned():
            return choices
        source = self.course.devices[0]
        initial_ended = not self._rounds.unended(1, source) and not self._queues[source].deferred
        if self._learner.has_tried and not self._learner.has_heads and not initial_ended:
            return []  # there were too few labels: wait for all of the initial draw
        return [Learn(initial_ended), *choices]

    def _plans(self, devices: Iterable[str]) -> list[Plan | Learn]:
        """For those of these devices that need more to do: their part of their next round."""
        return [self._rounds.plan(device) for device in devices if self._is_hungry(device)]

    def _is_hungry(self, device: str) -> bool:
        """Whether this device's part of its next round should be planned now."""
        if self._rounds.is_planned(device) or not self._may_begin:
            return False
        waiting = len(self._queues[device])
        if not waiting or self.course.keeps_host_quiet:
            return not waiting
        workers = max(1, self._workers.able[device])
        mean_s = self._spend.mean_s.get(device)
        training_s = self._learner.training_s
        if training_s is None or mean_s is None:
            return waiting <= workers
        lasts_s = waiting * mean_s / workers
        return lasts_s <= _MARGIN * training_s

    def _has_learned(self) -> bool:
        """The learner knows all labels, in this process, and has heads, or gets none any more."""
        return self._learner.knows_all and (self._learner.has_heads or self._is_ending)

    # The end.

    @property
    def _may_begin(self) -> bool:
        """One more assignment may be handed out."""
        return not self._is_ending and self._spend.has_room

    def _look_at_budgets(self) -> None:
        """Ends the campaign when nothing runs and a budget has no room for what is to come."""
        if self._is_ending or (stop := self._spend.spent) is None:
            return
        if any(queue or not self._rounds.is_planned(d) for d, queue in self._queues.items()):
            self._begin_no_more()
            self._commands.append(BudgetSpent(stop))

    def _begin_no_more(self) -> None:
        """What runs still ends; what waits, and rounds that nobody has planned, are no more."""
        self._is_ending = True
        self._rounds.end_early(assignment for _, assignment in self.leases())
        self._queues = {device: RankedQueue() for device in self.course.devices}
        self._learner.drop_all()

    def _close(self, number: int) -> None:
        self._rounds.open.remove(number)
        self._commands.append(Close(number))
