"""A whole cluster in one loop with virtual time: it does what the machine commands, with faults.

It stands where Ray and the store stand. Its ledger is as strict as the store: it fails when an
assignment is handed out twice, ends twice, or is held by a worker that is not there.
"""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from trappm.cluster.scheduler.messages import (
    BudgetSpent,
    Close,
    Course,
    Enough,
    GiveUp,
    Joined,
    Learn,
    Learned,
    Lost,
    Measure,
    Measured,
    Plan,
    Planned,
    Quarantine,
    Tick,
    Worker,
)
from trappm.cluster.scheduler.state_machine import Machine
from trappm.cluster.scheduler.stop_rules import Spend, StopRules
from trappm.profiler.records import Configuration, Outcome
from trappm.store import Assignment, AssignmentState
from trappm.store.records import Role

TICK_S = 10.0

LIMIT_S = 600.0
"""What a measurement is expected to take at most, before one has ended."""

SILENT_S = 180.0

LONGEST_S = 3e6
"""No campaign that is played takes so long."""

OTHERS_SHARE = 0.5
"""Share of the cores that other programs use while a measurement is unstable."""

ANY = Configuration(architecture="resnet18", batch_size=1, input_size=64)


def waiting(id_: str, device: str, number: int, rank: int, failures: int = 0) -> Assignment:
    """An open assignment of a round."""
    return Assignment(
        id=id_, campaign_id="played", round_number=number, configuration=ANY, device=device,
        role=Role.TRAIN, rank=rank, reason={}, state=AssignmentState.OPEN, attempts=failures,
        failures=failures, worker=None,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Weather:
    """How long things take, and how often they go wrong: shares of all measurements."""

    measuring_s: float = 30.0
    learning_s: float = 60.0
    choosing_s: float = 5.0
    failing: float = 0.0
    """Is unstable."""
    killing: float = 0.0
    """The worker is lost in the middle of it; another joins after `joining_s`."""
    freezing: float = 0.0
    """The worker does not answer any more, and is lost after `SILENT_S`."""
    joining_s: float = 60.0
    poisoned: float = 0.0
    """Share of assignments that kill every worker they meet."""
    enough_after: float = np.inf
    """With the training of this number a stop rule holds."""
    time_is_up_s: float = np.inf
    """Time at which a stop rule holds in any case."""
    slow_host: str = ""
    """Where everything takes ten times as long."""


@dataclass
class Ledger:
    """What became of every assignment."""

    planned: Counter[tuple[str, int]] = field(default_factory=Counter)
    state: dict[str, str] = field(default_factory=dict)
    holder: dict[str, str] = field(default_factory=dict)
    """By assignment that is leased: the worker."""
    starts: Counter[str] = field(default_factory=Counter)
    closed: list[int] = field(default_factory=list)
    quarantined: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By assignment that was given up: the hosts where it failed."""
    trainings: int = 0
    rules: StopRules | None = None
    """With a budget of labels, GPU-hours or money."""
    seconds: float = 0.0
    """Of measuring."""
    longest_s: float = 0.0
    """So long the longest measurement took."""
    enough: str | None = None
    """The stop rule that holds."""

    @property
    def ended(self) -> list[str]:
        return [id_ for id_, state in self.state.items() if state in {"done", "failed"}]

    @property
    def labels(self) -> int:
        return sum(state == "done" for state in self.state.values())

    def machine(self, course: Course, **so_far) -> Machine:
        rules = self.rules or StopRules()
        spend = Spend(rules=rules, labels=self.labels, seconds=self.seconds, limit_s=LIMIT_S)
        return Machine(course, spend=spend, **so_far)

    def resumed(self, course: Course) -> Machine:
        """A machine that continues after everything but the ledger was lost."""
        for id_ in list(self.holder):
            self.end(id_, "open")
        left = [
            waiting(id_, device, int(number), int(rank))
            for id_, state in self.state.items()
            if state == "open"
            for device, number, rank in [id_.split("/")]
        ]
        next_rounds = {
            device: 1 + max((n for d, n in self.planned if d == device), default=-1)
            for device in course.devices
        }
        return self.machine(
            course, waiting=left, next_rounds=next_rounds, closed=self.closed,
            enough=self.enough is not None,
        )  # fmt: skip

    def add(self, device: str, number: int, ids: list[str]) -> None:
        assert (device, number) not in self.planned, "planned twice"
        self.planned[device, number] = len(ids)
        assert not self.state.keys() & ids
        self.state |= dict.fromkeys(ids, "open")

    def lease(self, id_: str, worker: str) -> None:
        assert self.state[id_] == "open", f"{id_} is {self.state[id_]}"
        assert not self.enough, f"{id_} begins after the end"
        if self.rules and self.rules.labels:
            assert self.labels + len(self.holder) < self.rules.labels, "too many labels"
        self.state[id_], self.holder[id_] = "leased", worker
        self.starts[id_] += 1

    def end(self, id_: str, state: str) -> None:
        assert self.state[id_] in ({"leased"} if state != "failed" else {"open", "leased"})
        self.holder.pop(id_, None)
        self.state[id_] = state


class VirtualCluster:
    """Plays a campaign to its end.

    Args:
        workers: for each device, how many hosts with how many workers each are there at first.
    """

    def __init__(
        self,
        course: Course,
        workers: dict[str, tuple[int, int]],
        weather: Weather,
        generator: np.random.Generator,
        machine: Machine | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.course, self.weather, self.ledger = course, weather, ledger or Ledger()
        self.machine = machine or self.ledger.machine(course)
        self.time_s = 0.0
        self.idle_s: Counter[str] = Counter()
        """By device: how long its workers were idle though work of the budget was left."""
        self.busy_s: Counter[str] = Counter()
        self.workers = sum(hosts * each for hosts, each in workers.values())
        self._generator = generator
        self._numbers = itertools.count()
        self._agenda: list[tuple] = []
        self._alive: dict[str, Worker] = {}
        self._doing: dict[str, tuple[str | None, float]] = {}
        self._at_work: Counter[str] = Counter()
        self._there: Counter[str] = Counter()
        self._job = False
        self._randoms = iter(())
        begun = Counter(id_.partition("/")[0] for id_ in self.ledger.ended)
        self._left = {d: sum(course.shares[d]) - begun[d] for d in course.devices}
        """By device: what of the budget nobody has begun."""
        for device, (hosts, each) in workers.items():
            for host, slot in itertools.product(range(hosts), range(each)):
                name = f"{device}-{host}-{slot}"
                self.at(0.0, Joined(Worker(name, device, f"{device}-{host}", "stack")))
        self.at(TICK_S, Tick())
        if weather.time_is_up_s < np.inf:
            self.at(weather.time_is_up_s, Enough())

    def at(self, time_s: float, event: object) -> None:
        heapq.heappush(self._agenda, (time_s, next(self._numbers), event))

    def run(self, until_s: float = np.inf) -> VirtualCluster:
        while not self.machine.is_over and self._agenda and self._agenda[0][0] <= until_s:
            time_s, _, event = heapq.heappop(self._agenda)
            assert time_s < LONGEST_S, "it continues for ever"
            self._pass(time_s - self.time_s)
            self.time_s = time_s
            if (news := self._happen(event)) is not None:
                for command in self.machine.handle(news, time_s):
                    self._do(command)
        return self

    # What happens.

    def _happen(self, event):
        kind = type(event)
        if kind is Measured:
            worker = event.worker
            if self._doing.get(worker.name, (None,))[0] != event.assignment_id:
                return None  # it was lost meanwhile
            self._rest(worker)
            self.ledger.seconds += event.seconds
            self.ledger.longest_s = max(self.ledger.longest_s, event.seconds)
            self.ledger.end(event.assignment_id, "done" if event.outcome is Outcome.OK else "open")
        elif kind is Joined:
            self._alive[event.worker.name] = event.worker
            self._there[event.worker.device] += 1
            self._doing[event.worker.name] = (None, 0.0)
        elif kind is Lost:
            if self._alive.get(event.worker.name) is not event.worker:
                return None
            self._remove(event.worker)
        elif kind is Tick:
            self.at(self.time_s + TICK_S, event)
        elif kind is Enough:
            self.ledger.enough = self.ledger.enough or "rule"
        elif kind in {Learned, Planned}:
            self._job = False
            if kind is Planned and not self.ledger.enough:  # written down, or not any more
                ids = [assignment.id for assignment in event.assignments]
                self.ledger.add(event.device, event.round_number, ids)
        return event

    def _pass(self, seconds: float) -> None:
        for device, left in self._left.items():
            self.busy_s[device] += seconds * self._at_work[device]
            if left > 0:
                self.idle_s[device] += seconds * (self._there[device] - self._at_work[device])

    def _rest(self, worker: Worker) -> None:
        self._doing[worker.name] = (None, 0.0)
        self._at_work[worker.device] -= 1

    def _remove(self, worker: Worker) -> None:
        del self._alive[worker.name]
        if self._doing.pop(worker.name)[0] is not None:
            self._at_work[worker.device] -= 1
        self._there[worker.device] -= 1
        again = Worker(worker.name, worker.device, worker.host, worker.fingerprint)
        self.at(self.time_s + self.weather.joining_s, Joined(again))

    # What is commanded.

    def _do(self, command) -> None:
        kind = type(command)
        if kind is Measure:
            self._measure(command.worker, command.assignment_id)
        elif kind is GiveUp:
            self.ledger.end(command.assignment_id, "open")
            self._left[command.assignment_id.partition("/")[0]] += 1
        elif kind is Quarantine:
            self.ledger.end(command.assignment.id, "failed")
            self.ledger.quarantined[command.assignment.id] = command.hosts
            self._left[command.assignment.device] -= 1
        elif kind is Plan:
            ids = [f"{command.device}/{command.round_number}/{i}" for i in range(command.count)]
            planned = [
                waiting(id_, command.device, command.round_number, i) for i, id_ in enumerate(ids)
            ]
            self._begin_thinking()
            takes_s = 0.0 if command.round_number == 0 else self.weather.choosing_s
            self.at(self.time_s + takes_s, Planned(command.device, command.round_number, planned))
        elif kind is Learn:
            self._begin_thinking()
            self.ledger.trainings += 1
            learned_s = self.time_s + self.weather.learning_s
            if self.ledger.trainings >= self.weather.enough_after:
                self.at(learned_s, Enough())
            self.at(learned_s, Learned(True))
        elif kind is Close:
            assert command.round_number not in self.ledger.closed
            self.ledger.closed.append(command.round_number)
        elif kind is BudgetSpent:
            assert not self.ledger.enough
            assert not self.ledger.holder, "something runs that might fail"
            self.ledger.enough = command.stop.rule

    def _begin_thinking(self) -> None:
        assert not self._job, "two thoughts at once"
        assert not (self.course.keeps_host_quiet and self._at_work.total()), (
            "measurements disturbed"
        )
        self._job = True

    def _measure(self, worker: Worker, id_: str) -> None:
        assert self._alive.get(worker.name) is worker, "work for a worker that is not there"
        assert self._doing[worker.name][0] is None, "two things at once"
        if self.course.keeps_host_quiet:
            assert not self._job, "the learner disturbs a measurement"
            busy = {self._alive[name].host for name, what in self._doing.items() if what[0]}
            assert worker.host not in busy, "one measurement disturbs another"
        self.ledger.lease(id_, worker.name)
        self._doing[worker.name] = (id_, self.time_s)
        self._at_work[worker.device] += 1
        self._left[worker.device] -= 1
        weather, chance = self.weather, self._random()
        seconds = weather.measuring_s * (0.25 + 1.5 * self._random())
        seconds *= 10 if worker.host == weather.slow_host else 1
        if weather.poisoned and share_of(id_) < weather.poisoned:
            self.at(self.time_s + seconds / 2, Lost(worker, "poisoned"))
        elif chance >= weather.failing + weather.killing + weather.freezing:
            self.at(self.time_s + seconds, Measured(worker, id_, Outcome.OK, seconds, True))
        elif chance < weather.failing:
            self._left[worker.device] += 1
            event = Measured(worker, id_, Outcome.UNSTABLE, seconds, False, OTHERS_SHARE)
            self.at(self.time_s + seconds, event)
        elif chance < weather.failing + weather.killing:
            self.at(self.time_s + seconds / 2, Lost(worker, "killed"))
        else:
            self.at(self.time_s + SILENT_S, Lost(worker, "it does not answer"))

    def _random(self) -> float:
        value = next(self._randoms, None)
        if value is None:
            self._randoms = iter(self._generator.random(10_000).tolist())
            value = next(self._randoms)
        return value


def share_of(text: str) -> float:
    """A number from 0 to 1 that belongs to this text."""
    return zlib.crc32(text.encode()) / 2**32


class Desk:
    """Hands events to a machine; the learner answers at once, with heads where `learns`."""

    def __init__(self, plan, workers, learns=lambda order: True, **machine):
        self.machine = Machine(plan, **machine)
        self.now = 0.0
        self.commands = []
        self.learned = []
        self.learns = learns
        self.workers = {w.name: w for w in workers}
        for worker in workers:
            self.tell(Joined(worker))

    def tell(self, event, after_s=0.0):
        self.now += after_s
        orders = self.machine.handle(event, self.now)
        answers = []
        for command in orders:
            self.commands.append(command)
            if isinstance(command, Plan):
                part = (command.device, command.round_number)
                ids = ["{}/{}/{}".format(*part, i) for i in range(command.count)]
                answers.append(Planned(*part, [waiting(x, *part, i) for i, x in enumerate(ids)]))
            elif isinstance(command, Learn):
                self.learned.append(self.learns(command))
                answers.append(Learned(self.learned[-1]))
        for answer in answers:
            orders = orders + self.tell(answer)
        return orders

    def measured(self, name, outcome="ok", share=None):
        """Ends what this worker is at; what is then commanded."""
        worker, result = self.workers[name], Outcome(outcome)
        is_ok = result is Outcome.OK
        return self.tell(Measured(worker, self.doing()[name], result, 1.0, is_ok, share), 1.0)

    def doing(self):
        return {worker.name: assignment.id for worker, assignment in self.machine.workers.leases()}
