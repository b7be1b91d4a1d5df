"""From questions to answers: snapshots, remembered answers, the thread and the processes.

An answer is remembered with all that it depends on: snapshots, model, device, settings, prices.
What is not remembered goes to the thread that evaluates heads (`batching`), and a model without
profiles first to a process of its own (`tracing`).
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from trappm.extensions.web.batching import Batcher
from trappm.extensions.web.loaded_snapshots import LoadedSnapshots
from trappm.extensions.web.metrics import Metrics
from trappm.extensions.web.schemas import Settings
from trappm.extensions.web.settings import ServingSettings
from trappm.extensions.web.traced_answers import TracedAnswers
from trappm.extensions.web.tracing import Model, Shared, Tracer
from trappm.prediction.answering import answers
from trappm.prediction.costs import prices_version
from trappm.prediction.models.subjects import UnprofiledError, known_subject, name_key
from trappm.prediction.prediction import breakdown_dict
from trappm.prediction.question import Question
from trappm.profiler.errors import InputError, TrappmError
from trappm.profiler.records import Phase

if TYPE_CHECKING:
    from trappm.learner.heads.predictions import StepSettings
    from trappm.prediction.models.tracing import TracedStep
    from trappm.prediction.prediction import Prediction

MAX_KNOWN = 4096
"""Answers that are remembered, about 10 kB each."""
MAX_STEPS = 64
"""Traced steps that are cached for memory breakdowns, up to some MB each."""
MAX_BATCH = 32
_AT_ONCE = 16
"""Predictions of one request under way, so that others get a turn in between."""


@dataclass(frozen=True)
class _Job:
    """One prediction to make."""

    question: Question
    model: Model
    device: str


class Answer(NamedTuple):
    """A prediction, and how it is written."""

    prediction: Prediction
    json: bytes


class Answerer:
    """Answers questions from snapshots, with a memory; belongs to one event loop."""

    def __init__(self, settings: ServingSettings, metrics: Metrics) -> None:
        """Raises SnapshotError: there is no such snapshot, or it is damaged."""
        self._snapshot = settings.snapshot
        self.snapshots = LoadedSnapshots(settings.snapshot, metrics)
        self.metrics = metrics
        self._known: OrderedDict[tuple[object, ...], Answer] = OrderedDict()
        self._under_way: Shared[Answer] = Shared()
        self._steps: OrderedDict[tuple[object, ...], TracedStep] = OrderedDict()
        self._steps_under_way: Shared[TracedStep] = Shared()
        self._batcher: Batcher[_Job, Answer] = Batcher(self._work, MAX_BATCH)
        self._tracer = Tracer(settings)
        self.traced = TracedAnswers(self.snapshots, self._tracer, metrics)

    async def predict(self, settings: Settings, models: Sequence[Model]) -> list[Answer]:
        """Return the answers for all devices of the first model, then those of the next.

        Raises:
            TrappmError: as `trappm.predict`, and those of `tracing`.
        """
        snapshots = await self.snapshots.named(settings.snapshot)
        question = Question(**settings.for_question(), snapshots=snapshots)
        devices = question.device_keys(settings.device, settings.devices)
        traced = question.settings_traced(devices)
        about = (
            tuple(snapshot.id for snapshot in snapshots),
            tuple(settings.for_question().values()),
            question.device_is_default,
        )
        prices = prices_version() if settings.epochs is not None else None
        jobs = [_Job(question, model, device) for model in models for device in devices]
        answers: list[Answer] = []
        for start in range(0, len(jobs), _AT_ONCE):
            together = jobs[start : start + _AT_ONCE]
            if len(together) == 1:
                answers.append(await self._answer((*about, prices), together[0], traced))
            else:
                answers += await asyncio.gather(
                    *(self._answer((*about, prices), job, traced) for job in together)
                )
        if settings.breakdown_depth is None:
            return answers
        return [
            await self._with_breakdown(answer, job.model, settings.breakdown_depth)
            for answer, job in zip(answers, jobs, strict=True)
        ]

    async def unable_devices(self, settings: Settings) -> list[dict[str, str]]:
        """Return the GPUs that cannot run the precision, each with the reason."""
        snapshots = await self.snapshots.named(settings.snapshot)
        unable = Question(**settings.for_question(), snapshots=snapshots).unable_devices()
        return [{"device": key, "reason": reason} for key, reason in unable.items()]

    async def _with_breakdown(self, answer: Answer, model: Model, depth: int) -> Answer:
        """Return an answer with its memory breakdown; the step is traced unless it is cached."""
        prediction = answer.prediction
        if prediction.memory_mib is None:
            return answer
        what = prediction.settings, Phase(prediction.phase), prediction.batch_size
        key = (model.key, *what)

        async def trace() -> TracedStep:
            with self.metrics.trace():
                return await self._tracer.traced_step(model, *what)

        if key in self._steps:
            self.metrics.known.inc()
        else:
            self._steps[key] = await self._steps_under_way.wait(key, trace)
        step = self._steps[key]
        while len(self._steps) > MAX_STEPS:
            self._steps.popitem(last=False)

        def broken_down() -> bytes:
            breakdown = breakdown_dict(prediction.break_down(step), depth)
            values = prediction.to_dict() | {"memory_breakdown": breakdown}
            return json.dumps(values, default=str).encode()

        return Answer(prediction, await asyncio.to_thread(broken_down))

    def close(self) -> None:
        self._batcher.close()
        self.traced.close()
        self._tracer.close()

    async def _answer(
        self, about: tuple[object, ...], job: _Job, traced: Sequence[StepSettings]
    ) -> Answer:
        key = (*about, job.model.name, job.model.key, job.device)
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            self.metrics.known.inc()
            return known
        return await self._under_way.wait(key, lambda: self._find(key, job, traced))

    async def _find(
        self, key: tuple[object, ...], job: _Job, traced: Sequence[StepSettings]
    ) -> Answer:
        try:
            answer = await self._batcher.submit(job)
        except UnprofiledError:
            with self.metrics.trace():
                await self._tracer.trace(job.model, traced)
            try:
                answer = await self._batcher.submit(job)
            except UnprofiledError:
                raise TrappmError(
                    "the model's profiles could not be kept; make the folder "
                    "profiles of TRAPPM_HOME writable"
                ) from None
        self._known[key] = answer
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return answer

    def _work(self, jobs: Sequence[_Job]) -> list[Answer | Exception]:
        """All together; if that fails, one by one, so that each gets its own error."""
        self.metrics.batch_size.observe(len(jobs))
        try:
            return list(_answers(jobs))
        except Exception as error:
            if len(jobs) == 1:
                return [error]
        return [result for job in jobs for result in self._alone(job)]

    @staticmethod
    def _alone(job: _Job) -> list[Answer | Exception]:
        try:
            return list(_answers([job]))
        except Exception as error:
            return [error]


def named_model(name: str, input_size: int | None) -> Model:
    """The model of a timm name.

    Raises:
        InputError: it looks like a path: the server opens no files of its own for callers.
    """
    if "/" in name or "\\" in name or name.endswith((".onnx", ".json")) or ".json," in name:
        raise InputError(
            f"{name!r} is no timm name, and this server reads no files by path; upload the file as "
            "the field 'file' of a form (multipart/form-data)"
        )
    return Model(name=name, key=name_key(name, input_size), input_size=input_size)


def _answers(jobs: Sequence[_Job]) -> Iterable[Answer]:
    asks = [(job.question, known_subject(job.model.key), job.device) for job in jobs]
    for job, prediction in zip(jobs, answers(asks), strict=True):
        named = prediction if job.model.path is None else replace(prediction, model=job.model.name)
        yield Answer(named, json.dumps(named.to_dict(), default=str).encode())
