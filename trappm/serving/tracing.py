"""Models that nobody has asked about before, looked at in processes of their own.

Reading a file and tracing a step takes seconds and, for a hostile file, might take for ever or all
memory. So it is done in a fork of a warm process, with limits, and ended when time is up. It leaves
its profiles in the cache of TRAPPM_HOME (`profile_cache`), where the server then finds them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trappm.learner.predictions import StepSettings
from trappm.profiler import errors
from trappm.profiler.errors import ModelFileError, TrappmError
from trappm.profiler.measuring.forks import ForkServer, ForkServerError
from trappm.profiler.records import MemoryFormat, Optimizer, Precision
from trappm.serving.problems import BusyError, ServingError, TimeoutExceededError

_PRELOAD = ("trappm.profiler.zoo", "onnx", "trappm.serving.tracing", "trappm.profiler.static")
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
        self._timeout_s, self._memory_mib = timeout_s, memory_mib
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="trappm-traces")
        self._all = [ForkServer(_PRELOAD) for _ in range(processes)]
        self._idle: queue.SimpleQueue[ForkServer] = queue.SimpleQueue()
        for server in self._all:
            self._idle.put(server)
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
        for server in self._all:
            with contextlib.suppress(OSError):  # its thread sees it end, too
                server.stop()

    def _trace(self, model: Model, settings: Sequence[StepSettings]) -> None:
        server = self._idle.get()
        try:
            server.start()  # its time is not the model's
            self._trace_with(server, model, settings)
        except ForkServerError as error:
            _log.error("a process that looks at models failed: %s", error)
            raise ServingError(
                f"{model.name} could not be looked at: the process for it failed; the server's log "
                "says why"
            ) from error
        finally:
            self._idle.put(server)

    def _trace_with(
        self, server: ForkServer, model: Model, settings: Sequence[StepSettings]
    ) -> None:
        request = {
            "model": model.name if model.path is None else str(model.path),
            "input_size": model.input_size,
            "settings": [list(row) for row in settings],
            "memory_mib": self._memory_mib,
            "cpu_s": int(self._timeout_s) + 1,
        }
        deadline = time.monotonic() + self._timeout_s
        told: Mapping[str, Any] = {}
        child = server.fork("trappm.serving.tracing:profile", request)
        try:
            for told in child.messages(lambda: deadline):  # noqa: B007  # the last one counts
                pass
        except TimeoutError:
            child.kill()
            raise TimeoutExceededError(
                f"looking at {model.name} took more than {self._timeout_s:g} s; it may be done "
                "with a larger --timeout, or here: trappm predict"
            ) from None
        finally:
            child.close()
        if "error" in told:
            kind = getattr(errors, str(told["error"]), TrappmError)
            message = str(told["message"])
            raise kind(
                message if model.path is None else message.replace(str(model.path), model.name)
            )
        if not told:
            raise ModelFileError(
                f"looking at {model.name} ended its process ({child.exit_code}): it may need more "
                f"than {self._memory_mib:,} MiB; try: trappm predict"
            )


def profile(request: Mapping[str, Any], send: Callable[[Mapping[str, Any]], None]) -> None:
    """Profiles what the request names, in a process of its own, and sends how that went."""
    import torch

    from trappm.profiler.measuring.procfs import memory_status_kib
    from trappm.subjects import subject_of

    limit = (memory_status_kib()["VmSize"] << 10) + (request["memory_mib"] << 20)
    for kind, most in ((resource.RLIMIT_AS, limit), (resource.RLIMIT_CPU, request["cpu_s"])):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(
            kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
        )
    torch.set_num_threads(1)
    try:
        subject = subject_of(request["model"], input_size=request["input_size"])
        for row in request["settings"]:
            precision, memory_format, optimizer = row
            subject.kernels(
                StepSettings(
                    Precision(precision), MemoryFormat(memory_format), Optimizer(optimizer)
                )
            )
    except TrappmError as error:
        send({"error": type(error).__name__, "message": str(error)})
    except MemoryError:
        send({"error": "ModelFileError", "message": f"{request['model']} needs too much memory"})
    else:
        send({"done": True})
