"""Models that nobody has asked about before, looked at in processes of their own (`tracing`).

So many at once, and so many that wait. What is found out goes into the cache of TRAPPM_HOME
(`profile_cache`), where the server then finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trappm.learner.predictions import StepSettings
from trappm.profiler.measuring.forks import ForkServerError
from trappm.serving.problems import BusyError, ServingError, TimeoutExceededError
from trappm.subjects import traced
from trappm.tracing import (
    FOR_FILES,
    FOR_NAMES,
    FileTracer,
    NameTracer,
    OutsideTracer,
    TracingProcess,
    TracingTimeoutError,
)

_ADVICE = "; it may be done with a larger --timeout, or here: trappm predict"
_log = logging.getLogger("trappm.serving")
MAX_WAITING = 16
"""Traces that wait for a process; more are told to come back."""


@dataclass(frozen=True)
class Model:
    """What a question is about, as a caller named it or sent it."""

    name: str
    """A timm name, or what the caller calls the file."""
    key: tuple[object, ...]
    """Under which its profiles are kept."""
    input_size: int | None
    upload: Any = None
    """Whoever holds it keeps the uploaded file in place."""
    path: Path | None = None
    """Of the uploaded file."""


class Tracers:
    """So many processes, each started when it is first needed."""

    def __init__(self, processes: int, timeout_s: float, memory_mib: int) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="trappm-traces")
        self._all = [
            TracingProcess(
                (*FOR_FILES, *FOR_NAMES),
                timeout_s=timeout_s,
                memory_mib=memory_mib,
                advice=_ADVICE,
            )
            for _ in range(processes)
        ]
        self._idle: queue.SimpleQueue[TracingProcess] = queue.SimpleQueue()
        for process in self._all:
            self._idle.put(process)
        self._at_work: dict[object, asyncio.Future[None]] = {}

    async def trace(self, model: Model, settings: Sequence[StepSettings]) -> None:
        """Profiles the model, and its kernels in these settings; who asks for the same joins in.

        Raises:
            BusyError: too many others wait already.
            TimeoutExceededError: it took too long, and was ended.
            TrappmError: what was found wrong with it.
        """
        key = model.key, tuple(settings)
        running = self._at_work.get(key)
        if running is None:
            if len(self._at_work) >= len(self._all) + MAX_WAITING:
                raise BusyError(
                    f"{len(self._at_work)} models wait to be looked at for the first time; "
                    "ask again in a minute"
                )
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._threads, self._trace, model, tuple(settings))
            running.add_done_callback(lambda _: self._at_work.pop(key, None))
            running.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._at_work[key] = running
        await asyncio.shield(running)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            with contextlib.suppress(OSError):  # its thread sees it end, too
                process.stop()

    def _trace(self, model: Model, settings: Sequence[StepSettings]) -> None:
        process = self._idle.get()
        try:
            process.start()  # its time is not the model's
            inner = (
                NameTracer(model.name, model.input_size)
                if model.path is None
                else FileTracer(str(model.path), model.input_size)
            )
            deadline = time.monotonic() + self._timeout_s
            traced(model.key, OutsideTracer(process, inner, model.name, deadline), settings)
        except TracingTimeoutError as error:
            raise TimeoutExceededError(str(error)) from None
        except ForkServerError as error:
            _log.error("a process that looks at models failed: %s", error)
            raise ServingError(
                f"{model.name} could not be looked at: the process for it failed; the server's log "
                "says why"
            ) from error
        finally:
            self._idle.put(process)
