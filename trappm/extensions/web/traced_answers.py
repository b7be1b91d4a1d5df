"""Answers about kernels and several GPUs, which need more of a model than its heads do.

One thread computes them, since a device that is characterised by its kernels alone is fitted again.
A model without profiles is traced first, in the sandboxed process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from trappm.extensions.web.metrics import Metrics
from trappm.label_store import store_or_none_yet
from trappm.prediction.models.subjects import UnprofiledError, known_subject
from trappm.prediction.parallel.scaling import scaling, scaling_json
from trappm.prediction.question import Question
from trappm.store import Home

if TYPE_CHECKING:
    from trappm.extensions.roofline.roofs import KnownDevice
    from trappm.extensions.web.loaded_snapshots import LoadedSnapshots
    from trappm.extensions.web.schemas import RooflineQuestion, ScalingQuestion
    from trappm.extensions.web.tracing import Model, Tracer
    from trappm.learner.heads.predictions import StepSettings


class TracedAnswers:
    """Rooflines and multi-GPU steps for one event loop."""

    def __init__(self, snapshots: LoadedSnapshots, tracer: Tracer, metrics: Metrics) -> None:
        self._snapshots = snapshots
        self._tracer = tracer
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trappm-kernels")

    async def rooflines(self, request: RooflineQuestion, model: Model | None) -> bytes:
        """Return the JSON of `trappm roofline --json`: a list with one entry per device.

        Raises:
            TrappmError: A device is unknown; and those of `tracing`.
        """
        from trappm.extensions.roofline.report import devices_json  # another extension
        from trappm.extensions.roofline.steps import roofed_steps, step_settings

        loop = asyncio.get_running_loop()
        devices = await loop.run_in_executor(self._thread, _known_devices, request.devices)
        if model is None:
            return json.dumps(devices_json(devices, ()), default=str).encode()
        snapshots = await self._snapshots.named(request.snapshot)
        question = Question(**request.for_question(), snapshots=snapshots)

        def work() -> bytes:
            steps = roofed_steps(question, known_subject(model.key), devices)
            return json.dumps(devices_json(devices, steps), default=str).encode()

        return await self._traced(model, [step_settings(question, devices)], work)

    async def scalings(self, request: ScalingQuestion, model: Model) -> bytes:
        """Return the JSON of `trappm scale --json`.

        Raises:
            TrappmError: As `scaling`, and those of `tracing`.
        """
        snapshots = await self._snapshots.named(request.snapshot)
        question = Question(**request.for_question(), snapshots=snapshots)
        devices = question.device_keys(None, request.devices)

        def work() -> bytes:
            predictions, refusals = scaling(
                [known_subject(model.key)],
                devices,
                request.gpus,
                request.strategies,
                snapshots=snapshots,
                **request.for_question(),
            )
            return json.dumps(scaling_json(predictions, refusals), default=str).encode()

        return await self._traced(model, question.settings_traced(devices), work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _traced(
        self, model: Model, settings: Sequence[StepSettings], work: Callable[[], bytes]
    ) -> bytes:
        """Return the result of `work` in the thread, after a trace where the model has none."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, work)
        except UnprofiledError:
            with self._metrics.trace():
                await self._tracer.trace(model, settings)
            return await loop.run_in_executor(self._thread, work)


def _known_devices(names: Sequence[str]) -> list[KnownDevice]:
    from trappm.extensions.roofline.roofs import known_device

    with store_or_none_yet(Home.find()) as store:
        return [known_device(store, name) for name in names]
