"""The campaign as a state machine: events in, commands out; no Ray, no SQL, no clock of its own.

    Joined, Lost                   -->  workers    --> Measure, CheckDevice
    Measured, Planned, Settled     -->  queues     --> GiveUp, Quarantine
    Learned                        -->  learner    --> Plan, Learn, Close

Assignments are handed out one by one, so that long and short ones mix and no worker waits for a
round to end. On GPUs the learner runs ahead: the next round is chosen while there is still work for
as long as choosing will take. On CPU devices, whose cores measurements and the learner share, one
thing runs at a time. Each event costs O(log n) of the assignments that wait.

Each device has its share of each round. A round is closed with the report of the first training
that began after its last assignment had ended. Once a stop rule holds, nothing more begins: what
runs ends and is learned from, and what was only planned counts as ended. No assignment is handed
out that would exceed a budget.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from trappm.cluster.scheduler import messages
from trappm.cluster.scheduler.messages import Command, Course, Event, Learn, Plan, Worker
from trappm.cluster.scheduler.queues import QuietWatch, RankedQueue, WorkerTable
from trappm.cluster.scheduler.stop_rules import Spend
from trappm.profiler.records import Outcome
from trappm.store.records import Assignment, attempts_allowed, is_final

UNLEARNED_ROUNDS = 2
"""Number of rounds that need no training before they are planned: evaluation and initial."""

_MARGIN = 2.0
"""Training starts when the waiting work lasts this many times as long as the last training."""


class Rounds:
    """Parts of rounds by device: planned, ended, closed. A round has ended when all parts have.

    Arguments as in `Machine`.
    """

    def __init__(
        self, course: Course, next_rounds: Mapping[str, int], closed: Collection[int]
    ) -> None:
        self.next = dict.fromkeys(course.devices, 0) | dict(next_rounds)
        """First round that is not planned, by device."""
        self.open = [n for n in range(course.rounds) if n not in closed]
        """Rounds that are not closed, the earliest first."""
        self.unended: Counter[tuple[int, str]] = Counter()
        """Number of planned assignments that have not ended, by round and device."""
        self._course = course

    @property
    def current(self) -> int:
        """The earliest round that is not closed, or the last round."""
        return self.open[0] if self.open else self._course.rounds - 1

    @property
    def ended(self) -> list[int]:
        """Rounds that have ended and are not closed."""
        return [number for number in self.open if self.has_ended(number)]

    def has_ended(self, number: int) -> bool:
        return all(
            self.next[device] > number and self.unended[number, device] == 0
            for device in self._course.devices
        )

    def is_planned(self, device: str) -> bool:
        """Return whether the device's parts of all rounds are planned."""
        return self.next[device] >= self._course.rounds

    def unplanned(self, device: str) -> int:
        """Return the number of assignments in the device's parts that are not planned yet."""
        return sum(self._course.shares[device][self.next[device] :])

    def draws(self) -> list[Plan]:
        """Return plans that need no training and have not been carried out."""
        return [
            self.plan(device, number)
            for number in range(UNLEARNED_ROUNDS)
            for device in self._course.devices
            if self.next[device] <= number
        ]

    def plan(self, device: str, number: int) -> Plan:
        """Return the plan of the device's part of a round."""
        return Plan(device, number, self._course.shares[device][number])

    def end_early(self, running: Iterable[Assignment]) -> None:
        """Plan no more rounds; only these running assignments are still to end."""
        planned = max(self.next.values())
        self.open = [number for number in self.open if number < planned]
        self.next = dict.fromkeys(self._course.devices, self._course.rounds)
        self.unended = Counter((a.round_number, a.device) for a in running)


class LearnerJobs:
    """Jobs of the learner: trainings, and choices of what to measure next."""

    def __init__(self) -> None:
        self.current: Plan | Learn | None = None
        self.training_s: float | None = None
        """Duration of the last training with the choices that followed it."""
        self.has_heads = False
        self.has_tried = False
        """True if a training has begun in this process."""
        self.knows_all = False
        """True if no assignment has ended since the last training began."""
        self.waiting: deque[Plan | Learn] = deque()
        self._since = 0.0
        self._includes_training = False

    def begin(self, jobs: Iterable[Plan | Learn], time: float) -> None:
        """Add jobs after all earlier ones have ended."""
        self.waiting.extend(jobs)
        self._since = time

    def next(self) -> Plan | Learn | None:
        """Begin the next job and return it; None if there is none."""
        if self.waiting:
            self.current = self.waiting.popleft()
            if isinstance(self.current, Learn):
                self._includes_training = self.has_tried = self.knows_all = True
        return self.current

    def end(self, time: float) -> None:
        """Note that the current job has ended."""
        if isinstance(self.current, Learn) and not self.has_heads:
            self.waiting.clear()  # there is nothing to choose by
        self.current = None
        if self._includes_training and not self.waiting:
            self.training_s = time - self._since
            self._includes_training = False


class Machine:
    """State of one campaign: takes events, and returns the commands that follow from them.

    Args:
        course: Assignments of the campaign by device and round.
        check_is_due: Whether a worker must do a check before anything else.
        stopped: Workers that failed their checks, as of `WorkerTable`.
        waiting: Assignments that were planned before and have not ended.
        next_rounds: First round that is not planned, by device; 0 by default.
        closed: Rounds that were closed before.
        enough: Whether a stop rule held before.
        spend: What may still be spent; by default everything.
    """

    def __init__(
        self,
        course: Course,
        *,
        check_is_due: Callable[[Worker], bool] = lambda worker: False,
        stopped: Collection[Worker] = (),
        waiting: Iterable[Assignment] = (),
        next_rounds: Mapping[str, int] | None = None,
        closed: Collection[int] = (),
        enough: bool = False,
        spend: Spend | None = None,
    ) -> None:
        self.course = course
        self.spend = spend or Spend()
        self.is_over = False
        self._check_is_due = check_is_due
        self.workers = WorkerTable(stopped)
        self.rounds = Rounds(course, next_rounds or {}, closed)
        self._queues = {d: RankedQueue(self.rounds.next[d]) for d in course.devices}
        self._failed_on: dict[str, tuple[str, ...]] = {}
        """Hosts on which assignments failed, by their ids."""
        self._quiet = QuietWatch()
        self._to_close: list[int] = []
        self.learner = LearnerJobs()
        self._is_ending = False
        """True if a stop rule held, so that nothing more begins."""
        self._time = 0.0
        self._commands: list[Command] = []
        for assignment in waiting:
            self._add(assignment)
        if enough:
            self._begin_no_more()

    @property
    def to_come(self) -> dict[str, int]:
        """Number of assignments by device that have not begun, planned or not; 0 if none may."""
        if not self._may_begin:
            return dict.fromkeys(self.course.devices, 0)
        return {
            d: len(queue) + queue.deferred + self.rounds.unplanned(d)
            for d, queue in self._queues.items()
        }

    def stalled(self) -> set[str]:
        """Return devices that have work and no worker, if nothing else runs."""
        if self.learner.current or self.workers.at_work or self.is_over:
            return set()
        return {d for d, queue in self._queues.items() if queue and not self.workers.able(d)}

    def handle(self, event: Event, now: float) -> Sequence[Command]:
        """Take an event, and return the commands to carry out now, in this order.

        Args:
            event: What happened.
            now: Monotonic time in seconds.
        """
        self._time = now
        self._commands = []
        if not self.is_over:
            self._take(event)
            self._check_budgets()
            self._begin_job()
            if not (self.course.keeps_host_quiet and self.learner.current):
                self._hand_out()
        return self._commands

    # Events.

    def _take(self, event: Event) -> None:  # noqa: PLR0912  (one branch per event)
        match event:
            case messages.Joined(worker):
                if worker.device in self._queues:
                    self._lose(worker, "it was restarted")
                    self.workers.join(worker)
            case messages.Lost(worker, why):
                self._lose(worker, why)
            case messages.Measured():
                self._end(event)
            case messages.DeviceChecked(worker):
                self.workers.free(worker)
            case messages.Planned(device, number, assignments):
                if not self._is_ending:
                    self.rounds.next[device] = number + 1
                    self._queues[device].end = max(self._queues[device].end, number + 1)
                    for assignment in assignments:
                        self._add(assignment)
                if number >= UNLEARNED_ROUNDS and not self.course.keeps_host_quiet:
                    # If rounds are short compared to a training, plan several before the next one.
                    self.learner.waiting.extend(self._plans([device]))
                self.learner.end(self._time)
            case messages.Settled(assignment_ids):
                self.spend.labels += len(assignment_ids)
                self._settle(assignment_ids)
            case messages.Learned(has_heads):
                self.learner.has_heads = has_heads
                if not has_heads:  # it needs the labels of what was deferred
                    for queue in self._queues.values():
                        queue.end = self.course.rounds
                for number in self._to_close if has_heads or self._is_ending else ():
                    self._close(number)
                self.learner.end(self._time)
            case messages.Enough():
                self._begin_no_more()
            case _:
                self.workers.forget_hosts(self._time)

    def _add(self, assignment: Assignment) -> None:
        if assignment.round_number not in self.rounds.open:  # deferred when its round was closed
            assignment = replace(assignment, round_number=self.rounds.current)
        self.rounds.unended[assignment.round_number, assignment.device] += 1
        self._queues[assignment.device].push(assignment)

    def _end(self, event: messages.Measured) -> None:
        worker, running = event.worker, self.workers.running(event.worker)
        self.spend.spend(worker.device, event.seconds)
        if running is None or running.id != event.assignment_id:
            return  # its worker was lost before, and the assignment waits again
        self.workers.free(worker)
        self.spend.end(worker.device)
        self.spend.labels += event.is_label
        if self.course.keeps_host_quiet:
            pause = self._quiet.note(worker, event.others_share, self._time)
            if pause is not None:
                self._commands.append(pause)
        if is_final(event.outcome):
            self._ended(running.round_number, running.device)
        else:
            self._fail(running, worker, event.outcome)

    def _lose(self, worker: Worker, why: str) -> None:
        running = self.workers.leave(worker, self._time)
        if running is not None:
            self.spend.end(worker.device)
            self._commands.append(messages.GiveUp(running.id, why))
            self._fail(running, worker, None)

    def _fail(self, assignment: Assignment, worker: Worker, outcome: Outcome | None) -> None:
        failures = assignment.failures + 1
        hosts = (*self._failed_on.pop(assignment.id, ()), worker.host)
        if failures >= attempts_allowed(outcome, self.course.max_attempts):
            self._commands.append(messages.Quarantine(assignment, failures, hosts, outcome))
            self._ended(assignment.round_number, assignment.device)
        elif self._is_ending:
            self._ended(assignment.round_number, assignment.device)
        else:
            self._failed_on[assignment.id] = hosts
            again = replace(assignment, failures=failures)
            if outcome is Outcome.UNSTABLE and self.course.keeps_host_quiet:
                again = self._defer(again)
            self._queues[assignment.device].push(again)

    def _defer(self, assignment: Assignment) -> Assignment:
        """Move an assignment to the next round, when the host may be quieter."""
        number, device = assignment.round_number, assignment.device
        next_number = next((n for n in self.rounds.open if n > number), number)
        self.rounds.unended[next_number, device] += 1
        self.rounds.unended[number, device] -= 1
        return replace(assignment, round_number=next_number)

    def _settle(self, assignment_ids: Iterable[str]) -> None:
        """End assignments that need no measurement."""
        for assignment_id in assignment_ids:
            for device, queue in self._queues.items():
                number = queue.remove(assignment_id)
                if number is not None:
                    self._ended(number, device)

    def _ended(self, number: int, device: str) -> None:
        self.rounds.unended[number, device] -= 1
        self.learner.knows_all = False

    # Measurements.

    def _hand_out(self) -> None:
        devices: Iterable[str] = self.course.devices
        if self.course.keeps_host_quiet:  # devices that share a host's cores take turns by round
            with_work = [device for device in devices if self._queues[device]]
            devices = sorted(with_work, key=lambda device: self._queues[device].first_round)
        for device in devices:
            for worker in self.workers.idle(device):
                if not self._queues[device] or not self._may_begin or self.spend.awaits_first:
                    break
                self._give_work(worker)

    def _give_work(self, worker: Worker) -> None:
        if self.course.keeps_host_quiet and (
            self.workers.is_busy(worker.host) or self._quiet.is_paused(worker.host, self._time)
        ):
            return
        assignment = None
        if self._check_is_due(worker):
            self._commands.append(messages.CheckDevice(worker))
        else:
            hosts = self.workers.hosts(worker.device)
            queue = self._queues[worker.device]
            assignment = queue.pop_for(worker.host, hosts, self._failed_on)
            if assignment is None:
                return
            self._commands.append(messages.Measure(worker, assignment.id))
            self.spend.begin(worker.device)
        self.workers.begin(worker, assignment)

    # The learner: what to measure next, and what has been learned.

    def _begin_job(self) -> None:
        """Give an idle learner its next job, if one is due."""
        if self.rounds.open and self.rounds.current == 0 and self.rounds.has_ended(0):
            self._close(0)  # nothing is learned from the evaluation set
        if self.learner.current is not None:
            return
        if self._has_learned():  # rounds that were planned since then and are empty end at once
            for number in self.rounds.ended:
                self._close(number)
        if not self._may_begin:
            self.learner.waiting = deque(x for x in self.learner.waiting if isinstance(x, Learn))
        if not self.learner.waiting:
            self.learner.begin(self._next_jobs(), self._time)
        job = self.learner.next()
        if job is not None:
            if isinstance(job, Learn):
                self._to_close = self.rounds.ended
            self._commands.append(job)
        elif not self.rounds.open and not self.workers.at_work and self._has_learned():
            self.is_over = True

    def _next_jobs(self) -> list[Plan | Learn]:
        draws = self.rounds.draws()
        if draws and self._may_begin:
            return [*draws]
        is_at_work = bool(self.workers.at_work) or any(self._queues.values())
        if self.course.keeps_host_quiet and is_at_work:
            return []
        choices = self._plans(self.course.devices)
        if not choices and self.rounds.ended != self.rounds.open:
            return []  # planned assignments are measured first
        if self._has_learned():
            return choices
        source = self.course.devices[0]
        initial_ended = not self.rounds.unended[1, source] and not self._queues[source].deferred
        if self.learner.has_tried and not self.learner.has_heads and not initial_ended:
            return []  # there were too few labels: wait for all of the initial round
        return [Learn(initial_ended), *choices]

    def _plans(self, devices: Iterable[str]) -> list[Plan | Learn]:
        """Return plans for those of these devices that need more work."""
        return [self.rounds.plan(d, self.rounds.next[d]) for d in devices if self._needs_work(d)]

    def _needs_work(self, device: str) -> bool:
        """Return whether the device's part of its next round should be planned now."""
        if self.rounds.is_planned(device) or not self._may_begin:
            return False
        waiting = len(self._queues[device])
        if not waiting or self.course.keeps_host_quiet:
            return not waiting
        workers = max(1, len(self.workers.able(device)))
        mean_s = self.spend.mean_s.get(device)
        training_s = self.learner.training_s
        if training_s is None or mean_s is None:
            return waiting <= workers
        return waiting * mean_s / workers <= _MARGIN * training_s

    def _has_learned(self) -> bool:
        """Return whether the learner knows all labels, and has heads or will get none."""
        return self.learner.knows_all and (self.learner.has_heads or self._is_ending)

    # The end.

    @property
    def _may_begin(self) -> bool:
        """Return whether one more assignment may be handed out."""
        return not self._is_ending and self.spend.has_room

    def _check_budgets(self) -> None:
        """End the campaign when nothing runs and a budget has no room for what is to come."""
        if self._is_ending or (stop := self.spend.spent) is None:
            return
        if any(queue or not self.rounds.is_planned(d) for d, queue in self._queues.items()):
            self._begin_no_more()
            self._commands.append(messages.BudgetSpent(stop))

    def _begin_no_more(self) -> None:
        """Let only running assignments end; drop what waits and what is not planned."""
        self._is_ending = True
        self.rounds.end_early(assignment for _, assignment in self.workers.leases())
        self._queues = {device: RankedQueue() for device in self.course.devices}
        self.learner.waiting.clear()

    def _close(self, number: int) -> None:
        self.rounds.open.remove(number)
        self._commands.append(messages.Close(number))
