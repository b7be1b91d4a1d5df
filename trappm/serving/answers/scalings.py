"""Training steps on several GPUs.

One thread computes them. A model without profiles is traced first, in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from trappm.prediction.models.subjects import UnprofiledError, known_subject
from trappm.prediction.parallel.scaling import scaling, scaling_json
from trappm.prediction.question import Question
from trappm.serving.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trappm.learner.snapshots.snapshot import Snapshot
    from trappm.serving.answers.snapshots import LoadedSnapshots
    from trappm.serving.answers.tracing import Model, Tracers
    from trappm.serving.schemas import ScalingQuestion


class Scalings:
    """Multi-GPU predictions for one event loop."""

    def __init__(self, snapshots: LoadedSnapshots, tracers: Tracers, metrics: Metrics) -> None:
        self._snapshots = snapshots
        self._tracers = tracers
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trappm-scalings")

    async def answer(self, request: ScalingQuestion, model: Model, client: str) -> bytes:
        """Return the JSON of `trappm scale --json`.

        Args:
            request: the validated body.
            model: the model that it names.
            client: the caller's address.

        Raises:
            TrappmError: as `scaling`, and those of `tracing`.
        """
        loop = asyncio.get_running_loop()
        snapshots = await self._snapshots.named(request.snapshot)
        question = Question(**request.for_question(), snapshots=snapshots)
        devices = question.device_keys(None, request.devices)
        work = partial(_scaled, request, model, devices, snapshots)
        try:
            return await loop.run_in_executor(self._thread, work)
        except UnprofiledError:
            with self._metrics.trace():
                await self._tracers.trace(model, question.settings_traced(devices), client)
            return await loop.run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _scaled(
    request: ScalingQuestion, model: Model, devices: list[str], snapshots: Sequence[Snapshot]
) -> bytes:
    predictions, refusals = scaling(
        [known_subject(model.key)],
        devices,
        request.gpus,
        request.strategies,
        snapshots=snapshots,
        **request.for_question(),
    )
    return json.dumps(scaling_json(predictions, refusals), default=str).encode()
