"""Models without profiles are traced in processes of their own (`prediction.models.tracing`).

Few run at once, and the others wait their turn, client by client (`turns`). The profiles go into
the cache of TRAPPM_HOME (`profile_cache`), where the server then finds them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trappm.learner.heads.predictions import StepSettings
from trappm.prediction.estimate import EstimateRequest
from trappm.prediction.models.subjects import traced
from trappm.prediction.models.tracing import (
    FOR_FILES,
    FOR_NAMES,
    Deadline,
    FileTracer,
    NameTracer,
    OutsideTracer,
    TracingProcess,
    TracingTimeoutError,
)
from trappm.profiler.host.forks import ForkServerError
from trappm.serving.answers.turns import Result, Shared, Turns
from trappm.serving.problems import ServingError, TimeoutExceededError

_ADVICE = "; it may be done with a larger --timeout, or here: trappm predict"
_log = logging.getLogger("trappm.serving")
_Work = Callable[[TracingProcess, Deadline], Result]
"""What is done with a process, until a deadline."""
MAX_WAITING = 64
"""Traces that wait for a process; more are refused for now."""
MAX_OF_CLIENT = 16
"""Of them, one client's."""


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


class Tracers:
    """Tracing processes, each started when it is first needed; belongs to one event loop."""

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
        self._idle = list(self._all)
        self._turns = Turns(processes, MAX_WAITING, MAX_OF_CLIENT)
        self._at_work: Shared[None] = Shared()

    async def trace(self, model: Model, settings: Sequence[StepSettings], client: str) -> None:
        """Profiles the model, and its kernels in these settings; equal requests share one trace.

        It ends with the last one who waits for it.

        Raises:
            BusyError: too many others wait already.
            TimeoutExceededError: it took too long, and was ended.
            TrappmError: what was found wrong with it.
        """
        rows = tuple(settings)
        inner = (
            NameTracer(model.name, model.input_size)
            if model.path is None
            else FileTracer(str(model.path), model.input_size)
        )

        def work(process: TracingProcess, deadline: Deadline) -> None:
            traced(model.key, OutsideTracer(process, inner, model.name, deadline), rows)

        await self._at_work.wait((model.key, rows), lambda: self._in_turn(model.name, work, client))

    async def estimate(self, request: EstimateRequest, client: str) -> bytes:
        """The answer to a request, as JSON; raises as `trace` does."""

        def work(process: TracingProcess, deadline: Deadline) -> bytes:
            return request.answered_by(process, deadline)

        return await self._in_turn(request.model, work, client)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            with contextlib.suppress(OSError):  # its thread sees it end, too
                process.stop()

    async def _in_turn(self, name: str, work: _Work[Result], client: str) -> Result:
        async with self._turns.turn(client):
            process, deadline = self._idle.pop(), Deadline(self._timeout_s)
            loop = asyncio.get_running_loop()
            looking = loop.run_in_executor(
                self._threads, self._worked, process, deadline, name, work
            )
            try:
                return await asyncio.shield(looking)
            except asyncio.CancelledError:
                process.abandon(deadline)
                await asyncio.wait([looking])  # so that no other model gets a busy process
                raise
            finally:
                self._idle.append(process)

    @staticmethod
    def _worked(
        process: TracingProcess, deadline: Deadline, name: str, work: _Work[Result]
    ) -> Result:
        try:
            process.start()  # its time is not the model's
            deadline.start()
            return work(process, deadline)
        except TracingTimeoutError as error:
            raise TimeoutExceededError(str(error)) from None
        except ForkServerError as error:
            _log.error("a process that looks at models failed: %s", error)
            raise ServingError(
                f"{name} could not be looked at: the process for it failed; the server's log "
                "says why"
            ) from error
