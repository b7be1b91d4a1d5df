"""The campaign loop: drives the state machine with real workers, a real learner and the store.

    pool -> graphs -> encoder -> round 0: evaluation set     (uniform, architectures held out)
                              -> round 1: initial            (acquired, without labels)
                              -> rounds 2..: acquired        (until the last, or a stop rule)
                                 heads are trained on 1.. and judged on round 0
                              -> snapshot

What happens next is decided in `machine`; here its commands are carried out, and it is told what
came of them. SQL is the truth: nothing is kept in memory that could not be read back, so that a
campaign killed at any moment goes on from the last recorded measurement. The loop knows no Ray: a
`Crew` measures, and a `Learner` learns in a thread beside it.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trappm.cluster.campaign.news import CampaignStopped, Teller
from trappm.cluster.campaign.planner import PURPOSES, Planner
from trappm.cluster.campaign.progress import Pace, Progress, measurement_line, round_line
from trappm.cluster.campaign.publish import publish
from trappm.cluster.campaign.resume import course_so_far, waiting
from trappm.cluster.campaign.spec import CampaignSpec
from trappm.cluster.campaign.stop_check import Ending
from trappm.cluster.learning.learner_thread import LeftOut, Thinker, training_labels
from trappm.cluster.profiles.kernel_profiles import KernelCache
from trappm.cluster.scheduler.messages import (
    CanaryMeasured,
    Close,
    Command,
    Dismiss,
    Enough,
    Event,
    GiveUp,
    Learn,
    Learned,
    Lost,
    Measure,
    MeasureCanary,
    Measured,
    Plan,
    Planned,
    Quarantine,
    Seen,
    Settled,
    Spent,
    Stopped,
    Tick,
)
from trappm.cluster.workers.canary_gate import Canaries
from trappm.cluster.workers.interfaces import CanaryCheck, Choice, Crew, Finished, Learner
from trappm.cluster.workers.rehearsal import rehearsal_line
from trappm.cluster.workers.roster import CanaryStopError, Roster
from trappm.profiler.errors import CampaignError, StoreError
from trappm.store import Assignment, CampaignState, NotOwnerError, PlannedAssignment, Store
from trappm.store.records import is_final
from trappm.store.repositories.label_rows import makes_label
from trappm.store.validation import recordable

LEASE_S = 180.0
"""How long a worker may be silent."""

TICK_S = 1.0

THINKING_S = 0.1
"""So long measurements are waited for while the learner's answer may come."""

SHOWN = 4
"""So many of the measurements that run are told."""


class Campaign:
    """One campaign on its way; `run` returns when it is finished."""

    def __init__(
        self,
        *,
        store: Store,
        campaign_id: str,
        spec: CampaignSpec,
        crew: Crew,
        learner: Learner,
        snapshots: Path,
        kernels: KernelCache,
        watch: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self.store = store
        self.id = campaign_id
        self.spec = spec
        self.crew = crew
        self.snapshots = snapshots
        self._kernels = kernels
        self.protocol = spec.measuring_protocol
        self._teller = Teller(watch, self._is_ordered_to_stop)
        self._tell = self._teller.tell
        self._pace = Pace(spec)
        self._canaries = Canaries(store, campaign_id, spec.canary)
        self._planner = Planner(store, campaign_id, spec)
        self._thinker = Thinker(learner, self._teller, self._pace, self._chosen, self._learned)
        self._ending = Ending(store, campaign_id, spec)
        self._events: deque[Event] = deque()
        self._roster = Roster(
            store, campaign_id, self.protocol.name, crew, self._canaries, self._ending, self._taken
        )
        self._leases: dict[str, Assignment] = {}
        self._unwritten: list[Finished] = []
        """Measurements that came back, for the next transaction."""
        self._ended: Counter[str] = Counter()
        self._report: dict[str, Any] = {}
        self._left_out: Sequence[LeftOut] = ()
        self._notes: deque[tuple[str, str]] = deque()
        self._next_tick = 0.0

    def stop(self) -> None:
        """Asks a running campaign to stop; what is being measured is measured again later."""
        self._teller.stop.set()

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
            with self._thinker:
                self._take_up()
                self._planner.make_pool(self.crew, self._teller)
                kernels = self._planner.make_kernels(self._kernels, self.crew, self._teller)
                self._thinker.prepare(self.store, self._planner.pool, kernels)
                self._drive()
                self._write_notes()
                errors = self._report.get("devices", {})
                snapshot_id = publish(
                    self.store, self._thinker, self._teller, self.id, self.snapshots, errors
                )
        except NotOwnerError:
            raise  # all that follows is the other's
        except CampaignStopped:
            self._keep(self._wait(timeout_s=0))  # what has come back is not thrown away
            self._write([])
            self._end(CampaignState.PAUSED, "stopped on request")
            raise
        except CanaryStopError as stop:
            self._end(CampaignState.PAUSED, str(stop))
            raise
        except Exception as error:
            # If it is the store that fails, its first error is the one to tell.
            with contextlib.suppress(StoreError):
                self._write([])  # what has come back is not thrown away here either
            with contextlib.suppress(StoreError):
                self._end(CampaignState.FAILED, str(error))
            raise
        self._tell(str(CampaignState.FINISHED), eta_s=None, current=())
        return snapshot_id

    def _take_up(self) -> None:
        """Takes back what a process that was killed had begun; nothing, in a new campaign."""
        interrupted = self.store.assignments.release_leases(self.id)
        self.store.assignments.reopen_failed(self.id)
        if self.store.rounds.all(self.id):
            repeated = f"; {interrupted} measurements were interrupted, and are repeated"
            self.note("resumed", f"it goes on{repeated if interrupted else ''}")

    # The loop.

    def _drive(self) -> None:
        self._ending.recall()
        known = course_so_far(self.store, self.id, self.spec, LEASE_S)
        self._ended, self._report = known.ended, dict(known.report)
        self._machine = known.machine(self._canaries.is_due)
        self._handle(Tick())
        while not self._machine.is_over:
            self._obey()
            self._follow(self._roster.follow())
            if stalled := self._machine.stalled():
                self._roster.require(stalled)
                self._tell(f"waiting for a node with {', '.join(sorted(stalled))}", total=0)
            patience_s = THINKING_S if self._thinker.is_busy else TICK_S
            self._take(self._wait(timeout_s=patience_s))
            self._thinker.follow(patience_s=0.0 if self.crew.running() else TICK_S)

    def _obey(self) -> None:
        """Stops if it is to; once a second: looks who is alive."""
        self._teller.check_stop()
        if time.monotonic() < self._next_tick:
            return
        self._next_tick = time.monotonic() + TICK_S
        self._write_notes()
        self.crew.want(self._machine.to_come)
        self._follow(self._roster.share())
        self._handle(Seen(self.crew.answering()))
        self._handle(Tick())
        if told := self._ending.look_at_clock():
            self._tell(news=told)
            self._handle(Enough())
        self._show_counts()

    def _is_ordered_to_stop(self) -> bool:
        return self.store.campaigns.state(self.id) is not CampaignState.RUNNING

    def _handle(self, *events: Event) -> None:
        """Tells the machine, and does what it commands; what follows from that comes after it.

        Measurements that came back and those that begin are written together, in one transaction,
        unless another command comes between.
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
                    self._write(to_start)
                    to_start = []
                    self._do(command)
            self._events.popleft()
        self._write(to_start)

    def _do(self, command: Command) -> None:
        match command:
            case MeasureCanary(worker):
                self.crew.start(worker, self._canaries.check(worker), self.protocol)
            case Dismiss(worker, why):
                self._roster.forget(worker)
                self.crew.dismiss(worker)
                self._tell(news=f"{worker.device}  {worker.name} was dismissed: {why}")
            case GiveUp(assignment_id, why):
                self.store.assignments.take_back(
                    assignment_id, why, max_attempts=self.spec.max_attempts
                )
            case Quarantine():
                self._quarantine(command)
            case Plan(device, number, count):
                self._plan(device, number, count)
            case Learn(initial_ended):
                self._learn(initial_ended)
            case Close(number):
                self.store.rounds.close(self.id, number, self._report if number else {})
                if number:
                    self._tell(news=round_line(number, self._report))
            case Spent(rule, told):
                self._tell(news=self._ending.hold(rule, told))

    def _follow(self, events: Iterator[Event]) -> None:
        for event in events:
            self._handle(event)

    def _taken(self, device: str, count: int) -> None:
        self._ended[device] += count
        self._tell(news=f"{device}: {count} labels taken from earlier campaigns")

    # Measurements.

    def _write(self, commands: Sequence[Measure]) -> None:
        """Records what has come back, and leases and starts what is to be measured."""
        results = [
            (one.measurement, one.task.id)
            for one in self._unwritten
            if one.measurement is not None and isinstance(one.task, Assignment)
        ]
        wanted = [(c.assignment_id, c.worker.name) for c in commands]
        if results or wanted:
            leases = self.store.measurements.record_and_lease(
                results, wanted, max_attempts=self.spec.max_attempts
            )
            self._unwritten.clear()
            for command, lease in zip(commands, leases, strict=True):
                self._leases[lease.id] = lease
                self._canaries.count_measurement(command.worker)
                self.crew.start(command.worker, lease, self.protocol)
        for measurement, _ in results:
            self._pace.measured(measurement.device, measurement.duration_s)
            self._tell(news=measurement_line(measurement))

    def _wait(self, timeout_s: float) -> Sequence[Finished]:
        """What has come back; what cannot be recorded, as an error with the reason."""
        return [
            one
            if one.measurement is None
            else replace(one, measurement=recordable(
                one.measurement, one.task.configuration, one.worker.device, self.protocol,
                one.task.attempt_key, one.worker.fingerprint,
            ))
            for one in self.crew.wait(timeout_s)
        ]  # fmt: skip

    def _take(self, finished: Sequence[Finished]) -> None:
        """Keeps what has come back, and goes on."""
        if finished:
            self._keep(finished)
            self._handle(*itertools.chain.from_iterable(map(self._what_happened, finished)))
            self._show_counts()

    def _what_happened(self, finished: Finished) -> Iterator[Event]:
        worker, task, measurement = finished.worker, finished.task, finished.measurement
        if worker in self._canaries.stopped:
            yield Stopped(worker)
        if measurement is None:
            self._roster.forget(worker)
            yield Lost(worker, finished.loss or "the worker was lost")
        elif isinstance(task, CanaryCheck):
            yield CanaryMeasured(worker)
        else:
            if is_final(measurement.outcome) and task.id in self._leases:
                del self._leases[task.id]
                self._ended[task.device] += 1
            yield Measured(
                worker, task.id, measurement.outcome, measurement.duration_s,
                makes_label(measurement),
            )  # fmt: skip

    def _keep(self, finished: Sequence[Finished]) -> None:
        """Takes what has come back; measurements are written with what is measured next."""
        self._unwritten += finished
        for one in finished:
            if isinstance(one.task, CanaryCheck):
                self._tell(news=self._canaries.take(one))
            elif one.measurement is None:
                loss = one.loss or "the worker was lost"
                self._tell(news=f"{one.task.device}  {one.task.configuration}  {loss}")

    def _quarantine(self, command: Quarantine) -> None:
        what = self._leases.pop(command.assignment_id).configuration
        hosts = len(set(command.hosts))
        told = (
            f"{command.device}  {what} is given up: {command.failures} attempts failed, on "
            f"{hosts} {'host' if hosts == 1 else 'hosts'}"
        )
        event = {"message": told, "id": command.assignment_id}
        self.store.campaigns.log_event(self.id, "quarantined", event)
        self._ended[command.device] += 1
        self._tell(news=told)

    # What the learner is asked and answered.

    def _learn(self, initial_ended: bool) -> None:
        known = training_labels(self.store, self.id)
        for one in known.left_out:
            if one not in self._left_out:
                self.note("stack", str(one))
        self._left_out = known.left_out
        self._thinker.learn(known.labels, initial_ended, is_alone=not self._machine.measuring)

    def _plan(self, device: str, number: int, count: int) -> None:
        if number == 0:
            self._planned(device, number, self._planner.draw(device, count))
        else:
            self._thinker.choose(self._planner.request(device, number, count), number)

    def _chosen(self, device: str, number: int, choices: Sequence[Choice]) -> None:
        self._planned(device, number, self._planner.chosen(device, choices))

    def _planned(self, device: str, number: int, assignments: Sequence[PlannedAssignment]) -> None:
        if self._ending.has_come:  # nobody will measure it
            self._handle(Planned(device, number, []))
            return
        self.store.rounds.plan(self.id, number, PURPOSES[min(number, 2)], assignments)
        settled = self._roster.taken_over(device)
        left = self.store.assignments.of_campaign(
            self.id, device=device, state="open", round_number=number
        )
        self._handle(Settled(settled), Planned(device, number, [waiting(a) for a in left]))

    def _learned(self, report: dict[str, Any], initial_ended: bool) -> None:
        source = self.spec.devices.source
        has_heads = source in report["devices"]
        if initial_ended and not has_heads and not self._ending.has_come:
            outcomes = self.store.campaigns.outcome_counts(self.id).get(source, {})
            told = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
            raise CampaignError(
                f"the initial draw gave too few labels on {source} to learn from "
                f"(attempts: {told}); when the machine is quiet, go on with: "
                f"trappm campaign resume {self.id}"
            )
        left_out = [asdict(one) for one in self._left_out]
        self._report, enough = self._ending.ask({**report, "left_out": left_out})
        self._tell(news=enough)
        self._handle(Learned(has_heads, self._ending.has_come))

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
        workers = self._roster.by_device
        at_work = self.crew.running()
        shown = [f"{w.device}: {t.configuration}" for w, t in at_work[:SHOWN]]
        more = [f"and {len(at_work) - SHOWN} more"] if len(at_work) > SHOWN else []
        self._tell(
            f"measuring, round {number} of {1 + self.spec.rounds.count}",
            done=self._ended.total(),
            total=sum(self.spec.budget(d) for d in self.spec.devices.keys),
            eta_s=self._pace.eta_s(self._ended, number, workers),
            current=(*shown, *more),
        )
