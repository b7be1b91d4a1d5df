"""Checks of workers before they measure assignments: the canary, and the kernels of the device.

    a worker joins --> canary --> reading, stored --> ok, drifting   continues
                                                  --> stop           measures no more
                   --> recent kernels of its device and software stack in the store?  continues
                       else it times them, once for all workers of that device
    its canary drifts --> its kernels are timed again

    an assignment fails for its worker's fault --> canary
                                               --> without one, several in succession: stop

The readings of all campaigns on a device are its history, so a node is compared with its state when
it was new. A run of kernels that fails does not stop the worker.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from trappm.cluster.scheduler.messages import CanaryCheck, Finished, KernelRun, Worker
from trappm.cluster.spec import Characterisation, runs_nothing
from trappm.profiler.devices.base import rank_key
from trappm.profiler.errors import StoreError
from trappm.profiler.kernels.ceilings import ceilings, sentence
from trappm.profiler.measuring.canary import CanaryDecision, CanaryPlan, CanaryReading, CanaryWatch
from trappm.profiler.measuring.sweep import MAX_WORKER_FAILURES, worker_failed
from trappm.profiler.records import Measurement, Outcome, is_cpu_device
from trappm.store import RefusedRowError, Store
from trappm.store.kernel_measurements import recordable

_MOST_LOSSES = 2
"""Number of workers that may be lost in a device's kernels; then it is measured without them."""

_Stack = tuple[str, str]
"""A device and the fingerprint of its software."""


@dataclass(eq=False)
class HostChecks:
    """Canaries of a campaign's workers, and kernels of its devices."""

    store: Store
    campaign_id: str
    canary: CanaryPlan | None
    """Plan of the canaries; None for none."""
    kernels: Characterisation | None
    """Plan of the kernels; None for none."""

    def __post_init__(self) -> None:
        self.stopped: dict[Worker, str] = {}
        """Workers that measure nothing until they join again, and why."""
        self._watches: dict[Worker, CanaryWatch] = {}
        self._canary_losses: Counter[Worker] = Counter()
        self._failures: Counter[Worker] = Counter()
        """Successive failures of workers without a canary."""
        self._known: set[_Stack] = set()
        """Stacks whose kernels need not be timed."""
        self._under_way: dict[_Stack, Worker] = {}
        self._kernel_losses: Counter[_Stack] = Counter()
        self._drifted: dict[Worker, bool] = {}
        """Workers whose last canary drifted, and whether their kernels are due for that."""

    def is_due(self, worker: Worker) -> bool:
        """Return whether this worker has a check to do before an assignment."""
        return self._canary_is_due(worker) or self._kernels_are_due(worker)

    def begin(self, worker: Worker) -> CanaryCheck | KernelRun:
        """Return the check that is due on this worker."""
        if self.canary is not None and self._canary_is_due(worker):
            return CanaryCheck(self.canary.reference_on(worker.device))
        assert self.kernels is not None  # noqa: S101  (otherwise none is due)
        self._under_way[_stack(worker)] = worker
        return KernelRun(self.kernels.seconds)

    def take(self, finished: Finished) -> str:
        """Store the result of a check, and return a line of news about it."""
        if isinstance(finished.task, KernelRun):
            return self._take_kernels(finished)
        return self._take_reading(finished)

    def count_measurement(self, worker: Worker) -> None:
        """Note that the worker measures an assignment."""
        if worker in self._watches:
            self._watches[worker].count_measurement()

    def take_outcome(self, worker: Worker, measurement: Measurement) -> None:
        """Note how an assignment ended: if the worker failed, its canary is due.

        Without a canary, several failures in succession stop the worker.
        """
        if not worker_failed(measurement):
            self._failures.pop(worker, None)
        elif self._has_canary(worker):
            self._watches.pop(worker, None)
        else:
            self._failures[worker] += 1
            if self._failures[worker] >= MAX_WORKER_FAILURES:
                self._stop(worker, f"it broke down repeatedly, lastly with: {measurement.message}")

    def forget(self, worker: Worker) -> None:
        """Note that the worker was lost: when it comes back, its canary is due."""
        self._watches.pop(worker, None)
        self._end_kernels(worker)

    # The canary.

    def _has_canary(self, worker: Worker) -> bool:
        return self.canary is not None and not runs_nothing(worker.device)

    def _canary_is_due(self, worker: Worker) -> bool:
        if self.canary is None or not self._has_canary(worker):
            return False
        if worker not in self._watches:
            history = self.store.canaries.all(device=worker.device)
            self._watches[worker] = CanaryWatch(self.canary, history=history)
        return self._watches[worker].is_due()

    def _take_reading(self, finished: Finished) -> str:
        """Store a canary's reading, and stop its worker if it drifted too far."""
        worker, measurement = finished.worker, finished.measurement
        if measurement is None:
            return self._lose_canary(worker, str(finished.loss))
        reading = self._watches[worker].take(measurement)
        try:
            self.store.canaries.save(reading, campaign_id=self.campaign_id)
        except RefusedRowError as error:
            return self._lose_canary(worker, str(error))
        self._canary_losses.pop(worker, None)
        if reading.decision is CanaryDecision.STOP:
            self._stop(worker, str(reading.message))
        if reading.decision is CanaryDecision.OK:
            self._drifted.pop(worker, None)
        else:
            self._drifted.setdefault(worker, True)
        return reading_line(reading)

    def _lose_canary(self, worker: Worker, loss: str) -> str:
        """Count a worker that was lost in its canary; stop it when that happens repeatedly."""
        self._watches.pop(worker, None)
        self._drifted.pop(worker, None)
        self._canary_losses[worker] += 1
        if self.canary is not None and self._canary_losses[worker] >= self.canary.confirmations:
            self._stop(worker, f"the canary could not be measured: {loss}")
        return f"{worker.device}  canary  {loss}"

    def _stop(self, worker: Worker, why: str) -> None:
        self.stopped[worker] = why
        message = f"{worker.device}: {worker.name} is set aside for an hour: {why}"
        event = {"message": message, "worker": worker.name}
        self.store.campaigns.log_event(self.campaign_id, "canary", event)

    # The kernels.

    def _kernels_are_due(self, worker: Worker) -> bool:
        plan, stack = self.kernels, _stack(worker)
        if (
            plan is None
            or runs_nothing(worker.device)
            or stack in self._under_way
            or (is_cpu_device(worker.device) and not plan.cpus)
            or rank_key(worker.device).ranks > 1  # its kernels are those of a rank's device
        ):
            return False
        if self._drifted.get(worker):
            return True
        if stack not in self._known:
            since = datetime.now(UTC) - timedelta(days=plan.again_after_days)
            newest = self.store.kernels.newest(worker.device)
            recent = [x for x in newest if datetime.fromisoformat(x.timed_at) > since]
            if any(known.is_of(worker.fingerprint) for known in recent):
                self._known.add(stack)
        return stack not in self._known

    def _take_kernels(self, finished: Finished) -> str:
        worker, kernels = finished.worker, finished.kernels
        stack = _stack(worker)
        self._end_kernels(worker)
        if worker in self._drifted:  # it is not asked again if it fails the run
            self._drifted[worker] = False
        if kernels is None:
            self._kernel_losses[stack] += 1
            if self._kernel_losses[stack] >= _MOST_LOSSES:
                self._known.add(stack)
            return f"{worker.device}  kernels  {finished.loss}"
        self._known.add(stack)
        if not kernels:
            return f"{worker.device}  kernels could not be timed: {finished.loss}"
        kept = [recordable(kernel) for kernel in kernels]
        try:
            self.store.kernels.record(kept)
        except StoreError as error:
            return f"{worker.device}  kernels are not kept: {error}"
        latest = {kernel.call: kernel for kernel in kept}.values()
        timed = sum(kernel.outcome is Outcome.OK for kernel in latest)
        but = f", {len(latest) - timed} not" if timed < len(latest) else ""
        return f"{worker.device}  {timed} kernels timed{but}: {sentence(ceilings(kept))}"

    def _end_kernels(self, worker: Worker) -> None:
        if self._under_way.get(_stack(worker)) == worker:
            del self._under_way[_stack(worker)]


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


def _stack(worker: Worker) -> _Stack:
    return worker.device, worker.fingerprint
