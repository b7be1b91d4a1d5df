"""Measurements of a campaign: started on its workers, and recorded as they come back.

Those that came back and those that begin are written together, in one transaction, so a campaign on
many GPUs needs few of them.
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
from trappm.profiler.records import Measurement, Outcome, is_cpu_device
from trappm.store import Assignment, Store
from trappm.store.records import is_final
from trappm.store.repositories.label_rows import makes_label
from trappm.store.validation import recordable

_LOST = "the worker was lost"


def others_share(measurement: Measurement) -> float | None:
    """Return the share of the host's cores that other programs used, if they made it unstable."""
    share = measurement.environment.get("others_cpu_share")
    is_on_cores = is_cpu_device(measurement.device)
    return share if is_on_cores and measurement.outcome is Outcome.UNSTABLE else None


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
        """Measurements that came back, for the next transaction."""

    def write(self, commands: Sequence[Measure] = ()) -> None:
        """Records what has come back, and leases and starts what is to be measured."""
        results = [
            (finished.measurement, finished.task.id)
            for finished in self._unwritten
            if finished.measurement is not None and isinstance(finished.task, Assignment)
        ]
        wanted = [(c.assignment_id, c.worker.name) for c in commands]
        if results or wanted:
            leases = self._store.measurements.record_and_lease(
                results, wanted, max_attempts=self._max_attempts
            )
            self._unwritten.clear()
            for command, lease in zip(commands, leases, strict=True):
                self._leases[lease.id] = lease
                self._canary_gate.count_measurement(command.worker)
                self._workers.start(command.worker, lease, self._protocol)
        for measurement, _ in results:
            self._pace.measured(measurement.device, measurement.duration_s)
            self._tell(news=measurement_line(measurement))

    def wait(self, timeout_s: float) -> Sequence[Finished]:
        """Collects finished measurements, which are stored together with the next leases.

        What cannot be recorded becomes an error with the reason.
        """
        finished = [
            entry
            if entry.measurement is None or isinstance(entry.task, KernelRun)
            else replace(entry, measurement=recordable(
                entry.measurement, entry.task.configuration, entry.worker.device, self._protocol,
                entry.task.attempt_key, entry.worker.fingerprint,
            ))
            for entry in self._workers.wait(timeout_s)
        ]  # fmt: skip
        self._keep(finished)
        return finished

    def _keep(self, finished: Sequence[Finished]) -> None:
        self._unwritten += finished
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
