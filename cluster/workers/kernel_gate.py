"""Which devices are still to be known by their kernels, before anything is measured on them.

    a worker joins --> kernels of its device and stack in the store, and recent?  nothing
                   --> else it times them, once for all workers of that device --> the store
    its canary drifts --> once more, on that worker

A run that fails costs itself only: it is news, and the campaign goes on without.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

from trappm.cluster.scheduler.messages import Worker
from trappm.cluster.spec import Characterisation
from trappm.cluster.workers.interfaces import Finished, KernelRun
from trappm.cluster.workers.rehearsal import runs_nothing
from trappm.profiler.devices.rank_keys import rank_key
from trappm.profiler.errors import StoreError
from trappm.profiler.kernels.ceilings import ceilings, sentence
from trappm.profiler.records import Outcome, is_cpu_device
from trappm.store import Store
from trappm.store.kernel_measurements import recordable

_MOST_LOSSES = 2
"""So many workers may be lost on the kernels of a device, which then is measured without."""

_Stack = tuple[str, str]
"""A device and the fingerprint of its software."""


class KernelGate:
    """The kernels of a campaign's devices.

    Args:
        plan: None times none.
    """

    def __init__(self, store: Store, plan: Characterisation | None) -> None:
        self._store = store
        self._plan = plan
        self._known: set[_Stack] = set()
        """Those that need no run, or no other one."""
        self._under_way: dict[_Stack, Worker] = {}
        self._losses: Counter[_Stack] = Counter()
        self._drifted: dict[Worker, bool] = {}
        """Workers whose last canary drifted, and whether a run is due for that."""

    def is_due(self, worker: Worker) -> bool:
        """Whether this worker is to time the kernels of its device before an assignment."""
        plan, stack = self._plan, _stack(worker)
        if plan is None or runs_nothing(worker.device) or stack in self._under_way:
            return False
        if is_cpu_device(worker.device) and not plan.cpus:
            return False
        if rank_key(worker.device).ranks > 1:
            return False  # its kernels are those of a rank's device
        if self._drifted.get(worker):
            return True
        if stack not in self._known and self._has_recent(worker, plan):
            self._known.add(stack)
        return stack not in self._known

    def begin(self, worker: Worker) -> KernelRun:
        """The run that is due on this worker."""
        assert self._plan is not None  # noqa: S101  (without a plan none is due)
        self._under_way[_stack(worker)] = worker
        return KernelRun(self._plan.seconds)

    def take(self, finished: Finished) -> str:
        """Keeps what a run measured; a line of news."""
        worker, kernels = finished.worker, finished.kernels
        stack = _stack(worker)
        self.forget(worker)
        if kernels is None:
            # A worker that drifts and dies of the run is not given it again.
            if worker in self._drifted:
                self._drifted[worker] = False
            self._losses[stack] += 1
            if self._losses[stack] >= _MOST_LOSSES:
                self._known.add(stack)
            return f"{worker.device}  kernels  {finished.loss}"
        self._known.add(stack)
        if worker in self._drifted:
            self._drifted[worker] = False
        if not kernels:
            return f"{worker.device}  kernels could not be timed: {finished.loss}"
        kept = [recordable(kernel) for kernel in kernels]
        try:
            self._store.kernels.record(kept)
        except StoreError as error:
            return f"{worker.device}  kernels are not kept: {error}"
        outcomes = Counter(kernel.outcome for kernel in {k.call: k for k in kept}.values())
        failed = outcomes.total() - outcomes[Outcome.OK]
        but = f", {failed} not" if failed else ""
        reached = sentence(ceilings(kept))
        return f"{worker.device}  {outcomes[Outcome.OK]} kernels timed{but}: {reached}"

    def note_canary(self, worker: Worker, *, is_drifting: bool) -> None:
        """A reading came in: when a device begins to drift, its kernels are timed once more."""
        if not is_drifting:
            self._drifted.pop(worker, None)
        else:
            self._drifted.setdefault(worker, True)

    def forget(self, worker: Worker) -> None:
        """Whatever it was at is not under way any more."""
        if self._under_way.get(_stack(worker)) == worker:
            del self._under_way[_stack(worker)]

    def _has_recent(self, worker: Worker, plan: Characterisation) -> bool:
        since = datetime.now(UTC) - timedelta(days=plan.again_after_days)
        return any(
            stack.is_of(worker.fingerprint) and datetime.fromisoformat(stack.timed_at) > since
            for stack in self._store.kernels.newest(worker.device)
        )


def _stack(worker: Worker) -> _Stack:
    return worker.device, worker.fingerprint
