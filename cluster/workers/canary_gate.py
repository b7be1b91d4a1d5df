"""Which workers may measure: each proves itself by the canary, at first and every so often.

    due --> the worker measures the canary --> reading, stored --> ok, drifting   goes on
                                                               --> stop           measures no more

The readings of all campaigns on a device are its history, so a node is compared with what it was
when it was new, and not with what it was this morning.
"""

from __future__ import annotations

from collections import Counter

from trappm.cluster.scheduler.messages import Worker
from trappm.cluster.workers.interfaces import CanaryCheck, Finished
from trappm.cluster.workers.rehearsal import runs_nothing
from trappm.profiler.measuring.canary import CanaryDecision, CanaryPlan, CanaryReading, CanaryWatch
from trappm.store import RefusedRowError, Store


class CanaryGate:
    """The canaries of a campaign's workers.

    Args:
        plan: None measures none, and stops nobody. Devices that run nothing have none either.
    """

    def __init__(self, store: Store, campaign_id: str, plan: CanaryPlan | None) -> None:
        self.plan = plan
        self.stopped: dict[Worker, str] = {}
        """Workers that measure no more in this process, and why."""
        self._store = store
        self._campaign_id = campaign_id
        self._watches: dict[Worker, CanaryWatch] = {}
        self._losses: Counter[Worker] = Counter()

    def is_due(self, worker: Worker) -> bool:
        """Whether this worker is to measure the canary before anything else."""
        if self.plan is None or runs_nothing(worker.device):
            return False
        if worker not in self._watches:
            history = self._store.canaries.all(device=worker.device)
            self._watches[worker] = CanaryWatch(self.plan, history=history)
        return self._watches[worker].is_due()

    def count_measurement(self, worker: Worker) -> None:
        """Notes that the worker measures something else."""
        if worker in self._watches:
            self._watches[worker].count_measurement()

    def check(self, worker: Worker) -> CanaryCheck:
        """The task that is due on this worker."""
        assert self.plan is not None  # noqa: S101  (without a plan none is due)
        return CanaryCheck(self.plan.reference_on(worker.device))

    def take(self, finished: Finished) -> str:
        """Stores a canary's reading, and stops its worker if it drifted too far; a line of news."""
        worker, measurement = finished.worker, finished.measurement
        if measurement is None:
            return self._lost(worker, finished.loss or "the worker was lost")
        reading = self._watches[worker].take(measurement)
        try:
            self._store.canaries.save(reading, campaign_id=self._campaign_id)
        except RefusedRowError as error:
            return self._lost(worker, str(error))
        self._losses.pop(worker, None)
        if reading.decision is CanaryDecision.STOP:
            self._stop(worker, str(reading.message))
        return reading_line(reading)

    def is_drifting(self, worker: Worker) -> bool:
        """Whether the worker's last reading was off its reference."""
        watch = self._watches.get(worker)
        return watch is not None and watch.readings[-1].decision is not CanaryDecision.OK

    def forget(self, worker: Worker) -> None:
        """The worker was lost: when it comes back, on whichever node, its canary is due."""
        self._watches.pop(worker, None)

    def _lost(self, worker: Worker, loss: str) -> str:
        """A worker that is lost in its canary again and again cannot measure."""
        self.forget(worker)
        self._losses[worker] += 1
        if self.plan is not None and self._losses[worker] >= self.plan.confirmations:
            self._stop(worker, f"the canary could not be measured: {loss}")
        return f"{worker.device}  canary  {loss}"

    def _stop(self, worker: Worker, why: str) -> None:
        self.stopped[worker] = why
        event = {"message": f"{worker.device} measures no more: {why}", "worker": worker.name}
        self._store.campaigns.log_event(self._campaign_id, "canary", event)


def reading_line(reading: CanaryReading) -> str:
    """One line for a reading, as it comes in."""
    if reading.message is not None:
        return f"{reading.device}  canary {reading.decision}: {reading.message}"
    text = f"{reading.step_time_ms:.2f} ms"
    if reading.relative_drift is None:
        text += ", the first one here"
    else:
        text += (
            f", {reading.relative_drift:+.1%} off its reference of {reading.reference_ms:.2f} ms"
        )
    return f"{reading.device}  canary ok: {text}"
