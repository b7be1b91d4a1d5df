"""Workers of a campaign: their tasks, how these finish, and checks before they measure.

    a worker joins --> canary --> reading, stored --> ok, drifting   continues
                                                  --> stop           measures no more

    an assignment fails for its worker's fault --> canary
                                               --> without one, several in succession: stop

The readings of all campaigns on a device are its history, so a node is compared with its state when
it was new.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from trappm.cluster.spec import runs_nothing
from trappm.profiler.measuring.canary import CanaryDecision, CanaryPlan, CanaryReading, CanaryWatch
from trappm.profiler.records import Configuration, Measurement
from trappm.store import Assignment, RefusedRowError, Store

SET_ASIDE_S = 3600.0
"""Seconds after which a device that failed its checks is looked at again."""

_MAX_WORKER_FAILURES = 3
"""Number of successive failures after which a worker without a canary is stopped."""


@dataclass(frozen=True)
class Worker:
    """A profiler: its name, its device, its host and its software stack."""

    name: str
    device: str
    host: str
    fingerprint: str


@dataclass(frozen=True)
class CanaryCheck:
    """A measurement of the canary."""

    configuration: Configuration
    attempt_key: str = field(default_factory=lambda: uuid.uuid4().hex)


Task = Assignment | CanaryCheck
"""Task of a worker; each has a configuration and an attempt key."""


@dataclass(frozen=True)
class Finished:
    """Result of a task, or why there is none."""

    worker: Worker
    task: Task
    measurement: Measurement | None
    why: str | None = None
    """Reason why there is no measurement."""
    is_lost: bool = False
    """True if the worker or its node is gone, which says nothing about the task."""


@dataclass(eq=False)
class WorkerChecks:
    """Canaries of a campaign's workers."""

    store: Store
    campaign_id: str
    canary: CanaryPlan | None
    """Plan of the canaries; None for none."""
    clock: Callable[[], float]
    """Monotonic seconds."""

    def __post_init__(self) -> None:
        self._stopped: dict[Worker, tuple[str, float]] = {}
        """Why workers were set aside, and until when. They keep their GPUs, so that no other worker
        gets them."""
        self._watches: dict[Worker, CanaryWatch] = {}
        self._canary_losses: Counter[Worker] = Counter()
        self._failures: Counter[Worker] = Counter()
        """Successive failures of workers without a canary."""

    def why_stopped(self, worker: Worker) -> str | None:
        """Return why a worker is set aside; None if it may measure."""
        why, until = self._stopped.get(worker, (None, -math.inf))
        return why if self.clock() < until else None

    def is_due(self, worker: Worker) -> bool:
        """Return whether this worker's canary is due before an assignment."""
        if self.canary is None or not self._has_canary(worker):
            return False
        if worker not in self._watches:
            history = self.store.canaries.history(worker.device)
            self._watches[worker] = CanaryWatch(self.canary, history=history)
        return self._watches[worker].is_due()

    def begin(self, worker: Worker) -> CanaryCheck:
        """Return the canary that is due on this worker."""
        assert self.canary is not None  # noqa: S101  (otherwise none is due)
        return CanaryCheck(self.canary.reference_on(worker.device))

    def take(self, finished: Finished) -> str:
        """Store a canary's reading, and return a line of news about it.

        A worker that drifted too far is stopped.
        """
        worker, measurement = finished.worker, finished.measurement
        if measurement is None:
            return self._lose_canary(worker, str(finished.why))
        reading = self._watches[worker].take(measurement)
        try:
            self.store.canaries.save(reading, campaign_id=self.campaign_id)
        except RefusedRowError as error:
            return self._lose_canary(worker, str(error))
        self._canary_losses.pop(worker, None)
        if reading.decision is CanaryDecision.STOP:
            self._stop(worker, str(reading.message))
        return reading_line(reading)

    def count_measurement(self, worker: Worker) -> None:
        """Note that the worker measures an assignment."""
        if worker in self._watches:
            self._watches[worker].count_measurement()

    def take_outcome(self, worker: Worker, measurement: Measurement) -> None:
        """Note how an assignment ended: if the worker failed, its canary is due.

        Without a canary, several failures in succession stop the worker.
        """
        if not measurement.is_fault_of_worker:
            self._failures.pop(worker, None)
        elif self._has_canary(worker):
            self._watches.pop(worker, None)
        else:
            self._failures[worker] += 1
            if self._failures[worker] >= _MAX_WORKER_FAILURES:
                self._stop(worker, f"it broke down repeatedly, lastly with: {measurement.message}")

    def forget(self, worker: Worker) -> None:
        """Note that the worker was lost: when it comes back, its canary is due."""
        self._watches.pop(worker, None)

    def _has_canary(self, worker: Worker) -> bool:
        return self.canary is not None and not runs_nothing(worker.device)

    def _lose_canary(self, worker: Worker, loss: str) -> str:
        """Count a worker that was lost in its canary; stop it when that happens repeatedly."""
        self._watches.pop(worker, None)
        self._canary_losses[worker] += 1
        if self.canary is not None and self._canary_losses[worker] >= self.canary.confirmations:
            self._stop(worker, f"the canary could not be measured: {loss}")
        return f"{worker.device}  canary  {loss}"

    def _stop(self, worker: Worker, why: str) -> None:
        self._stopped[worker] = why, self.clock() + SET_ASIDE_S
        self._failures.pop(worker, None)
        self._watches.pop(worker, None)
        message = f"{worker.device}: {worker.name} is set aside for an hour: {why}"
        event = {"message": message, "worker": worker.name}
        self.store.campaigns.log_event(self.campaign_id, "canary", event)


def reading_line(reading: CanaryReading) -> str:
    """Return one line for a canary's reading."""
    if reading.message is not None:
        return f"{reading.device}  canary {reading.decision}: {reading.message}"
    if reading.relative_drift is None:
        against = ", the first one here"
    else:
        reference = f"its reference of {reading.reference_ms:.2f} ms"
        against = f", {reading.relative_drift:+.1%} off {reference}"
    return f"{reading.device}  canary ok: {reading.step_time_ms:.2f} ms{against}"
