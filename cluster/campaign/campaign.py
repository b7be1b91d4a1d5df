"""The campaign: one loop that carries out what SQL says, with real workers and a learner.

    look at the store -> hand assignments to idle workers -> go on with the one job
          ^                                                              |
          +------------ record what has come back, in one transaction <--+

The label store is all there is: the loop reads the campaign's standing, `next_job` says what is to
be done, and every result is recorded before the next look. In memory are only references to what
runs, and what the learner's process knows, which is made again after a restart. So a campaign that
is killed anywhere continues from the store.

`profiler_pool` measures and `learner` learns; the campaign itself imports no Ray.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.cluster.campaign.learner import CampaignLearner
from trappm.cluster.campaign.planner import PURPOSES, Planner, first_steps, pool_of
from trappm.cluster.campaign.process import cluster_of, has_live_owner
from trappm.cluster.campaign.rules import (
    Choose,
    Close,
    Job,
    LearnerState,
    MakePool,
    Need,
    Prepare,
    Publish,
    Stop,
    Train,
    count_waiting,
    due_before,
    may_measure,
    most_workers,
    next_job,
    plan_of,
    seconds_to_go,
    stop_by_target,
    stop_that_holds,
)
from trappm.cluster.campaign.training import (
    LeftOut,
    Spent,
    TrainingReport,
    compiled_pairs,
    round_line,
    training_labels,
    training_reports,
    unfit_to_publish,
)
from trappm.cluster.campaign.workers import Finished, Worker, WorkerChecks
from trappm.cluster.spec import CampaignBudget, CampaignSpec, budget_seconds, runs_nothing
from trappm.profiler.devices.catalogue import known_spec
from trappm.profiler.errors import CampaignError, StoreError, TrappmError
from trappm.profiler.host.environment import stack_fingerprint
from trappm.profiler.records import Measurement, Outcome
from trappm.profiler.traced_step import TraceKey
from trappm.store import (
    Assignment,
    AssignmentState,
    CampaignState,
    NotOwnerError,
    RefusedRowError,
    Store,
)
from trappm.store.campaigns import STOP_EVENT
from trappm.store.measurements import Wanted, ensure_recordable, failed_attempt, makes_label
from trappm.store.records import Activity, Role, Standing, is_final

if TYPE_CHECKING:
    from trappm.cluster.campaign.learner_handle import LearnerHandle
    from trappm.cluster.campaign.profiler_pool import ProfilerPool

LOOK_S = 1.0
"""Longest time between two looks at the store: for orders, the deadline and the progress."""

JOB_POLL_S = 0.1
"""Longest wait for measurements while a job runs."""

RIVALS_S = 3.0
"""Seconds between two looks at the work of other campaigns."""

SHOWN = 4
"""Number of running measurements that the progress names."""


class CampaignStopped(Exception):  # noqa: N818  (an order that was obeyed, not an error)
    """The campaign was asked to stop and has put everything down where resume finds it."""


class CanaryStopError(CampaignError):
    """Canary or failures stopped the last worker of a device that is still needed."""


@dataclass(kw_only=True, eq=False)
class CampaignRunner:
    """Runs one campaign, from its first measurement to its snapshot."""

    store: Store
    """The label store, opened as the campaign's owner."""
    id: str
    spec: CampaignSpec
    profilers: ProfilerPool
    learner: LearnerHandle
    snapshots: Path
    """Folder of this host's snapshots, which is the registry if the campaign file names none."""
    notes: deque[tuple[str, str]] = field(default_factory=deque)
    """Kinds and messages of events that are not recorded yet."""
    metric: Callable[[str, str, float], None] = lambda name, device, value: None
    """Called with the name of a figure, a device and a value (`actor.CampaignMetrics`)."""
    clock: Callable[[], float] = time.monotonic
    """Seconds of a clock that never goes back."""

    def __post_init__(self) -> None:
        self.activity = Activity()
        self.protocol = self.spec.measuring_protocol
        self._plan = plan_of(self.spec, self.profilers.traces_elsewhere)
        self._planner = Planner(self.store, self.id, self.spec)
        self._checks = WorkerChecks(self.store, self.id, self.spec.canary, self.clock)
        self._workers: dict[str, Worker] = {}
        """Workers by name, the longest idle first."""
        self._adopted: set[tuple[str, str]] = set()
        """Devices and software stacks whose earlier labels have been adopted."""
        self._finished: list[Finished] = []
        """Results that are not recorded yet."""
        self._job: Iterator[None] | None = None
        """The one job, which runs at the same time as measurements; it yields while it waits."""
        self._is_tracing = False
        self._learner_state = LearnerState()
        self._learner_error: TrappmError | None = None
        self._report = TrainingReport()
        self._left_out: Sequence[LeftOut] = ()
        self._snapshot: str | None = None
        self._is_over = False
        self._reported_activity = self.activity
        self._rival_needs: defaultdict[str, list[Need]] = defaultdict(list)
        self._next_rivals_at = -math.inf
        self._standing: Standing | None = None
        """The last look at the store; None after a change."""
        self._next_look_at = 0.0

    def note(self, kind: str, message: str) -> None:
        """Record a message as an event, within a second; from any thread."""
        self.notes.append((kind, message))

    def run(self) -> str | None:
        """Run to the end.

        Returns:
            The snapshot's id; None if none is published, as its labels are not of hardware.

        Raises:
            CampaignStopped: It was asked to stop by its state in the store, which is paused or
                cancelled.
            CanaryStopError: No worker is left that may measure; the campaign is paused.
            NotOwnerError: Another process has taken the campaign over; nothing more is written.
            TrappmError: The campaign cannot continue; its state is failed, and it can be resumed.
        """
        try:
            self._begin()
            while not self._is_over:
                self._step()
        except NotOwnerError:
            raise  # everything that follows belongs to the other process
        except CampaignStopped:
            self._end(CampaignState.PAUSED, "stopped on request")
            raise
        except CanaryStopError as stop:
            self._end(CampaignState.PAUSED, str(stop))
            raise
        except Exception as error:
            if isinstance(error, StoreError):
                # Its time is up, and it is not waited for again.
                self.store = self._checks.store = self.store.impatient()
            with contextlib.suppress(StoreError):  # the first error is the one to report
                self._end(CampaignState.FAILED, str(error))
            raise
        finally:
            self._end_job()
        return self._snapshot

    def _begin(self) -> None:
        """Say what is special, and take back what a killed process was measuring."""
        if rehearsed := ", ".join(filter(runs_nothing, self.spec.devices.keys)):
            self._tell(
                news=f"a rehearsal: {rehearsed} runs nothing, so no snapshot will be published"
            )
        for remark in self.spec.remarks:
            self._tell(news=remark)
        reports = training_reports(self.store, self.id)
        self._report = reports[-1] if reports else TrainingReport()
        leased = self.store.assignments.of_campaign(self.id, state=AssignmentState.LEASED)
        self.store.assignments.release_leases(self.id)
        events = self.store.campaigns.events(self.id, kind="abandoned")
        reported = {event.message.get("id") for event in events}
        for assignment, outcome in self.store.assignments.list_failed(self.id):
            if assignment.id not in reported:  # its process ended before it could
                self._log_abandoned(assignment, outcome)
        if self.store.rounds.all(self.id):
            repeated = f"; {len(leased)} measurements were interrupted, and are repeated"
            self.note("resumed", f"it continues{repeated if leased else ''}")

    def _step(self) -> None:
        """Take one turn of the loop: hand out, go on with the job, record what has come back."""
        self._look()
        self._refresh_workers()
        standing = self._look()
        if stop := stop_that_holds(standing, self._plan, datetime.now(UTC)):
            self._stop_by(stop)
            return
        if self._job is None:
            job = next_job(standing, self._plan, self._learner_state, self._count_able())
            self._job = None if job is None else self._start_job(job)
            if job is None:
                self._learner_state = replace(self._learner_state, may_choose=False)
        self._advance_job()
        if self._standing is None:
            return  # the job has changed what is to be done
        begun = self._hand_out(standing)
        if not (begun or self._job or self.profilers.list_running()):
            self._require_work(standing)
        self._finished += self.profilers.wait(JOB_POLL_S if self._job else LOOK_S)
        self._record()

    def _look(self) -> Standing:
        """Return the campaign's standing, read after the last change or within `LOOK_S`.

        With each reading, the pool learns how many workers have work.

        Raises:
            CampaignStopped: It was asked to stop.
        """
        now = self.clock()
        if self._standing is None or now >= self._next_look_at:
            self._report_activity()
            # Nodes that trace may come and go.
            self._plan = replace(self._plan, traces_elsewhere=self.profilers.traces_elsewhere)
            self._standing = self.store.campaigns.standing(self.id)
            self._next_look_at = now + LOOK_S
            if self._standing.state is not CampaignState.RUNNING:
                raise CampaignStopped
            self._want_workers(self._standing)
            self._show_counts(self._standing)
        return self._standing

    # The workers: they come and go.

    def _want_workers(self, standing: Standing) -> None:
        """Tell the pool how many workers have work, and how many there may be.

        Others take the place of workers that are set aside.
        """
        able = self._list_able()
        idle = [worker for worker in self._workers.values() if worker not in able]
        set_aside = Counter(worker.device for worker in idle)
        counts, rivals = (
            count_waiting(standing, self._plan, self._learner_state),
            self._list_rivals(),
        )
        at_work = Counter(worker.device for worker, _ in self.profilers.list_running())
        wanted, at_most = {}, {}
        for device in self._plan.devices:
            most = self._max_workers(self.spec, device)
            mine = Need(counts[device], at_work[device], most)
            at_most[device] = most_workers(mine, rivals[device], self.profilers.room(device))
            wanted[device] = min(mine.workers, at_most[device])
            if wanted[device]:
                wanted[device] += set_aside[device]
            at_most[device] += set_aside[device]
            joined = sum(worker.device == device for worker in self._workers.values())
            self.metric("queue", device, counts[device])
            self.metric("workers", device, joined)
            self.metric("busy_share", device, at_work[device] / joined if joined else 0.0)
        self.profilers.want(wanted, at_most, [worker.name for worker in idle])

    def _list_rivals(self) -> Mapping[str, list[Need]]:
        """Return the work of other campaigns of the cluster, read every few seconds."""
        now = self.clock()
        if now >= self._next_rivals_at:
            self._next_rivals_at = now + RIVALS_S
            self._rival_needs = defaultdict(list)
            mine = cluster_of(self.store.campaigns.get(self.id))
            for campaign, part in self.store.campaigns.work():
                is_rival = campaign.id != self.id and cluster_of(campaign) == mine
                if is_rival and has_live_owner(campaign):
                    most = self._max_workers(CampaignBudget.of(campaign), part.device)
                    need = Need(part.waiting, part.leased, most)
                    self._rival_needs[part.device].append(need)
        return self._rival_needs

    @staticmethod
    def _max_workers(budget: CampaignBudget, device: str) -> int:
        return budget.max_workers.on(device, budget.devices)

    def _refresh_workers(self) -> None:
        """Take in workers that have come, and adopt labels for them; forget those that left."""
        there = {worker.name: worker for worker in self.profilers.refresh_workers()}
        for worker in self._workers.values():
            if there.get(worker.name) != worker:
                self._checks.forget(worker)
        known = {name: w for name, w in self._workers.items() if there.get(name) == w}
        for worker in there.values():
            if worker.name not in known:
                self._adopt_labels(worker.device, worker.fingerprint)
        self._workers = known | there

    def _list_able(self) -> list[Worker]:
        """Return the workers that may measure."""
        return [w for w in self._workers.values() if self._checks.why_stopped(w) is None]

    def _count_able(self) -> Counter[str]:
        """Return the number of workers that may measure, by device."""
        return Counter(worker.device for worker in self._list_able())

    def _hand_out(self, standing: Standing) -> int:
        """Lease assignments to idle workers and start them; return how many began.

        Devices that share a host's cores take turns by round.
        """
        plan = self._plan
        if self._job and (plan.one_at_a_time or (self._is_tracing and not plan.traces_elsewhere)):
            return 0
        counts = count_waiting(standing, plan, self._learner_state)
        first_due = {part.device: part.due for part in reversed(standing.pending) if part.waiting}
        busy = {worker.name: worker.host for worker, _ in self.profilers.list_running()}
        able = self._list_able()
        idle = [w for w in able if counts[w.device] and w.name not in busy]
        if plan.one_at_a_time:
            rank = {device: at for at, device in enumerate(plan.devices)}
            idle.sort(key=lambda worker: (first_due[worker.device], rank[worker.device]))
        begun = leased = 0
        for worker in idle:
            if plan.one_at_a_time and worker.host in busy.values():
                continue
            if self._checks.is_due(worker):
                self._start(worker, self._checks.begin(worker))
            elif may_measure(standing, plan, begun=leased):
                lease = self.store.assignments.lease_next(
                    self.id, worker.device, worker.name, host=worker.host,
                    hosts={w.host for w in able if w.device == worker.device},
                    before=due_before(standing, plan, self._learner_state, worker.device),
                )  # fmt: skip
                if lease is None:
                    continue
                self._checks.count_measurement(worker)
                self._start(worker, lease)
                leased += 1
            else:
                continue
            busy[worker.name] = worker.host
            begun += 1
        if leased:
            self._standing = None
        return begun

    def _start(self, worker: Worker, task: Any) -> None:
        """Start a task; its worker is the last in turn."""
        self._workers[worker.name] = self._workers.pop(worker.name)
        self.profilers.start(worker, task, self.protocol)

    def _adopt_labels(self, device: str, fingerprint: str) -> None:
        """Take the labels of earlier campaigns on a device under one software stack."""
        if (device, fingerprint) in self._adopted:
            return
        # How memory is counted belongs to a stack, but shows only once something is measured.
        stacks = {fingerprint}
        for known, environment in self.store.measurements.device_environments(device).items():
            if stack_fingerprint({**environment, "memory_method": None}) == fingerprint:
                stacks.add(known)
        before = self.store.campaigns.standing(self.id).ended
        for stack in sorted(stacks):
            self.store.assignments.adopt_labels(self.id, device, stack, self.protocol.name)
        self._adopted |= {(device, stack) for stack in stacks}
        adopted = self.store.campaigns.standing(self.id).ended - before
        if adopted:
            self._standing = None
            self._tell(news=f"{device}: {adopted} labels taken from earlier campaigns")

    def _require_work(self, standing: Standing) -> None:
        """Check that the campaign goes on, when nothing runs and nothing could be started.

        Raises:
            TrappmError: The learner has failed, and all that it had planned is measured.
            CanaryStopError: The checks of a device stopped its last worker.
            CampaignError: No worker is left for a device, and none will come.
        """
        able = self._count_able()
        counts = count_waiting(standing, self._plan, self._learner_state)
        without = {device for device in counts if device not in able}
        if not counts and self._learner_error is not None:
            raise self._learner_error
        lost = sorted(without - set(self.profilers.list_awaited()))
        here = [w for w in self._workers.values() if w.device in lost]
        stopped_here = [f"{w.device}: {self._checks.why_stopped(w)}" for w in here]
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
        if without:
            self._tell(f"waiting for a node with {', '.join(sorted(without))}", total=0)

    # Measurements: recorded as they come back.

    def _record(self) -> None:
        """Record what has come back in one transaction, and take back what was lost."""
        finished = [self._ensure_recordable(entry) for entry in self._finished]
        if not finished:
            return
        settled = self._store_results(finished)
        self._finished = []
        self._standing = None
        for entry in finished:
            worker, task = entry.worker, entry.task
            if entry.is_lost:
                self._checks.forget(worker)
            if not isinstance(task, Assignment):
                self._tell(news=self._checks.take(entry))
                continue
            if entry.is_lost:
                self.metric("losses", task.device, 1)
                after = self.store.assignments.lose(task.id, str(entry.why))
            else:
                measurement, after = settled[task.id]
                is_label = makes_label(measurement)
                if measurement.is_fault_of_worker:
                    self.metric("losses", task.device, 1)
                elif is_label or not is_final(measurement.outcome):
                    self.metric("labels" if is_label else "failures", task.device, 1)
                self._checks.take_outcome(worker, measurement)
            if after.state is AssignmentState.FAILED:
                self._log_abandoned(after, None if entry.is_lost else measurement.outcome)

    def _ensure_recordable(self, entry: Finished) -> Finished:
        """Return a result that can be stored: what is no measurement of the task is a failure."""
        wanted = self._wanted_measurement(entry)
        if entry.measurement is not None:
            return replace(entry, measurement=ensure_recordable(entry.measurement, wanted))
        if entry.is_lost or not isinstance(entry.task, Assignment):
            return entry
        return replace(entry, measurement=failed_attempt(str(entry.why), wanted))

    def _store_results(
        self, finished: Sequence[Finished]
    ) -> dict[str, tuple[Measurement, Assignment]]:
        """Record results together, or one by one if the store refuses one of them.

        Returns:
            Measurements and their assignments afterwards, by the ids of these.
        """
        results = [
            (entry.measurement, entry.task.id)
            for entry in finished
            if entry.measurement is not None and isinstance(entry.task, Assignment)
        ]
        try:
            after = self.store.measurements.record(results, max_attempts=self.spec.max_attempts)
            return {name: (measurement, after[name]) for measurement, name in results}
        except RefusedRowError as error:
            if len(finished) > 1:
                parts = [self._store_results([entry]) for entry in finished]
                return dict(itertools.chain.from_iterable(part.items() for part in parts))
            (entry,) = finished
            reason = f"what was measured cannot be recorded: {ascii(str(error))[1:-1]}"
            return self._store_results(
                [
                    replace(
                        entry, measurement=failed_attempt(reason, self._wanted_measurement(entry))
                    )
                ]
            )

    def _wanted_measurement(self, entry: Finished) -> Wanted:
        """Return the measurement that a worker had to take."""
        task, worker = entry.task, entry.worker
        key = task.attempt_key
        return Wanted(task.configuration, worker.device, self.protocol, key, worker.fingerprint)

    def _log_abandoned(self, assignment: Assignment, outcome: Outcome | None) -> None:
        """Say that an assignment gets no label unless it is retried."""
        reason = {None: "its worker was lost", Outcome.UNSTABLE: "steps not steady"}.get(
            outcome, outcome
        )
        attempts = assignment.failures + assignment.losses
        message = (
            f"{assignment.device}  {assignment.configuration}: no label after {attempts} attempts "
            f"({reason}); try it again later with: trappm campaign resume {self.id} --retry-failed"
        )
        event = {"message": message, "id": assignment.id}
        self.store.campaigns.log_event(self.id, "abandoned", event)

    # Jobs: generators that yield while they wait.

    def _start_job(self, job: Job) -> Iterator[None]:
        match job:
            case MakePool():
                return self._make_pool()
            case Prepare():
                return self._prepare()
            case Choose():
                return self._choose(job)
            case Train():
                return self._train(job)
            case Close():
                return self._close(job)
            case Publish():
                return self._publish()

    def _advance_job(self) -> None:
        """Go on with the job; after it the store is looked at again.

        A learner that has failed, also when it was started again, does not stop the measurements.
        """
        if self._job is None:
            return
        try:
            next(self._job)
        except StopIteration:
            self._job = None
            self._standing = None
        except LearnerError as error:
            self._job = None
            self._standing = None
            self._learner_error = error.cause
            self._learner_state = replace(self._learner_state, has_failed=True)
            self.note("learner", f"{error.cause}; what is planned is still measured")

    def _end_job(self) -> None:
        """Cancel what a job has begun."""
        if self._job is not None:
            self._job.close()  # type: ignore[attr-defined]

    def _make_pool(self) -> Iterator[None]:
        """Store the pool, after one trace of each model, which gives its graph.

        Raises:
            InputError: The pool is too small for the budget.
        """
        configurations = pool_of(self.spec, self.store)
        self._tell("pool", news=f"pool: {len(configurations)} configurations")
        yield from self._trace("graphs", first_steps(configurations).values())
        self._planner.store_pool(configurations)

    def _prepare(self) -> Iterator[None]:
        """Trace the other steps, give the learner the pool, and have it train its encoder."""
        for device in self.spec.devices.keys:
            if known_spec(self._planner.card(device)) is None:
                self._tell(
                    news=f"{device} is not in profiler/devices/catalogue.csv: how long its steps "
                    "take is learned from labels alone, without its data sheet"
                )
        yield from self._trace("steps", self._planner.steps())
        began = self.clock()
        yield from self._call("encoder", CampaignLearner.set_pool, *self._planner.learner_pool())
        self._learner_state = replace(
            self._learner_state, is_ready=True, training_s=self.clock() - began
        )
        self._tell(news=f"encoder: ready, {len(self._planner.pool)} configurations embedded")

    def _trace(self, stage: str, keys: Collection[TraceKey]) -> Iterator[None]:
        """Trace the steps that are missing, and show their number and the time to go."""
        missing = self.store.traces.missing(keys)
        if not missing:
            return
        begin, before = self.clock(), len(keys) - len(missing)
        self._tell(stage, done=before, total=len(keys))
        self._is_tracing = True
        tasks = self.profilers.trace(missing)
        try:
            done = 0
            while done < len(missing):
                is_idle = not self.profilers.list_running()
                for traced in tasks.take(LOOK_S if is_idle else 0.0):
                    traced.keep(self.store.traces)
                    if traced.remark:
                        self._tell(news=traced.remark)
                    done += 1
                if done:
                    to_go_s = (self.clock() - begin) / done * (len(missing) - done)
                    eta_s = to_go_s if done < len(missing) else None
                    self._tell(stage, done=before + done, total=len(keys), eta_s=eta_s)
                yield
        finally:
            tasks.cancel()
            self._is_tracing = False

    def _call(
        self, stage: str | None, method: Callable[..., Any], *arguments: Any
    ) -> Iterator[None]:
        """Call a method of the learner and wait for `self.learner.result`.

        Args:
            stage: Stage under which its progress is shown, if nothing is measured.
            method: A method of `CampaignLearner`.
            *arguments: Its arguments.

        Raises:
            LearnerError: It failed.
        """
        try:
            self.learner.begin(method.__name__, *arguments)
            while not self.learner.wait(0.0 if self.profilers.list_running() else JOB_POLL_S):
                if stage is not None and not self.profilers.list_running():
                    done, total = self.learner.progress()
                    self._tell(stage, done=done, total=total)
                yield
        except TrappmError as error:
            raise LearnerError(error) from error

    def _choose(self, job: Choose) -> Iterator[None]:
        """Draw or choose a device's part of a round, and store it."""
        device, number = job.device, job.round_number
        if number == 0:
            chosen = self._planner.draw(device, job.count)
        else:
            request = self._planner.make_request(device, number, job.count)
            yield from self._call("choosing", CampaignLearner.choose, request)
            chosen = self._planner.plan_chosen(device, self.learner.result, job.count)
        self.store.rounds.plan(self.id, number, PURPOSES[min(number, 2)], device, chosen)
        stacks = {known for known in self._adopted if known[0] == device}
        self._adopted -= stacks
        for stack in sorted(stacks):
            self._adopt_labels(*stack)

    def _train(self, job: Train) -> Iterator[None]:
        """Train on all labels, judge the heads, and check the target errors.

        Raises:
            CampaignError: All labels that could come are there, and they are too few.
        """
        given = training_labels(self.store, self.id)
        for left_out in given.left_out:
            if left_out not in self._left_out:
                self.note("stack", str(left_out))
        self._left_out = given.left_out
        ended, began = self._look().ended, self.clock()
        yield from self._call("learning", CampaignLearner.fit, given.labels)
        report: TrainingReport = self.learner.result
        standing, source = self.store.campaigns.standing(self.id), self.spec.devices.source
        has_heads = source in report.devices
        self._learner_state = replace(
            self._learner_state, has_heads=has_heads, ended_at_training=ended, may_choose=True,
            training_s=self.clock() - began,
        )  # fmt: skip
        if job.is_last_chance and not has_heads and not standing.is_enough:
            outcomes = self.store.campaigns.outcome_counts(self.id).get(source, {})
            attempts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
            raise CampaignError(
                f"the initial draw gave too few labels on {source} to learn from "
                f"(attempts: {attempts}); when the machine is quiet: "
                f"trappm campaign resume {self.id} --retry-failed --outcome "
                f"{max(outcomes, key=outcomes.__getitem__, default='error')}"
            )
        seconds = budget_seconds(standing.seconds, self._plan.devices)
        spent = Spent(standing.labels, seconds, datetime.now(UTC))
        self._report = replace(report, left_out=self._left_out, spent=spent)
        stop = stop_by_target(self._plan.rules, report.evaluation, self.spec.devices.keys)
        if stop is not None and not standing.is_enough:
            self._stop_by(stop)

    def _close(self, job: Close) -> Iterator[None]:
        """Close a round with the report of the latest training."""
        yield from ()
        number = job.round_number
        self.store.rounds.close(self.id, number, self._report.to_json() if number else {})
        if number:
            self._tell(news=round_line(number, self._report))

    def _stop_by(self, stop: Stop) -> None:
        """Begin nothing more because of a stop rule, also after a restart."""
        line = f"enough ({stop.rule}): {stop.reason}"
        event = {"message": line, "rule": stop.rule, "told": stop.reason}
        self.store.campaigns.log_event(self.id, STOP_EVENT, event)
        self._standing = None

    def _publish(self) -> Iterator[None]:
        """Publish a snapshot, make it the latest unless it is worse, and finish.

        The campaign finishes last. If this is cut off, it is repeated when the campaign is resumed.

        Raises:
            CampaignStopped: It was paused or cancelled before it had finished.
        """
        labels = training_labels(self.store, self.id).labels
        errors = self._report.devices
        few = "there are too few labels to learn from"
        unfit = unfit_to_publish(labels) if errors else few
        if unfit:
            self._finish(f"no snapshot is published: {unfit}", None)
            return
        fields = {
            "campaign": self.id,
            "errors": errors,
            "split": "whole architectures held out, uniform draw",
            "evaluation_labels": dict(Counter(x.device for x in labels if x.role == Role.EVALUATE)),
        }
        self._tell(eta_s=None)
        pairs = compiled_pairs(self.store, self.id)
        to = self.spec.registry
        yield from self._call(
            "publishing", CampaignLearner.publish, self.snapshots, fields, pairs, to
        )
        snapshot, notes = self.learner.result
        for note in notes:
            self.note("published", note)
        self._standing = None
        self._look()  # the last moment for an order
        yield from self._call("publishing", CampaignLearner.promote, to or self.snapshots, snapshot)
        self._tell(news=self.learner.result)
        self._finish(f"snapshot {snapshot}{f' in {to}' if to else ''}", snapshot)

    def _finish(self, message: str, snapshot: str | None) -> None:
        self._report_activity()
        if not self.store.owners.finish_campaign(self.id, message, snapshot):
            raise CampaignStopped
        self._snapshot, self._is_over = snapshot, True

    def _end(self, state: CampaignState, message: str) -> None:
        """Record what has come back, and end in this state, unless an order has set another."""
        self._end_job()
        self._finished += self.profilers.collect()
        with contextlib.suppress(StoreError):  # what cannot be recorded is measured again
            self._record()
        self._report_activity()
        self.store.owners.end_campaign(self.id, state, message)

    # Progress.

    def _tell(self, stage: str | None = None, *, news: str | None = None, **values: Any) -> None:
        """Update what the campaign does, and add a line of news."""
        if news:
            self.note("news", news)
        if stage is not None and stage != self.activity.stage:
            values = {"stage": stage, "done": 0, "total": 0, "current": ()} | values
        self.activity = replace(self.activity, **values)

    def _report_activity(self) -> None:
        """Write the notes and what the campaign does into the store."""
        while self.notes:
            kind, message = self.notes[0]
            self.store.campaigns.log_event(self.id, kind, {"message": message})
            self.notes.popleft()
        if self.activity != self._reported_activity:
            self.store.owners.report(self.id, self.activity)
            self._reported_activity = self.activity

    def _show_counts(self, standing: Standing) -> None:
        at_work = self.profilers.list_running()
        if not at_work:
            return
        shown = [f"{worker.device}: {task.configuration}" for worker, task in at_work[:SHOWN]]
        more = [f"and {len(at_work) - SHOWN} more"] if len(at_work) > SHOWN else []
        number = next((r.number for r in standing.rounds if not r.is_closed), 0)
        self._tell(
            f"measuring, round {number} of {1 + self.spec.rounds.count}",
            done=min(standing.ended, self.spec.total),
            total=self.spec.total,
            eta_s=seconds_to_go(
                self.spec, standing, self._learner_state.training_s, self._count_able()
            ),
            current=(*shown, *more),
        )


class LearnerError(Exception):
    """The learner failed, also after it was started again."""

    def __init__(self, cause: TrappmError) -> None:
        super().__init__(cause)
        self.cause = cause
