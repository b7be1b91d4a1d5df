"""Uploaded files, and traces of models in a sandboxed process (`prediction.models`).

The process traces one model at a time, and keeps its traces in the cache of TRAPPM_HOME
(`traced_step`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Coroutine, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from trappm.extensions.web.gate import ServingSettings
from trappm.extensions.web.problems import ServingError
from trappm.prediction.models import (
    FOR_NAMES,
    ModelKey,
    NameTracer,
    OutsideTracer,
    TracingProcess,
    TracingTimeoutError,
    file_key,
    file_tracer,
    trace_and_cache,
)
from trappm.profiler.errors import ModelFileError
from trappm.profiler.host.forks import ForkServerError
from trappm.profiler.records import Phase, StepSettings
from trappm.profiler.traced_step import Trace, TraceSettings

_ADVICE = "; increase --timeout, or run trappm predict"
_CHUNK_BYTES = 1 << 20
_MAX_NAME = 128
_log = logging.getLogger("trappm.web")
Result = TypeVar("Result")


@dataclass(frozen=True)
class RequestedModel:
    """A named or uploaded model of a question."""

    name: str
    """Timm name, or file name of the upload."""
    key: ModelKey
    """Key of its traces."""
    input_size: int | None
    upload: Upload | None = None
    """Uploaded file."""

    @property
    def path(self) -> Path | None:
        return None if self.upload is None else self.upload.path


class Upload:
    """Copy of an uploaded file in its own folder, deleted with the last reference."""

    def __init__(self, source: BinaryIO, max_bytes: int) -> None:
        """Copy the file.

        Raises:
            ModelFileError: The file is empty.
            ServingError: The file is larger than `max_bytes`.
        """
        folder = tempfile.mkdtemp(prefix="trappm-upload-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = Path(folder) / "model.onnx"
        digest, size = hashlib.sha256(), 0
        with self.path.open("wb") as file:
            while chunk := source.read(_CHUNK_BYTES):
                size += len(chunk)
                if size > max_bytes:
                    raise ServingError(413, f"the file exceeds {max_bytes:,} bytes")
                digest.update(chunk)
                file.write(chunk)
        if size == 0:
            raise ModelFileError("the uploaded file is empty; send an ONNX file")
        self.digest = digest.hexdigest()

    def model(self, name: str | None, input_size: int | None) -> RequestedModel:
        """Return the model, named after the caller's file without folders and unsafe characters."""
        last = re.split(r"[/\\]", name or "")[-1]
        shown = re.sub(r"[^\w .+@()-]", "_", last)[:_MAX_NAME] or "model.onnx"
        return RequestedModel(shown, file_key(self.digest, input_size), input_size, upload=self)


class SingleFlight(Generic[Result]):
    """Computations in progress by key, shared by identical requests."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[Result]] = {}

    async def wait(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Return the result of `work`, which is started unless it is in progress."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(work())
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)

    def _forget(self, key: Hashable, task: asyncio.Task[Result]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # retrieved, because all callers may have disconnected


class ModelTracer:
    """Sandboxed tracing process for one event loop, started on first use."""

    def __init__(self, settings: ServingSettings) -> None:
        self._timeout_s = settings.timeout_s
        self._max_waiting = settings.max_waiting
        self._waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trappm-traces")
        self._process = TracingProcess(
            FOR_NAMES,
            timeout_s=settings.timeout_s,
            memory_mib=settings.trace_memory_mib,
            advice=_ADVICE,
        )
        self._in_flight: SingleFlight[None] = SingleFlight()

    async def trace(
        self, model: RequestedModel, settings: Sequence[StepSettings], phase: Phase
    ) -> None:
        """Trace a model's steps in these settings; identical requests share one trace.

        Raises:
            ServingError: Too many models are waiting, or the trace timed out.
            TrappmError: The model cannot be traced.
        """
        rows = tuple(settings)

        def work(until_s: float) -> None:
            trace_and_cache(model.key, self._outside_tracer(model, until_s), rows, phase)

        await self._in_flight.wait(
            (model.key, rows, phase), lambda: self._run_in_thread(model.name, work)
        )

    async def trace_with_origins(
        self, model: RequestedModel, settings: StepSettings, phase: Phase, batch_size: int
    ) -> Trace:
        """Trace one step with the origins of its tensors; raises as `trace`."""

        def work(until_s: float) -> Trace:
            how = TraceSettings.of(settings)
            return self._outside_tracer(model, until_s).trace(how, phase, batch_size, True)

        return await self._run_in_thread(model.name, work)

    def _outside_tracer(self, model: RequestedModel, until_s: float) -> OutsideTracer:
        inner = (
            NameTracer(model.name, model.input_size)
            if model.path is None
            else file_tracer(str(model.path), model.input_size)
        )
        return OutsideTracer(self._process, inner, model.name, until_s)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(OSError):  # the thread may have noticed the end first
            self._process.stop()

    async def _run_in_thread(self, name: str, work: Callable[[float], Result]) -> Result:
        if self._waiting > self._max_waiting:  # one of them is being traced
            raise ServingError(503, f"{self._waiting} models wait for a trace; retry in a minute")
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._run_job, name, work)
        finally:
            self._waiting -= 1

    def _run_job(self, name: str, work: Callable[[float], Result]) -> Result:
        try:
            self._process.start()  # before the clock starts, to exclude the start of the process
            return work(time.monotonic() + self._timeout_s)
        except TracingTimeoutError as error:
            raise ServingError(504, str(error)) from None
        except ForkServerError as error:
            _log.error("the tracing process failed: %s", error)
            reason = f"{name} could not be traced: the tracing process failed; see the server's log"
            raise ServingError(503, reason) from error
