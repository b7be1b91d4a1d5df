"""The campaign: drives the scheduler with real workers, a learner and the label store.

    pool -> graphs -> encoder -> round 0: evaluation set     (uniform, architectures held out)
                              -> round 1: initial            (acquired, without labels)
                              -> rounds 2..: acquired        (until the last, or a stop rule)
                                 heads are trained on 1.. and judged on round 0
                              -> snapshot

Round 0 needs no encoder: where nodes that do not measure trace steps, it is measured while they do,
and while the encoder is trained.

`scheduler.state_machine` decides what happens next; the campaign carries its commands out and
reports the results as events. Everything that must survive is in the label store, so that a
campaign killed at any moment continues from the last recorded measurement. `actors.profiler_pool`
measures and `actors.learner` learns; the campaign itself imports no Ray.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.cluster.campaign import history
from trappm.cluster.campaign.host_checks import HostChecks
from trappm.cluster.campaign.planner import PURPOSES, Planner, first_steps, pool_of
from trappm.cluster.campaign.progress import (
    LINES_KEPT,
    Progress,
    measurement_line,
    quiet_line,
    round_line,
    seconds_to_go,
    task_line,
)
from trappm.cluster.profiles import Traced
from trappm.cluster.scheduler import messages
from trappm.cluster.scheduler.messages import Choice, Finished
from trappm.cluster.scheduler.stop_rules import Stop, StopRules, deadline_passed, target_reached
from trappm.cluster.scheduler.training_report import LeftOut, Spent, TrainingReport
from trappm.cluster.spec import CampaignSpec, runs_nothing
from trappm.learner.physics.device_specs import known_spec
from trappm.profiler.errors import CampaignError, StoreError, TrappmError
from trappm.profiler.host.environment import stack_fingerprint
from trappm.profiler.records import Measurement, Outcome
from trappm.profiler.steps.sampling import is_contended
from trappm.profiler.trace_cache import TraceKey
from trappm.store import (
    Assignment,
    AssignmentState,
    CampaignState,
    NotOwnerError,
    RefusedRowError,
    Store,
)
from trappm.store.measurements import Wanted, makes_label, recordable, unrecordable
from trappm.store.records import Role, is_final

if TYPE_CHECKING:
    from trappm.cluster.actors.learner import LearnerHandle
    from trappm.cluster.actors.profiler_pool import ProfilerPool

TICK_S = 1.0
"""Period of notes, demand for workers, and checks of the deadline."""

LOOK_S = 1.0
"""Period of the checks for an order to stop."""

LEARNER_POLL_S = 0.1
"""Longest wait for measurements while the learner works."""

SHOWN = 4
"""Number of running measurements that the progress names."""

_LEAST_SHARE = 0.005
"""Smaller shares of the cores are not counted: a message would report them as 0 %."""


class CampaignStopped(Exception):  # noqa: N818  (an order that was obeyed, not an error)
    """The campaign was asked to stop and has put everything down where resume finds it."""


class CanaryStopError(CampaignError):
    """Canary or failures stopped the last worker of a device that is still needed."""


@dataclass(frozen=True)
class _LearnerJob:
    """Work of the learner, done while measurements run."""

    then: Callable[[Any], None]
    """Called with the result."""
    stage: str | None = None
    """Stage under which its progress is shown, if nothing else runs."""


@dataclass(kw_only=True, eq=False)
class Campaign:
    """Runs one campaign, from its first measurement to its snapshot."""

    store: Store
    """The label store, opened as the campaign's owner."""
    id: str
    spec: CampaignSpec
    workers: ProfilerPool
    learner: LearnerHandle
    snapshots: Path
    """Folder of the snapshots."""
    watch: Callable[[Progress], None] = lambda progress: None
    """Called with the progress whenever it changes."""

    def __post_init__(self) -> None:
        self.protocol = self.spec.measuring_protocol
        self.progress = Progress()
        self.ended: Counter[str] = Counter()
        """Number of assignments that need no measurement, by device."""
        self._rules = self.spec.stop or StopRules()
        self._rule_holds = False
        self._job: _LearnerJob | None = None
        self._planner = Planner(self.store, self.id, self.spec)
        self._checks = HostChecks(self.store, self.id, self.spec.canary)
        self._report = TrainingReport()
        self._left_out: Sequence[LeftOut] = ()
        self._adopted: set[tuple[str, str]] = set()
        """Devices and software stacks whose earlier labels have been adopted."""
        self._unwritten: list[Finished] = []
        self._events: deque[messages.Event] = deque()
        self._tracing: Future[None] | None = None
        self._is_prepared = False
        """True if the learner has the pool and its encoder."""
        self._deferred: Callable[[], None] | None = None
        """Command for the learner that came before it was prepared."""
        self._notes: deque[tuple[str, str]] = deque()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._next_tick = 0.0
        self._next_look = 0.0

    def stop(self) -> None:
        """Ask a running campaign to stop; what is being measured is measured again later."""
        self._stop.set()

    def note(self, kind: str, message: str) -> None:
        """Show a message, and record it within a second; from any thread."""
        self._tell(news=message)
        self._notes.append((kind, message))

    def run(self) -> str | None:
        """Run to the end.

        Returns:
            The snapshot's id; None if none is published, as its labels are not of hardware.

        Raises:
            CampaignStopped: It was asked to stop, by `stop` or by its state in the store, which
                is then paused or cancelled.
            CanaryStopError: No worker is left that may measure; the campaign is paused.
            NotOwnerError: Another process has taken the campaign over; nothing more is written.
            TrappmError: The campaign cannot continue; its state is failed, and it can be resumed.
        """
        if rehearsed := ", ".join(filter(runs_nothing, self.spec.devices.keys)):
            self._tell(
                news=f"a rehearsal: {rehearsed} runs nothing, so no snapshot will be published"
            )
        for remark in self.spec.remarks:
            self._tell(news=remark)
        try:
            self._take_back_leases()
            self._make_pool()
            self._prepare_learner()
            self._drive()
            self._write_notes()
            snapshot_id = self._publish()
        except NotOwnerError:
            raise  # everything that follows belongs to the other process
        except CampaignStopped:
            self._wait(timeout_s=0)  # keep what has come back
            self._end(CampaignState.PAUSED, "stopped on request")
            raise
        except CanaryStopError as stop:
            self._end(CampaignState.PAUSED, str(stop))
            raise
        except Exception as error:
            # If the store fails, its first error is the one to report.
            with contextlib.suppress(StoreError):
                self._write_results()
            with contextlib.suppress(StoreError):
                self._end(CampaignState.FAILED, str(error))
            raise
        self._tell(str(CampaignState.FINISHED), eta_s=None, current=())
        return snapshot_id

    # Before the first measurement.

    def _take_back_leases(self) -> None:
        """Reopen assignments that a killed process was measuring."""
        leased = self.store.assignments.of_campaign(self.id, state=AssignmentState.LEASED)
        self.store.assignments.release_leases(self.id)
        self.store.assignments.reopen_failed(self.id)
        if self.store.rounds.all(self.id):
            repeated = f"; {len(leased)} measurements were interrupted, and are repeated"
            self.note("resumed", f"it continues{repeated if leased else ''}")

    def _make_pool(self) -> None:
        """Store the pool, after one trace of each model, which gives its graph.

        Raises:
            InputError: The pool is too small for the budget.
        """
        if self._planner.pool:
            return
        configurations = pool_of(self.spec, self.store)
        self._tell("pool", news=f"pool: {len(configurations)} configurations")
        self._trace("graphs", first_steps(configurations).values())
        self._planner.store_pool(configurations)

    def _prepare_learner(self) -> None:
        """Trace the other steps, give the learner the pool, and have it train its encoder.

        Only begins with that if measurements are not disturbed by it.
        """
        for device in self.spec.devices.keys:
            if known_spec(self._planner.card(device)) is None:
                self._tell(
                    news=f"{device} is not in profiler/devices/catalogue.csv: how long its steps "
                    "take is learned from labels alone, without its data sheet"
                )
        if self.workers.traces_elsewhere:
            self._tracing = ThreadPoolExecutor(1).submit(self._trace_beside)
            return
        self._trace("steps", self._planner.steps())
        self._wait_for("encoder", "set_pool", *self._planner.learner_pool())
        self._prepared()

    def _trace(self, stage: str, keys: Collection[TraceKey]) -> None:
        """Trace the steps that are missing, and show their number and the time to go."""
        missing = self.store.traces.missing(keys)
        if not missing:
            return
        self._tell(stage, done=len(keys) - len(missing), total=len(keys))
        begin = time.monotonic()
        for number, traced in enumerate(self.workers.trace(missing), 1):
            self._keep(traced)
            self._check_stop()
            to_go_s = (time.monotonic() - begin) / number * (len(missing) - number)
            eta_s = to_go_s if number < len(missing) else None
            self._tell(done=self.progress.done + 1, eta_s=eta_s)

    def _trace_beside(self) -> None:
        """Trace the steps that are missing while others are measured."""
        for traced in self.workers.trace(self.store.traces.missing(self._planner.steps())):
            if self._stop.is_set():
                break
            self._keep(traced)

    def _keep(self, traced: Traced) -> None:
        traced.keep(self.store.traces)
        if traced.remark:
            self._tell(news=traced.remark)

    def _poll_tracing(self) -> None:
        """Give the learner the pool once its steps are traced."""
        if self._tracing is not None and self._tracing.done():
            self._tracing.result()
            self.learner.begin("set_pool", *self._planner.learner_pool())
            self._job = _LearnerJob(lambda _: self._prepared())
            self._tracing = None

    def _prepared(self) -> None:
        """Go on with the learner, whose encoder is ready."""
        self._tell(news=f"encoder: ready, {len(self._planner.pool)} configurations embedded")
        self._is_prepared = True
        if self._deferred is not None:
            self._deferred()

    # The loop.

    def _drive(self) -> None:
        """Measure and learn until the scheduler has nothing left to do."""
        self._rule_holds = history.rule_held(self.store, self.id) is not None
        self.ended = history.ended_by_device(self.store, self.id)
        reports = history.training_reports(self.store, self.id)
        self._report = reports[-1] if reports else TrainingReport()
        self._machine = history.machine_so_far(self.store, self.id, self.spec, self._checks)
        self._handle(messages.Tick())
        while not self._machine.is_over:
            self._check_stop()
            self._tick()
            for event in self._membership_events():
                self._handle(event)
            if stalled := self._machine.stalled():
                self._require_workers(stalled)
                self._tell(f"waiting for a node with {', '.join(sorted(stalled))}", total=0)
            self._take(self._wait(LEARNER_POLL_S if self._job else TICK_S))
            self._poll_tracing()
            self._poll_learner(0.0 if self.workers.running() else TICK_S)

    def _tick(self) -> None:
        """Do what is due once per second."""
        if time.monotonic() < self._next_tick:
            return
        self._next_tick = time.monotonic() + TICK_S
        self._write_notes()
        self.workers.want(self._machine.to_come, self._machine.spend.mean_s)
        self._handle(messages.Tick())
        self._stop_by(deadline_passed(self._rules, datetime.now(UTC)))
        self._show_counts()

    def _check_stop(self) -> None:
        """Raise CampaignStopped if the campaign was asked to stop, by this process or another."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            if self.store.campaigns.state(self.id) is not CampaignState.RUNNING:
                self._stop.set()
        if self._stop.is_set():
            raise CampaignStopped

    def _handle(self, *events: messages.Event) -> None:
        """Hand events to the scheduler, and carry out its commands; events of these come next.

        Measurements that begin are leased in one transaction, unless another command comes between.
        """
        is_inside_of_a_command = bool(self._events)
        self._events.extend(events)
        if is_inside_of_a_command:
            return
        to_start: list[messages.Measure] = []
        while self._events:
            for command in self._machine.handle(self._events[0], time.monotonic()):
                if isinstance(command, messages.Measure):
                    to_start.append(command)
                else:
                    self._start(to_start)
                    to_start = []
                    self._do(command)
            self._events.popleft()
        self._start(to_start)

    def _do(self, command: messages.Command) -> None:
        match command:
            case messages.CheckDevice(worker):
                self.workers.start(worker, self._checks.begin(worker), self.protocol)
            case messages.GiveUp(assignment_id, why):
                self.store.assignments.take_back(
                    assignment_id, why, max_attempts=self.spec.max_attempts
                )
            case messages.Quarantine():
                self._quarantine(command)
            case messages.AwaitQuiet():
                are_several = self._worker_counts[command.worker.device] > 1
                whose = f"{command.worker.name}'s" if are_several else "this machine's"
                self.note("busy", quiet_line(command, whose))
            case messages.Plan(device, number, count):
                self._plan(device, number, count)
            case messages.Learn(initial_ended):
                self._learn(initial_ended)
            case messages.Close(number):
                self.store.rounds.close(self.id, number, self._report.to_json() if number else {})
                if number:
                    self._tell(news=round_line(number, self._report))
            case messages.BudgetSpent(stop):
                self._stop_by(stop)

    # The workers: they come and go.

    @property
    def _worker_counts(self) -> Counter[str]:
        return Counter(worker.device for worker in self._machine.workers.joined)

    def _membership_events(self) -> Iterator[messages.Event]:
        """Yield what workers that have come or gone mean; each event may change the next."""
        there, before = self.workers.joined(), self._machine.workers.joined
        now, earlier = set(there), set(before)
        for worker in before:
            if worker not in now:
                self._checks.forget(worker)
                yield messages.Lost(worker, "it left the cluster")
        for worker in there:
            if worker not in earlier:
                self._checks.stopped.pop(worker, None)
                stack = worker.device, worker.fingerprint
                if stack not in self._adopted and not self._rule_holds:
                    yield messages.Settled(self._adopt_labels(*stack))
                    self._adopted.add(stack)
                yield messages.Joined(worker)

    def _adopt_labels(self, device: str, fingerprint: str) -> list[str]:
        """Return the assignments that now have their labels from earlier campaigns."""
        assignments = self.store.assignments

        def open_ones() -> set[str]:
            open_here = assignments.of_campaign(self.id, device=device, state=AssignmentState.OPEN)
            return {assignment.id for assignment in open_here}

        before = open_ones()
        # How memory is counted belongs to a stack, but shows only once something is measured.
        stacks = {fingerprint}
        for known, environment in self.store.measurements.device_environments(device).items():
            if stack_fingerprint({**environment, "memory_method": None}) == fingerprint:
                stacks.add(known)
        for stack in sorted(stacks):
            assignments.adopt_labels(self.id, device, stack, self.protocol.name)
        adopted = sorted(before - open_ones())
        if adopted:
            self.ended[device] += len(adopted)
            self._tell(news=f"{device}: {len(adopted)} labels taken from earlier campaigns")
        return adopted

    def _require_workers(self, missing: set[str]) -> None:
        """Check that workers may still come for devices that have none while nothing else runs.

        Raises:
            CanaryStopError: Its checks stopped the last one.
            CampaignError: None will come.
        """
        lost = sorted(missing - set(self.workers.awaited()))
        stopped_here = [
            f"{w.device}: {why}" for w, why in self._checks.stopped.items() if w.device in lost
        ]
        if stopped_here:
            raise CanaryStopError(
                f"no worker is left for {'; '.join(stopped_here)}; see what became of its host "
                "(other programs, clocks, cooling, driver); continue with: "
                f"trappm campaign resume {self.id}"
            )
        if lost:
            raise CampaignError(
                f"no worker is left for device {', '.join(lost)}; start a node with it "
                f"and continue with: trappm campaign resume {self.id}"
            )

    # Measurements: started on workers, recorded as they come back.

    def _start(self, commands: Sequence[messages.Measure]) -> None:
        """Lease assignments in one transaction, and start them on their workers."""
        if not commands:
            return
        wanted = [(command.assignment_id, command.worker.name) for command in commands]
        leases = self.store.assignments.lease(wanted)
        for command, lease in zip(commands, leases, strict=True):
            self._checks.count_measurement(command.worker)
            self.workers.start(command.worker, lease, self.protocol)

    def _wait(self, timeout_s: float) -> Sequence[Finished]:
        """Collect finished measurements and record them.

        A measurement that cannot be recorded becomes an error with the reason.
        """
        for entry in self.workers.wait(timeout_s):
            measurement = entry.measurement
            if measurement is not None:
                measurement = recordable(measurement, self._wanted(entry))
            self._unwritten.append(replace(entry, measurement=measurement))
        return self._write_results()

    def _write_results(self) -> Sequence[Finished]:
        """Record what has come back, and return it as it was recorded."""
        finished = self._recorded(self._unwritten)
        self._unwritten = []
        for entry in finished:
            if not isinstance(entry.task, Assignment):
                self._tell(news=self._checks.take(entry))
            elif entry.measurement is None:
                self._tell(news=f"{entry.task.device}  {entry.task.configuration}  {entry.loss}")
            else:
                self._tell(news=measurement_line(entry.measurement))
        return finished

    def _recorded(self, finished: Sequence[Finished]) -> list[Finished]:
        """Record measurements together, or one by one if the store refuses one of them."""
        try:
            self._record(finished)
            return [*finished]
        except RefusedRowError as error:
            reason = str(error)
        if len(finished) > 1:
            return [*itertools.chain.from_iterable(self._recorded([x]) for x in finished)]
        entry = finished[0]
        entry = replace(entry, measurement=unrecordable(reason, self._wanted(entry)))
        self._record([entry])
        return [entry]

    def _record(self, finished: Sequence[Finished]) -> None:
        results = [
            (entry.measurement, entry.task.id)
            for entry in finished
            if entry.measurement is not None and isinstance(entry.task, Assignment)
        ]
        if results:
            self.store.measurements.record(results, max_attempts=self.spec.max_attempts)

    def _wanted(self, entry: Finished) -> Wanted:
        """Return the measurement that a worker had to take."""
        task, worker = entry.task, entry.worker
        key = task.attempt_key
        return Wanted(task.configuration, worker.device, self.protocol, key, worker.fingerprint)

    def _take(self, finished: Sequence[Finished]) -> None:
        """Hand recorded results to the scheduler."""
        if not finished:
            return
        for entry in finished:
            if entry.is_lost:
                self._checks.forget(entry.worker)
        self._handle(*itertools.chain.from_iterable(map(self._result_events, finished)))
        self._show_counts()

    def _result_events(self, finished: Finished) -> Iterator[messages.Event]:
        """Yield what a result means for the scheduler; a worker that it stops is set aside."""
        worker, task, measurement = finished.worker, finished.task, finished.measurement
        if measurement is not None and isinstance(task, Assignment):
            self._checks.take_outcome(worker, measurement)
        if worker in self._checks.stopped:
            self.workers.set_aside(worker)
        if measurement is None:
            yield messages.Lost(worker, str(finished.loss))
        elif not isinstance(task, Assignment):
            yield messages.DeviceChecked(worker)
        else:
            self.ended[task.device] += is_final(measurement.outcome)
            yield messages.Measured(
                worker, task.id, measurement.outcome, measurement.duration_s,
                makes_label(measurement), others_share(measurement),
            )  # fmt: skip

    def _quarantine(self, command: messages.Quarantine) -> None:
        """Record that an assignment gets no label unless it is retried."""
        device, configuration = command.assignment.device, command.assignment.configuration
        hosts = len(set(command.hosts))
        what = {None: "its worker was lost", Outcome.UNSTABLE: "steps not steady"}
        reason = what.get(command.outcome, command.outcome)
        message = (
            f"{device}  {configuration}: no label after {command.failures} attempts on "
            f"{hosts} {'host' if hosts == 1 else 'hosts'} ({reason}); "
            f"try it again later with: trappm campaign resume {self.id} --retry-failed"
        )
        event = {"message": message, "id": command.assignment.id}
        self.store.campaigns.log_event(self.id, "quarantined", event)
        self.ended[device] += 1
        self._tell(news=message)

    # The learner: what to measure next, and what was learned.

    def _plan(self, device: str, number: int, count: int) -> None:
        """Draw or choose a device's part of a round."""
        if number == 0:
            self._planned(device, number, self._planner.draw(device, count))
            return
        if not self._is_prepared:
            self._deferred = partial(self._plan, device, number, count)
            return
        request = self._planner.request(device, number, count)

        def chosen(choices: Sequence[Choice]) -> None:
            self._planned(device, number, self._planner.chosen(device, choices, count))

        self.learner.begin("choose", request)
        self._job = _LearnerJob(chosen)

    def _planned(self, device: str, number: int, assignments: Sequence[Assignment]) -> None:
        """Store a device's part of a round, and adopt labels that exist for it."""
        if self._rule_holds:  # nothing of it will be measured
            self._handle(messages.Planned(device, number, []))
            return
        self.store.rounds.plan(self.id, number, PURPOSES[min(number, 2)], assignments)
        stacks = [fingerprint for known, fingerprint in self._adopted if known == device]
        settled = [x for stack in stacks for x in self._adopt_labels(device, stack)]
        to_measure = self.store.assignments.of_campaign(
            self.id, device=device, state=AssignmentState.OPEN, round_number=number
        )
        self._handle(messages.Settled(settled), messages.Planned(device, number, to_measure))

    def _learn(self, initial_ended: bool) -> None:
        """Begin to train on all labels."""
        if not self._is_prepared:
            self._deferred = partial(self._learn, initial_ended)
            return
        known = history.training_labels(self.store, self.id)
        for left_out in known.left_out:
            if left_out not in self._left_out:
                self.note("stack", str(left_out))
        self._left_out = known.left_out
        stage = None if self._machine.workers.at_work else "learning"
        self._tell(stage)
        self.learner.begin("fit", known.labels)
        self._job = _LearnerJob(partial(self._learned, initial_ended=initial_ended), stage)

    def _learned(self, report: TrainingReport, initial_ended: bool) -> None:
        """Take a training's report, and check the target errors.

        Raises:
            CampaignError: The initial round has ended, and its labels are too few.
        """
        source = self.spec.devices.source
        has_heads = source in report.devices
        if initial_ended and not has_heads and not self._rule_holds:
            outcomes = self.store.campaigns.outcome_counts(self.id).get(source, {})
            attempts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
            raise CampaignError(
                f"the initial draw gave too few labels on {source} to learn from "
                f"(attempts: {attempts}); when the machine is quiet: "
                f"trappm campaign resume {self.id} --retry-failed --outcome "
                f"{max(outcomes, key=outcomes.__getitem__, default='error')}"
            )
        labels = self.store.campaigns.label_counts(self.id).get(self.id, 0)
        seconds = sum(self.store.campaigns.measuring_seconds_by_device(self.id).values())
        spent = Spent(labels, seconds, datetime.now(UTC))
        self._report = replace(report, left_out=self._left_out, spent=spent)
        self._stop_by(target_reached(self._rules, report.evaluation, self.spec.devices.keys))
        self._handle(messages.Learned(has_heads))

    def _stop_by(self, stop: Stop | None) -> None:
        """Begin nothing more because of a stop rule, also after a restart; None: continue."""
        if stop is None or self._rule_holds:
            return
        line = f"enough ({stop.rule}): {stop.reason}"
        event = {"message": line, "rule": stop.rule, "told": stop.reason}
        self.store.campaigns.log_event(self.id, history.ENOUGH, event)
        self._rule_holds = True
        self._tell(news=line)
        self._handle(messages.Enough())

    def _poll_learner(self, timeout_s: float) -> None:
        """Go on after the learner's job, if it ends within the timeout."""
        job = self._job
        if job is not None and self._has_ended(job.stage, timeout_s):
            self._job = None
            job.then(self.learner.result)

    def _wait_for(self, stage: str, method: str, *arguments: Any) -> Any:
        """Return the result of a call of the learner, made while nothing is measured."""
        self._tell(stage)
        self.learner.begin(method, *arguments)
        while not self._has_ended(stage, TICK_S):
            self._check_stop()
        return self.learner.result

    def _has_ended(self, stage: str | None, timeout_s: float) -> bool:
        """Wait for the call of the learner, and show its progress under a stage."""
        has_ended = self.learner.wait(timeout_s)
        if stage is not None and not has_ended:
            done, total = self.learner.progress()
            self._tell(stage, done=done, total=total)
        return has_ended

    # The end.

    def _publish(self) -> str | None:
        """Publish a snapshot and finish; make it the latest unless it is worse.

        An order to stop may come until the last moment. So the files are written first, without
        effect; then the store ends the campaign and registers them, unless it was stopped; then
        the alias moves.

        Raises:
            CampaignStopped: It was paused or cancelled before; no alias was moved.
        """
        labels = history.training_labels(self.store, self.id).labels
        errors = self._report.devices
        few = "there are too few labels to learn from"
        unfit = history.unfit_to_publish(labels) if errors else few
        if unfit:
            self._tell(news=f"no snapshot is published: {unfit}")
            self._finish(f"no snapshot: {unfit}", None)
            return None
        fields = {
            "campaign": self.id,
            "errors": errors,
            "split": "whole architectures held out, uniform draw",
            "evaluation_labels": dict(Counter(x.device for x in labels if x.role == Role.EVALUATE)),
        }
        self._tell(eta_s=None)
        snapshot: str
        pairs = history.compiled_pairs(self.store, self.id)
        snapshot, notes = self._wait_for("publishing", "publish", self.snapshots, fields, pairs)
        self._finish(f"snapshot {snapshot}", snapshot)
        for note in notes:
            self._tell(news=note)
            self.store.campaigns.log_event(self.id, "published", {"message": note})
        try:
            self.learner.begin("promote", self.snapshots, snapshot)
            while not self.learner.wait(TICK_S):  # no order stops a finished campaign
                pass
            remark = self.learner.result
        except TrappmError as error:
            remark = (
                f"snapshot {snapshot} is published, but not the latest ({error}); "
                f"name it with: trappm snapshot push {snapshot} --alias latest"
            )
            self.store.campaigns.log_event(self.id, "published", {"message": remark})
        self._tell(news=remark)
        return snapshot

    def _finish(self, message: str, snapshot: str | None) -> None:
        if not self.store.owners.finish_campaign(self.id, message, snapshot):
            raise CampaignStopped

    def _end(self, state: CampaignState, message: str) -> None:
        """End in this state, unless an order has set another."""
        self._write_notes()
        now = self.store.owners.end_campaign(self.id, state, message)
        self._tell(str(now), eta_s=None, current=())

    # Progress.

    def _tell(self, stage: str | None = None, *, news: str | None = None, **values: Any) -> None:
        """Update the stage and its counts, and add a line of news."""
        with self._lock:
            before = self.progress
            if news:
                values["lines"] = (*before.lines, news)[-LINES_KEPT:]
                values["line_count"] = before.line_count + 1
            if stage is not None and stage != before.stage:
                values = {"done": 0, "total": 0, "current": ()} | values
            self.progress = replace(before, stage=stage or before.stage, **values)
            self.watch(self.progress)

    def _write_notes(self) -> None:
        while self._notes:
            kind, message = self._notes[0]
            self.store.campaigns.log_event(self.id, kind, {"message": message})
            self._notes.popleft()

    def _show_counts(self) -> None:
        number = self._machine.rounds.current
        at_work = self.workers.running()
        shown = [f"{worker.device}: {task_line(task)}" for worker, task in at_work[:SHOWN]]
        more = [f"and {len(at_work) - SHOWN} more"] if len(at_work) > SHOWN else []
        self._tell(
            f"measuring, round {number} of {1 + self.spec.rounds.count}",
            done=self.ended.total(),
            total=self.spec.total,
            eta_s=seconds_to_go(self.spec, self._machine, self.ended, self._worker_counts),
            current=(*shown, *more),
        )


def others_share(measurement: Measurement) -> float | None:
    """Return the share of the host's cores that other programs used, if they made it unstable.

    None if it was unstable for another reason, or if other programs of this host used no visible
    share, such as under contention by another virtual machine.
    """
    share = measurement.environment.get("others_cpu_share")
    if share is None or share < _LEAST_SHARE or not is_contended(measurement):
        return None
    return float(share)
