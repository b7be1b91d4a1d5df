"""Rooflines: ceilings of devices from the label store, and the kernels of a model under them.

One thread works them out, since a device that is known by its kernels alone is fitted anew. A model
without profiles is traced first, in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from trappm.label_store import store_or_none_yet
from trappm.prediction.models.subjects import UnprofiledError, known_subject
from trappm.prediction.question import Question
from trappm.roofline.report import devices_json
from trappm.roofline.roofs import KnownDevice, known_device
from trappm.roofline.steps import roofed_steps, step_settings
from trappm.serving.metrics import Metrics
from trappm.store import Home

if TYPE_CHECKING:
    from trappm.serving.answers.snapshots import LoadedSnapshots
    from trappm.serving.answers.tracing import Model, Tracers
    from trappm.serving.schemas import RooflineQuestion


class Rooflines:
    """Answers requests; belongs to one event loop."""

    def __init__(self, snapshots: LoadedSnapshots, tracers: Tracers, metrics: Metrics) -> None:
        self._snapshots = snapshots
        self._tracers = tracers
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trappm-rooflines")

    async def answer(self, request: RooflineQuestion, model: Model | None, client: str) -> bytes:
        """The answer as JSON: a list, a device each; `client` is the caller's address.

        Raises:
            TrappmError: nothing is known of a device, and those of `tracing`.
        """
        loop = asyncio.get_running_loop()
        devices = await loop.run_in_executor(self._thread, _devices, request.devices)
        if model is None:
            return json.dumps(devices_json(devices, ()), default=str).encode()
        snapshots = await self._snapshots.named(request.snapshot)
        question = Question(**request.for_question(), snapshots=snapshots)
        work = partial(_worked, question, model, devices)
        try:
            return await loop.run_in_executor(self._thread, work)
        except UnprofiledError:
            with self._metrics.trace():
                settings = step_settings(question, devices)
                await self._tracers.trace(model, [settings], client)
            return await loop.run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _devices(names: tuple[str, ...]) -> list[KnownDevice]:
    with store_or_none_yet(Home.find()) as store:
        return [known_device(store, name) for name in names]


def _worked(question: Question, model: Model, devices: list[KnownDevice]) -> bytes:
    steps = roofed_steps(question, known_subject(model.key), devices)
    return json.dumps(devices_json(devices, steps), default=str).encode()
