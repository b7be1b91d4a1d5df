"""Estimates of memory: each is traced in a process of its own, and remembered.

Nothing is learned here, so an answer depends on its request only, on no snapshot.
"""

from __future__ import annotations

from collections import OrderedDict

from trappm.prediction.estimate import EstimateRequest
from trappm.serving.answers.tracing import Tracers
from trappm.serving.answers.turns import Shared
from trappm.serving.metrics import Metrics

MAX_KNOWN = 256
"""Estimates that are remembered, 5 to 100 kB each."""


class Estimates:
    """Answers requests, with a memory; belongs to one event loop."""

    def __init__(self, tracers: Tracers, metrics: Metrics) -> None:
        self._tracers = tracers
        self._metrics = metrics
        self._known: OrderedDict[EstimateRequest, bytes] = OrderedDict()
        self._under_way: Shared[bytes] = Shared()

    async def answer(self, request: EstimateRequest, client: str) -> bytes:
        """The answer as JSON; `client` is the caller's address.

        Raises:
            TrappmError: as `trappm.estimate`, and those of `tracing`.
        """
        known = self._known.get(request)
        if known is not None:
            self._known.move_to_end(request)
            self._metrics.known.inc()
            return known
        return await self._under_way.wait(request, lambda: self._trace(request, client))

    async def _trace(self, request: EstimateRequest, client: str) -> bytes:
        with self._metrics.trace():
            answer = self._known[request] = await self._tracers.estimate(request, client)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return answer
