"""The campaign loop: drives the state machine with real workers, a real learner and the store.

    pool -> graphs -> encoder -> round 0: evaluation set     (uniform, architectures held out)
                              -> round 1: initial            (acquired, without labels)
                              -> rounds 2..: acquired        (until the last, or a stop rule)
                                 heads are trained on 1.. and judged on round 0
                              -> snapshot

`scheduler.state_machine` decides what happens next; the loop carries its commands out and reports
what came of them. SQL is the truth: nothing is kept in memory that could not be read
back, so that a campaign killed at any moment goes on from the last recorded measurement. The loop
knows no Ray: `Workers` measure, and a `Learner` learns in a thread beside it.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from trappm.cluster.campaign.learner_thread import LearnerThread, training_labels
from trappm.cluster.campaign.news import CampaignStopped, News
from trappm.cluster.campaign.planner import PURPOSES, Planner
from trappm.cluster.campaign.progress import Pace, Progress, quiet_line, round_line
from trappm.cluster.campaign.publish import publish
from trappm.cluster.campaign.results import Results
from trappm.cluster.campaign.resume import course_so_far, waiting
from trappm.cluster.campaign.stop_check import StopCheck
from trappm.cluster.profiles.step_profiles import StepCache
from trappm.cluster.scheduler.messages import (
    AwaitQuiet,
    BudgetSpent,
    CheckDevice,
    Close,
    Command,
    Dismiss,
    Enough,
    Event,
    GiveUp,
    Learn,
    Learned,
    Measure,
    Plan,
    Planned,
    Quarantine,
    Seen,
    Settled,
    Tick,
    Worker,
)
from trappm.cluster.scheduler.training_report import LeftOut, TrainingReport
from trappm.cluster.spec import CampaignSpec
from trappm.cluster.workers.canary_gate import CanaryGate
from trappm.cluster.workers.interfaces import (
    CanaryCheck,
    Choice,
    Finished,
    KernelRun,
    Learner,
    Task,
    Workers,
)
from trappm.cluster.workers.kernel_gate import KernelGate
from trappm.cluster.workers.membership import CanaryStopError, Membership
from trappm.cluster.workers.rehearsal import rehearsal_line
from trappm.profiler.errors import CampaignError, StoreError
from trappm.store import AssignmentState, CampaignState, NotOwnerError, PlannedAssignment, Store

LEASE_S = 180.0
"""How long a worker may be silent."""

TICK_S = 1.0

LEARNER_POLL_S = 0.1
"""So long measurements are waited for while the learner's answer may come."""

SHOWN = 4
"""How many of the running measurements are shown."""


class Campaign:
    """Runs one campaign, from its first measurement to its snapshot."""

    def __init__(
        self,
        *,
        store: Store,
        campaign_id: str,
        spec: CampaignSpec,
        workers: Workers,
        learner: Learner,
        snapshots: Path,
        steps: StepCache,
        watch: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self.store = store
        self.id = campaign_id
        self.spec = spec
        self.workers = workers
        self.snapshots = snapshots
        self._steps = steps
        self.protocol = spec.measuring_protocol
        self._news = News(watch, self._is_ordered_to_stop)
        self._tell = self._news.tell
        self._pace = Pace(spec)
        self._canary_gate = CanaryGate(store, campaign_id, spec.canary)
        self._kernel_gate = KernelGate(store, spec.characterise)
        self._planner = Planner(store, campaign_id, spec)
        self._learner = LearnerThread(learner, self._news, self._pace, self._chosen, self._learned)
        self._stop_check = StopCheck(store, campaign_id, spec)
        self._events: deque[Event] = deque()
        self._membership = Membership(
            store,
            campaign_id,
            self.protocol.name,
            workers,
            self._canary_gate,
            self._kernel_gate,
            lambda: self._stop_check.holds,
            self._taken,
        )
        self._results = Results(
            store,
            campaign_id,
            spec,
            workers,
            self._canary_gate,
            self._kernel_gate,
            self._pace,
            self._news,
        )
        self._report = TrainingReport()
        self._left_out: Sequence[LeftOut] = ()
        self._notes: deque[tuple[str, str]] = deque()
        self._next_tick = 0.0

    def stop(self) -> None:
        """Asks a running campaign to stop; what is being measured is measured again later."""
        self._news.stop.set()

    def note(self, kind: str, message: str) -> None:
        """Tells what happened, and has it written down within a second; from any thread."""
        self._tell(news=message)
        self._notes.append((kind, message))

    def run(self) -> str | None:
        """Runs to the end.

        Returns:
            The snapshot's id; None if its labels are of no hardware, and nothing is published.

        Raises:
            CampaignStopped: it was asked to stop, by `stop` or by its state in the store, which
                says then whether it is paused or cancelled.
            CanaryStopError: no worker is left that may measure; the campaign is paused.
            NotOwnerError: another process has taken the campaign over; nothing more is written.
            TrappmError: the campaign cannot go on; its state says failed, and it can be resumed.
        """
        self._tell(news=rehearsal_line(self.spec.devices.keys))
        try:
            with self._learner:
                self._take_up()
                self._planner.make_pool(self.workers, self._news)
                traced = self._planner.make_steps(self._steps, self.workers, self._news)
                self._learner.prepare(self.store, self._planner.pool, traced)
                self._drive()
                self._write_notes()
                errors = self._report.devices
                snapshot_id = publish(
                    self.store, self._learner, self._news, self.id, self.snapshots, errors
                )
        except NotOwnerError:
            raise  # all that follows is the other's
        except CampaignStopped:
            self._results.wait(timeout_s=0)  # what has come back is not thrown away
            self._end(CampaignState.PAUSED, "stopped on request")
            raise
        except CanaryStopError as stop:
            self._end(CampaignState.PAUSED, str(stop))
            raise
        except Exception as error:
            # If it is the store that fails, its first error is the one to tell.
            with contextlib.suppress(StoreError):
                self._results.write()  # what has come back is not thrown away here either
            with contextlib.suppress(StoreError):
                self._end(CampaignState.FAILED, str(error))
            raise
        self._tell(str(CampaignState.FINISHED), eta_s=None, current=())
        return snapshot_id

    def _take_up(self) -> None:
        """Takes back what a process that was killed had begun; nothing, in a new campaign."""
        leased = self.store.assignments.of_campaign(self.id, state=AssignmentState.LEASED)
        self.store.assignments.release_leases(self.id)
        self.store.assignments.reopen_failed(self.id)
        if self.store.rounds.all(self.id):
            repeated = f"; {len(leased)} measurements were interrupted, and are repeated"
            self.note("resumed", f"it goes on{repeated if leased else ''}")

    # The loop.

    def _drive(self) -> None:
        self._stop_check.recall()
        known = course_so_far(self.store, self.id, self.spec, LEASE_S)
        self._results.ended = known.ended
        self._report = known.report
        self._machine = known.machine(self._is_to_check)
        self._handle(Tick())
        while not self._machine.is_over:
            self._obey()
            self._follow(self._membership.follow())
            if stalled := self._machine.stalled():
                self._membership.require(stalled)
                self._tell(f"waiting for a node with {', '.join(sorted(stalled))}", total=0)
            patience_s = LEARNER_POLL_S if self._learner.is_busy else TICK_S
            self._take(self._results.wait(patience_s))
            self._learner.follow(patience_s=0.0 if self.workers.running() else TICK_S)

    def _obey(self) -> None:
        """Stops if it is to; once a second: looks who is alive."""
        self._news.check_stop()
        if time.monotonic() < self._next_tick:
            return
        self._next_tick = time.monotonic() + TICK_S
        self._write_notes()
        self.workers.want(self._machine.to_come)
        self._handle(Seen(self.workers.answering()))
        self._handle(Tick())
        if line := self._stop_check.check_clock():
            self._tell(news=line)
            self._handle(Enough())
        self._show_counts()

    def _is_ordered_to_stop(self) -> bool:
        return self.store.campaigns.state(self.id) is not CampaignState.RUNNING

    def _handle(self, *events: Event) -> None:
        """Tells the machine, and does what it commands; what follows from that comes after it.

        Measurements that begin are leased in one transaction, unless another command comes between.
        """
        inside_of_a_command = bool(self._events)
        self._events.extend(events)
        if inside_of_a_command:
            return
        to_start: list[Measure] = []
        while self._events:
            for command in self._machine.handle(self._events[0], time.monotonic()):
                if isinstance(command, Measure):
                    to_start.append(command)
                else:
                    self._results.start(to_start)
                    to_start = []
                    self._do(command)
            self._events.popleft()
        self._results.start(to_start)

    def _do(self, command: Command) -> None:
        match command:
            case CheckDevice(worker):
                self._check(worker)
            case Dismiss(worker, why):
                self._membership.forget(worker)
                self.workers.dismiss(worker)
                self._tell(news=f"{worker.device}  {worker.name} was dismissed: {why}")
            case GiveUp(assignment_id, why):
                self.store.assignments.take_back(
                    assignment_id, why, max_attempts=self.spec.max_attempts
                )
            case Quarantine():
                self._results.quarantine(command)
            case AwaitQuiet():
                are_several = self._membership.by_device[command.worker.device] > 1
                whose = f"{command.worker.name}'s" if are_several else "this machine's"
                self.note("busy", quiet_line(command, whose))
            case Plan(device, number, count):
                self._plan(device, number, count)
            case Learn(initial_ended):
                self._learn(initial_ended)
            case Close(number):
                self.store.rounds.close(self.id, number, self._report.to_json() if number else {})
                if number:
                    self._tell(news=round_line(number, self._report))
            case BudgetSpent(stop):
                self._tell(news=self._stop_check.record(stop))

    def _is_to_check(self, worker: Worker) -> bool:
        return self._canary_gate.is_due(worker) or self._kernel_gate.is_due(worker)

    def _check(self, worker: Worker) -> None:
        task: CanaryCheck | KernelRun
        if self._canary_gate.is_due(worker):
            task = self._canary_gate.check(worker)
        else:
            task = self._kernel_gate.begin(worker)
        self.workers.start(worker, task, self.protocol)

    def _follow(self, events: Iterator[Event]) -> None:
        for event in events:
            self._handle(event)

    def _taken(self, device: str, count: int) -> None:
        self._results.ended[device] += count
        self._tell(news=f"{device}: {count} labels taken from earlier campaigns")

    def _take(self, finished: Sequence[Finished]) -> None:
        """Goes on after what has come back."""
        if not finished:
            return
        for entry in finished:
            if entry.is_lost:
                self._membership.forget(entry.worker)
        self._handle(*itertools.chain.from_iterable(map(self._results.events, finished)))
        self._show_counts()

    # The learner.

    def _learn(self, initial_ended: bool) -> None:
        known = training_labels(self.store, self.id)
        for left_out in known.left_out:
            if left_out not in self._left_out:
                self.note("stack", str(left_out))
        self._left_out = known.left_out
        self._learner.learn(known, initial_ended, is_alone=not self._machine.measuring)

    def _plan(self, device: str, number: int, count: int) -> None:
        if number == 0:
            self._planned(device, number, self._planner.draw(device, count))
        else:
            self._learner.choose(self._planner.request(device, number, count), number)

    def _chosen(self, device: str, number: int, choices: Sequence[Choice]) -> None:
        self._planned(device, number, self._planner.chosen(device, choices))

    def _planned(self, device: str, number: int, assignments: Sequence[PlannedAssignment]) -> None:
        if self._stop_check.holds:  # nobody will measure it
            self._handle(Planned(device, number, []))
            return
        self.store.rounds.plan(self.id, number, PURPOSES[min(number, 2)], assignments)
        settled = self._membership.taken_over(device)
        to_measure = self.store.assignments.of_campaign(
            self.id, device=device, state=AssignmentState.OPEN, round_number=number
        )
        self._handle(Settled(settled), Planned(device, number, [waiting(a) for a in to_measure]))

    def _learned(self, report: TrainingReport, initial_ended: bool) -> None:
        source = self.spec.devices.source
        has_heads = source in report.devices
        if initial_ended and not has_heads and not self._stop_check.holds:
            outcomes = self.store.campaigns.outcome_counts(self.id).get(source, {})
            attempts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
            raise CampaignError(
                f"the initial draw gave too few labels on {source} to learn from "
                f"(attempts: {attempts}); when the machine is quiet: "
                f"trappm campaign retry {self.id} --outcome "
                f"{max(outcomes, key=outcomes.__getitem__, default='error')}; "
                f"trappm campaign resume {self.id}"
            )
        report = replace(report, left_out=self._left_out)
        self._report, line = self._stop_check.check_errors(report)
        self._tell(news=line)
        self._handle(Learned(has_heads, self._stop_check.holds))

    # Telling what happens.

    def _end(self, state: CampaignState, message: str) -> None:
        """In this state, unless an order has set another; nothing is with a worker any more."""
        self._write_notes()
        now = self.store.owners.end_campaign(self.id, state, message)
        self._tell(str(now), eta_s=None, current=())

    def _write_notes(self) -> None:
        while self._notes:
            kind, message = self._notes[0]
            self.store.campaigns.log_event(self.id, kind, {"message": message})
            self._notes.popleft()

    def _show_counts(self) -> None:
        number = self._machine.round_number
        workers = self._membership.by_device
        at_work = self.workers.running()
        shown = [f"{w.device}: {_what(t)}" for w, t in at_work[:SHOWN]]
        more = [f"and {len(at_work) - SHOWN} more"] if len(at_work) > SHOWN else []
        self._tell(
            f"measuring, round {number} of {1 + self.spec.rounds.count}",
            done=self._results.ended.total(),
            total=sum(self.spec.budget(d) for d in self.spec.devices.keys),
            eta_s=self._pace.eta_s(self._results.ended, number, workers),
            current=(*shown, *more),
        )


def _what(task: Task) -> str:
    """What a worker is at, in words."""
    if isinstance(task, KernelRun):
        return f"its kernels, for up to {task.seconds:.0f} s"
    return str(task.configuration)
