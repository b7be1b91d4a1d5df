"""Models without profiles are traced in a sandboxed process (`prediction.models.tracing`).

One model is traced at a time. Its profiles go into the cache of TRAPPM_HOME (`profile_cache`),
where the server then finds them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from trappm.extensions.web.problems import BusyError, ServingError, TimeoutExceededError
from trappm.extensions.web.settings import ServingSettings
from trappm.learner.heads.predictions import StepSettings
from trappm.prediction.models.subjects import traced
from trappm.prediction.models.tracing import (
    FOR_FILES,
    FOR_NAMES,
    FileTracer,
    NameTracer,
    OutsideTracer,
    TracedStep,
    TracingProcess,
    TracingTimeoutError,
)
from trappm.profiler.host.forks import ForkServerError
from trappm.profiler.records import Phase

_ADVICE = "; it may be done with a larger --timeout, or here: trappm predict"
_log = logging.getLogger("trappm.web")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Model:
    """The model of a question, as a caller named it or sent it."""

    name: str
    """A timm name, or what the caller calls the file."""
    key: tuple[object, ...]
    """Under which its profiles are kept."""
    input_size: int | None
    upload: Any = None
    """Whoever holds it keeps the uploaded file in place."""
    path: Path | None = None
    """Of the uploaded file."""


class Shared(Generic[Result]):
    """Work in progress by its key: equal requests wait for one piece of work."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[Result]] = {}

    async def wait(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Return the result of `work`, started now unless it is in progress already."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(work())
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)

    def _forget(self, key: Hashable, task: asyncio.Task[Result]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # retrieved, because all callers may have left


class Tracer:
    """One sandboxed tracing process, started when it is first needed; for one event loop."""

    def __init__(self, settings: ServingSettings) -> None:
        self._timeout_s = settings.timeout_s
        self._max_waiting = settings.max_waiting
        self._waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trappm-traces")
        self._process = TracingProcess(
            (*FOR_FILES, *FOR_NAMES),
            timeout_s=settings.timeout_s,
            memory_mib=settings.trace_memory_mib,
            advice=_ADVICE,
        )
        self._at_work: Shared[None] = Shared()

    async def trace(self, model: Model, settings: Sequence[StepSettings]) -> None:
        """Trace a model and its kernels in these settings; equal requests share one trace.

        Raises:
            BusyError: Too many models wait already.
            TimeoutExceededError: It took too long, and was ended.
            TrappmError: What is wrong with the model.
        """
        rows = tuple(settings)

        def work(until_s: float) -> None:
            traced(model.key, self._outside(model, until_s), rows)

        await self._at_work.wait((model.key, rows), lambda: self._queued(model.name, work))

    async def traced_step(
        self, model: Model, settings: StepSettings, phase: Phase, batch_size: int
    ) -> TracedStep:
        """Trace one step with the origins of its tensors; raises as `trace` does."""

        def work(until_s: float) -> TracedStep:
            return self._outside(model, until_s).traced_step(settings, phase, batch_size)

        return await self._queued(model.name, work)

    def _outside(self, model: Model, until_s: float) -> OutsideTracer:
        inner = (
            NameTracer(model.name, model.input_size)
            if model.path is None
            else FileTracer(str(model.path), model.input_size)
        )
        return OutsideTracer(self._process, inner, model.name, until_s)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(OSError):  # its thread sees it end, too
            self._process.stop()

    async def _queued(self, name: str, work: Callable[[float], Result]) -> Result:
        if self._waiting > self._max_waiting:  # one of them is being traced
            raise BusyError(f"{self._waiting} models wait to be traced; retry in a minute")
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._worked, name, work)
        finally:
            self._waiting -= 1

    def _worked(self, name: str, work: Callable[[float], Result]) -> Result:
        try:
            self._process.start()  # before the clock starts: its time is not the model's
            return work(time.monotonic() + self._timeout_s)
        except TracingTimeoutError as error:
            raise TimeoutExceededError(str(error)) from None
        except ForkServerError as error:
            _log.error("the tracing process failed: %s", error)
            raise ServingError(
                f"{name} could not be traced: the tracing process failed; see the server's log"
            ) from error
