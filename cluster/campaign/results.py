"""Measurements of a campaign: started on its workers, and recorded as they come back.

All that came back in one turn are recorded in one transaction, and all that begin are leased in
another, so a campaign on many GPUs needs few of them. What the campaign does next depends on a
result only after it was recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trappm.cluster.campaign.news import News
from trappm.cluster.campaign.progress import Pace, measurement_line
from trappm.cluster.scheduler.messages import (
    DeviceChecked,
    Event,
    Lost,
    Measure,
    Measured,
    Quarantine,
    Stopped,
)
from trappm.cluster.spec import CampaignSpec
from trappm.cluster.workers.canary_gate import CanaryGate
from trappm.cluster.workers.interfaces import CanaryCheck, Finished, KernelRun, Workers
from trappm.cluster.workers.kernel_gate import KernelGate
from trappm.profiler.records import (
    Measurement,
    Outcome,
)
from trappm.profiler.steps.stability import is_contended
from trappm.store import Assignment, RefusedRowError, Store
from trappm.store.measurements import makes_label
from trappm.store.records import is_final
from trappm.store.rows import Wanted, recordable, unrecordable

_LOST = "the worker was lost"
_LEAST_SHARE = 0.005
"""Smaller shares are not counted: the message about a pause would report them as 0 %."""


def others_share(measurement: Measurement) -> float | None:
    """Return the share of the host's cores that other programs used, if they made it unstable.

    None if it was unstable for another reason, or if other programs of this host used no visible
    share, such as under contention by another virtual machine.
    """
    share = measurement.environment.get("others_cpu_share")
    if share is None or share < _LEAST_SHARE or not is_contended(measurement):
        return None
    return float(share)


class Results:
    """The measurements of one campaign."""

    def __init__(
        self,
        store: Store,
        campaign_id: str,
        spec: CampaignSpec,
        workers: Workers,
        canary_gate: CanaryGate,
        kernel_gate: KernelGate,
        pace: Pace,
        news: News,
    ) -> None:
        self.ended: Counter[str] = Counter()
        """Assignments that need no measurement any more, by device."""
        self._store = store
        self._id = campaign_id
        self._max_attempts = spec.max_attempts
        self._protocol = spec.measuring_protocol
        self._workers = workers
        self._canary_gate = canary_gate
        self._kernel_gate = kernel_gate
        self._pace = pace
        self._tell = news.tell
        self._leases: dict[str, Assignment] = {}
        self._unwritten: list[Finished] = []
        """Results that are not recorded yet."""

    def start(self, commands: Sequence[Measure]) -> None:
        """Lease and start what is to be measured."""
        if not commands:
            return
        wanted = [(c.assignment_id, c.worker.name) for c in commands]
        leases = self._store.measurements.record_and_lease([], wanted)
        for command, lease in zip(commands, leases, strict=True):
            self._leases[lease.id] = lease
            self._canary_gate.count_measurement(command.worker)
            self._workers.start(command.worker, lease, self._protocol)

    def wait(self, timeout_s: float) -> Sequence[Finished]:
        """Collect finished measurements and record them.

        What cannot be recorded becomes an error with the reason.
        """
        self._unwritten += map(self._checked, self._workers.wait(timeout_s))
        return self.write()

    def write(self) -> Sequence[Finished]:
        """Record what has come back, and return it as it was recorded."""
        finished = self._recorded(self._unwritten)
        self._unwritten = []
        for entry in finished:
            if isinstance(entry.task, KernelRun):
                self._tell(news=self._kernel_gate.take(entry))
            elif isinstance(entry.task, CanaryCheck):
                self._tell(news=self._canary_gate.take(entry))
                is_drifting = self._canary_gate.is_drifting(entry.worker)
                self._kernel_gate.note_canary(entry.worker, is_drifting=is_drifting)
            elif entry.measurement is None:
                loss = entry.loss or _LOST
                self._tell(news=f"{entry.task.device}  {entry.task.configuration}  {loss}")
            else:
                self._pace.measured(entry.measurement.device, entry.measurement.duration_s)
                self._tell(news=measurement_line(entry.measurement))
        return finished

    def _recorded(self, finished: Sequence[Finished]) -> list[Finished]:
        """Record measurements of assignments: together, or one by one if the store refuses one."""
        try:
            self._record(finished)
        except RefusedRowError:
            return [self._recorded_alone(entry) for entry in finished]
        return [*finished]

    def _recorded_alone(self, entry: Finished) -> Finished:
        """Record one measurement, or an error with the reason if the store refuses it."""
        try:
            self._record([entry])
        except RefusedRowError as error:
            entry = replace(entry, measurement=unrecordable(str(error), self._wanted(entry)))
            self._record([entry])
        return entry

    def _record(self, finished: Sequence[Finished]) -> None:
        results = [
            (entry.measurement, entry.task.id)
            for entry in finished
            if entry.measurement is not None and isinstance(entry.task, Assignment)
        ]
        if results:
            self._store.measurements.record_and_lease(results, [], max_attempts=self._max_attempts)

    def _checked(self, entry: Finished) -> Finished:
        if entry.measurement is None or isinstance(entry.task, KernelRun):
            return entry
        return replace(entry, measurement=recordable(entry.measurement, self._wanted(entry)))

    def _wanted(self, entry: Finished) -> Wanted:
        """Return the measurement that a worker was to take."""
        task, worker = entry.task, entry.worker
        assert not isinstance(task, KernelRun)  # noqa: S101  (which is no single measurement)
        key = task.attempt_key
        return Wanted(task.configuration, worker.device, self._protocol, key, worker.fingerprint)

    def events(self, finished: Finished) -> Iterator[Event]:
        """What a result means for the campaign."""
        worker, task, measurement = finished.worker, finished.task, finished.measurement
        if worker in self._canary_gate.stopped:
            yield Stopped(worker)
        if finished.is_lost:
            yield Lost(worker, finished.loss or _LOST)
        elif measurement is None or not isinstance(task, Assignment):
            yield DeviceChecked(worker)
        else:
            if is_final(measurement.outcome) and task.id in self._leases:
                del self._leases[task.id]
                self.ended[task.device] += 1
            yield Measured(
                worker, task.id, measurement.outcome, measurement.duration_s,
                makes_label(measurement), others_share(measurement),
            )  # fmt: skip

    def quarantine(self, command: Quarantine) -> None:
        """Record that an assignment gets no label for now."""
        configuration = self._leases.pop(command.assignment_id).configuration
        hosts = len(set(command.hosts))
        what = {None: "its worker was lost", Outcome.UNSTABLE: "steps not steady"}
        reason = what.get(command.outcome, command.outcome)
        message = (
            f"{command.device}  {configuration}: no label after {command.failures} attempts on "
            f"{hosts} {'host' if hosts == 1 else 'hosts'} ({reason}); "
            f"try it again later with: trappm campaign retry {self._id}"
        )
        event = {"message": message, "id": command.assignment_id}
        self._store.campaigns.log_event(self._id, "quarantined", event)
        self.ended[command.device] += 1
        self._tell(news=message)
