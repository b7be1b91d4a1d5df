"""Which workers belong to a campaign: they come and go.

What that means for the campaign comes out as events, in order; whoever asks hands them on one by
one, since each may change what the next one finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from trappm.cluster.scheduler.messages import Event, Joined, Lost, Settled, Worker
from trappm.cluster.workers.canary_gate import CanaryGate
from trappm.cluster.workers.interfaces import Workers
from trappm.cluster.workers.kernel_gate import KernelGate
from trappm.profiler.errors import CampaignError
from trappm.profiler.host.environment import stack_fingerprint
from trappm.store import AssignmentState, Store


class CanaryStopError(CampaignError):
    """The canary stopped the last worker of a device that is still needed."""


class Membership:
    """The workers of one campaign.

    Args:
        store: of the campaign.
        campaign_id: of the campaign.
        protocol: the name of the one that it measures by.
        workers: provides the workers.
        canaries: forget who is gone, as do
        kernels: of the devices.
        is_over: whether nothing more is to begin; then no labels are taken over any more.
        on_taken: called with a device, and how many of its assignments have labels from earlier
            campaigns.
    """

    def __init__(
        self,
        store: Store,
        campaign_id: str,
        protocol: str,
        workers: Workers,
        canaries: CanaryGate,
        kernels: KernelGate,
        is_over: Callable[[], bool],
        on_taken: Callable[[str, int], None],
    ) -> None:
        self._store = store
        self._id = campaign_id
        self._protocol = protocol
        self._workers = workers
        self._canary_gate = canaries
        self._kernel_gate = kernels
        self._is_over = is_over
        self._on_taken = on_taken
        self._known: dict[str, Worker] = {}
        self._adopted: set[tuple[str, str]] = set()
        """Devices and stacks whose earlier labels have been taken over."""

    @property
    def by_device(self) -> Counter[str]:
        """How many workers there are."""
        return Counter(worker.device for worker in self._known.values())

    def follow(self) -> Iterator[Event]:
        """Workers that have come or gone since the last call."""
        there = {worker.name: worker for worker in self._workers.joined()}
        for worker in list(self._known.values()):
            if there.get(worker.name) != worker:
                self.forget(worker)
                yield Lost(worker, "it left the cluster")
        for worker in there.values():
            if worker.name not in self._known:
                self._known[worker.name] = worker
                yield from self._adopt(worker)
                yield Joined(worker)

    def forget(self, worker: Worker) -> None:
        """It is gone, whatever the reason."""
        self._known.pop(worker.name, None)
        self._canary_gate.forget(worker)
        self._kernel_gate.forget(worker)

    def taken_over(self, device: str) -> list[str]:
        """Assignments, just planned, that have labels of earlier campaigns on the stacks here."""
        stacks = [fingerprint for known, fingerprint in self._adopted if known == device]
        return [x for fingerprint in stacks for x in self._take_over(device, fingerprint)]

    def require(self, missing: set[str]) -> None:
        """Nothing goes on, as these devices have no worker: fine only if some may still come.

        Raises:
            CanaryStopError: the canary stopped the last one.
            CampaignError: none will come.
        """
        lost = sorted(missing - set(self._workers.awaited()))
        stopped = [f"{w.device}: {why}" for w, why in self._canary_gate.stopped.items()
                   if w.device in lost]  # fmt: skip
        if stopped:
            raise CanaryStopError(
                f"the canary stopped the last worker of {'; '.join(stopped)}; see what became of "
                "its host (other programs, clocks, cooling); go on, beginning with a fresh canary, "
                f"with: trappm campaign resume {self._id}"
            )
        if lost:
            raise CampaignError(
                f"no worker is left for device {', '.join(lost)}; start a node with it "
                f"and go on with: trappm campaign resume {self._id}"
            )

    def _adopt(self, worker: Worker) -> Iterator[Event]:
        """What was measured before, on the same device and stack, is not measured again."""
        stack = worker.device, worker.fingerprint
        if stack not in self._adopted and not self._is_over():
            yield Settled(self._take_over(*stack))
            self._adopted.add(stack)

    def _take_over(self, device: str, fingerprint: str) -> list[str]:
        """The assignments that have their labels from earlier campaigns now."""
        before = self._open(device)
        # How memory is counted belongs to a stack, but shows only once something is measured.
        stacks = {fingerprint}
        for known, environment in self._store.measurements.device_environments(device).items():
            if stack_fingerprint({**environment, "memory_method": None}) == fingerprint:
                stacks.add(known)
        for stack in sorted(stacks):
            self._store.assignments.adopt_labels(self._id, device, stack, self._protocol)
        taken = sorted(before - self._open(device))
        if taken:
            self._on_taken(device, len(taken))
        return taken

    def _open(self, device: str) -> set[str]:
        return {
            a.id
            for a in self._store.assignments.of_campaign(
                self._id, device=device, state=AssignmentState.OPEN
            )
        }
