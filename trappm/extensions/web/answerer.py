"""Predictions for the server's requests, with a cache, worker threads and the tracing process.

The key of a cached answer has everything it depends on: snapshots, model, device, settings and
prices. One thread evaluates heads. Another thread computes rooflines and multi-GPU steps, which
take longer. A model without traces is first traced in the sandboxed process (`tracing`).
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from trappm.extensions.web.gate import ServingSettings
from trappm.extensions.web.loaded_snapshots import LoadedSnapshots
from trappm.extensions.web.metrics import Metrics
from trappm.extensions.web.schemas import RooflineRequest, ScalingRequest
from trappm.extensions.web.uploads import ModelTracer, RequestedModel, SingleFlight
from trappm.prediction.answer import answer_questions
from trappm.prediction.cost import prices_version
from trappm.prediction.models import ModelKey, UntracedError, load_subject
from trappm.prediction.prediction import breakdown_dict
from trappm.prediction.question import Question
from trappm.prediction.requests import PredictionSettings, refuse_outside
from trappm.prediction.selection import Selection
from trappm.profiler.errors import InputError, TrappmError
from trappm.profiler.records import Phase

if TYPE_CHECKING:
    from trappm.prediction.prediction import Prediction
    from trappm.profiler.records import StepSettings
    from trappm.profiler.traced_step import Trace

MAX_KNOWN = 4096
"""Number of cached answers, about 10 kB each."""
MAX_STEPS = 64
"""Number of traced steps cached for memory breakdowns, up to some MB each."""
_AT_ONCE = 16
"""Number of devices per batch; other requests run between batches."""
Result = TypeVar("Result")


class Answer(NamedTuple):
    """A prediction and its JSON."""

    prediction: Prediction
    json: bytes


class Answerer:
    """Predictor with an answer cache for one event loop."""

    def __init__(self, settings: ServingSettings, metrics: Metrics) -> None:
        """Load the snapshots.

        Raises:
            SnapshotError: The snapshot does not exist or is damaged.
        """
        self.snapshots = LoadedSnapshots(settings.snapshot, metrics)
        self.metrics = metrics
        self._known: OrderedDict[tuple[object, ...], Answer] = OrderedDict()
        self._in_flight: SingleFlight[list[Answer]] = SingleFlight()
        self._steps: OrderedDict[tuple[object, ...], Trace] = OrderedDict()
        self._steps_in_flight: SingleFlight[Trace] = SingleFlight()
        self._heads_thread = ThreadPoolExecutor(1, thread_name_prefix="trappm-answers")
        self._kernels_thread = ThreadPoolExecutor(1, thread_name_prefix="trappm-kernels")
        self._tracer = ModelTracer(settings)

    async def predict(
        self, settings: PredictionSettings, models: Sequence[RequestedModel]
    ) -> list[Answer]:
        """Return the answers for each model and, within it, for each device.

        Raises:
            TrappmError: As `trappm.predict` and `tracing`.
        """
        snapshots = await self.snapshots.named(settings.snapshot)
        selection = Selection(Question(**settings.for_question()), snapshots)
        devices = selection.device_keys(settings.device, settings.devices)
        about = (
            tuple(snapshot.id for snapshot in snapshots),
            tuple(settings.for_question().values()),
            selection.device_is_default,
            prices_version() if settings.epochs is not None else None,
        )
        results: list[Answer] = []
        for model in models:
            own = await self._answers(about, selection, model, devices)
            if settings.breakdown_depth is not None:
                depth = settings.breakdown_depth
                own = [await self._with_breakdown(answer, model, depth) for answer in own]
            results += own
        return results

    async def unable_devices(self, settings: PredictionSettings) -> list[dict[str, str]]:
        """Return the GPUs that do not support the precision, each with the reason."""
        snapshots = await self.snapshots.named(settings.snapshot)
        unable = Selection(Question(**settings.for_question()), snapshots).unable_devices()
        return [{"device": key, "reason": reason} for key, reason in unable.items()]

    async def rooflines(self, request: RooflineRequest, model: RequestedModel) -> bytes:
        """Return the JSON of `trappm roofline --json`: a list with one entry per device.

        Raises:
            TrappmError: A device is unknown; and as `tracing`.
        """
        with _other_extension("roofline"):
            from trappm.extensions.roofline.report import rooflines_json
            from trappm.extensions.roofline.steps import (
                roofline_devices,
                roofline_steps,
                step_settings,
            )
        snapshots = await self.snapshots.named(request.snapshot)
        selection = Selection(Question(**request.for_question()), snapshots)
        devices = roofline_devices(selection, request.devices)

        def work() -> bytes:
            steps = roofline_steps(selection, load_subject(model.key), devices)
            return json.dumps(rooflines_json(steps), default=str).encode()

        settings = [step_settings(selection, devices)]
        return await self._traced(
            self._kernels_thread, model, settings, selection.question.phase, work
        )

    async def scalings(self, request: ScalingRequest, model: RequestedModel) -> bytes:
        """Return the JSON of `trappm scale --json`.

        Raises:
            TrappmError: As `scaling` and `tracing`.
        """
        with _other_extension("parallel"):
            from trappm.extensions.parallel.scaling import scaling, scaling_json
        snapshots = await self.snapshots.named(request.snapshot)
        selection = Selection(Question(**request.for_question()), snapshots)
        devices = selection.device_keys(None, request.devices)

        def work() -> bytes:
            predictions, refusals = scaling(
                [load_subject(model.key)],
                devices,
                request.gpus,
                request.strategies,
                snapshots=snapshots,
                **request.for_question(),
            )
            return json.dumps(scaling_json(predictions, refusals), default=str).encode()

        settings = selection.settings_traced(devices)
        return await self._traced(
            self._kernels_thread, model, settings, selection.question.phase, work
        )

    def close(self) -> None:
        """End the threads and the tracing process."""
        for thread in (self._heads_thread, self._kernels_thread):
            thread.shutdown(wait=False, cancel_futures=True)
        self._tracer.close()

    async def _answers(
        self,
        about: tuple[object, ...],
        selection: Selection,
        model: RequestedModel,
        devices: Sequence[str],
    ) -> list[Answer]:
        """Return the answers for one model; identical requests share one computation."""
        key = (*about, model.name, model.key)
        by_device = {device: self._known.get((*key, device)) for device in devices}
        missing = [device for device, answer in by_device.items() if answer is None]
        self.metrics.known.inc(len(by_device) - len(missing))
        for start in range(0, len(missing), _AT_ONCE):
            some = missing[start : start + _AT_ONCE]

            async def predicted(some: Sequence[str] = some) -> list[Answer]:
                def work() -> list[Answer]:
                    return _predict_on_devices(selection, model, some)

                settings = selection.settings_traced(devices)
                return await self._traced(
                    self._heads_thread, model, settings, selection.question.phase, work
                )

            made = await self._in_flight.wait((*key, *some), predicted)
            by_device |= zip(some, made, strict=True)
        for device, answer in by_device.items():
            assert answer is not None  # noqa: S101  (all have one by now)
            self._known[*key, device] = answer
            self._known.move_to_end((*key, device))
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return [answer for device in devices if (answer := by_device[device])]

    async def _with_breakdown(self, answer: Answer, model: RequestedModel, depth: int) -> Answer:
        """Return an answer with its memory breakdown; trace the step unless it is cached."""
        prediction = answer.prediction
        if prediction.memory_mib is None:
            return answer
        what = prediction.settings, Phase(prediction.phase), prediction.batch_size
        key = (model.key, *what)

        async def trace() -> Trace:
            with self.metrics.trace():
                return await self._tracer.trace_with_origins(model, *what)

        if key in self._steps:
            self.metrics.known.inc()
        else:
            self._steps[key] = await self._steps_in_flight.wait(key, trace)
        step = self._steps[key]
        while len(self._steps) > MAX_STEPS:
            self._steps.popitem(last=False)

        def broken_down() -> bytes:
            breakdown = breakdown_dict(prediction.break_down(step), depth)
            values = prediction.to_dict() | {"memory_breakdown": breakdown}
            return json.dumps(values, default=str).encode()

        return Answer(prediction, await asyncio.to_thread(broken_down))

    async def _traced(
        self,
        thread: ThreadPoolExecutor,
        model: RequestedModel,
        settings: Sequence[StepSettings],
        phase: Phase,
        work: Callable[[], Result],
    ) -> Result:
        """Run `work` in a thread, after a trace if the model's steps are unknown."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(thread, work)
        except UntracedError:
            with self.metrics.trace():
                await self._tracer.trace(model, settings, phase)
        try:
            return await loop.run_in_executor(thread, work)
        except UntracedError:
            raise TrappmError(
                "the model's traces could not be stored; make the folder traces of TRAPPM_HOME "
                "writable"
            ) from None


def named_model(name: str, input_size: int | None) -> RequestedModel:
    """Return the model with a timm name.

    Raises:
        InputError: The name looks like a path or names code; the server neither opens its own files
            nor imports modules.
    """
    refuse_outside(
        name, "upload the model as an ONNX file, the field 'file' of a form (multipart/form-data)"
    )
    return RequestedModel(name=name, key=ModelKey(name, input_size), input_size=input_size)


def _predict_on_devices(
    selection: Selection, model: RequestedModel, devices: Sequence[str]
) -> list[Answer]:
    subject = load_subject(model.key)
    results = []
    for prediction in answer_questions([(selection, subject, device) for device in devices]):
        named = prediction if model.path is None else replace(prediction, model=model.name)
        results.append(Answer(named, json.dumps(named.to_dict(), default=str).encode()))
    return results


@contextmanager
def _other_extension(name: str) -> Iterator[None]:
    """Convert an import error of an extension that is not installed into an InputError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(f"trappm.extensions.{name}"):
            raise
        raise InputError(f"the extension {name!r} is not installed on this server") from error
