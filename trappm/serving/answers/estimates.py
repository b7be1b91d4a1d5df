"""Estimates of memory: each is traced in a process of its own and cached per snapshot."""

from __future__ import annotations

from collections import OrderedDict

from trappm.prediction.estimate import EstimateRequest
from trappm.serving.answers.tracing import Tracers
from trappm.serving.answers.turns import Shared
from trappm.serving.metrics import Metrics

_Key = tuple[EstimateRequest, tuple[str, ...]]
MAX_KNOWN = 256
"""Estimates that are remembered, 5 to 100 kB each."""


class Estimates:
    """Answers requests, with a memory; belongs to one event loop."""

    def __init__(self, tracers: Tracers, metrics: Metrics) -> None:
        self._tracers = tracers
        self._metrics = metrics
        self._known: OrderedDict[_Key, bytes] = OrderedDict()
        self._under_way: Shared[bytes] = Shared()

    async def answer(
        self, request: EstimateRequest, snapshots: tuple[str, ...], client: str
    ) -> bytes:
        """Return the answer as JSON.

        Args:
            request: The question.
            snapshots: Ids of the snapshots in force.
            client: Address of the caller.

        Raises:
            TrappmError: as `trappm.estimate`, and those of `tracing`.
        """
        key = request, snapshots
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            self._metrics.known.inc()
            return known
        return await self._under_way.wait(key, lambda: self._trace(key, client))

    async def _trace(self, key: _Key, client: str) -> bytes:
        with self._metrics.trace():
            answer = self._known[key] = await self._tracers.estimate(key[0], client)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return answer
