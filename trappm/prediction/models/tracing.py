"""Traces models that have no profiles yet: here, or in a process of their own.

A file of unknown origin is traced in a fork of a warm process that can be ended, with limits of
time and memory, without this process's environment and in an empty folder; so is every model that a
server has no profiles of. The result is bytes: profiles, or one line about what is wrong.
"""

from __future__ import annotations

import base64
import os
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.learner.heads.predictions import StepSettings
from trappm.prediction.models.profile_cache import profile_from_bytes
from trappm.prediction.models.traced_step import traced_step
from trappm.profiler import errors
from trappm.profiler.errors import ModelFileError, TrappmError
from trappm.profiler.host.forks import ForkServer, ForkServerError
from trappm.profiler.records import Phase

if TYPE_CHECKING:
    from trappm.profiler.simulation.step_profile import StaticProfile, StepProfile
    from trappm.profiler.tracing.tracer import StepOptions

FOR_FILES = (
    "onnx", "torch._dynamo", "trappm.prediction.models.tracing_child",
    "trappm.profiler.static_profile", "trappm.profiler.onnx_files.module",
    "trappm.profiler.simulation.step_profile",
)  # fmt: skip
"""Imported by the warm process, since tracing a file needs them."""
FOR_NAMES = ("trappm.profiler.models.zoo",)

TIMEOUT_S = 120.0
MEMORY_MIB = 2048
_FILE_MEMORY_MIB = 1024
"""Of a file, at most: it has shapes only, while a model of timm has its weights."""
_COPIES = 3
"""Of a file's bytes that reading it may make, beside the memory above."""
_ENVIRONMENT = (
    "HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TRAPPM_HOME", "VIRTUAL_ENV",
)  # fmt: skip


class TracingTimeoutError(ModelFileError):
    """Tracing a model took longer than it may, and was ended."""


class Deadline:
    """Until when a caller waits for a trace; the caller may leave sooner."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ended = False
        self.start()

    def start(self) -> None:
        """Starts the clock."""
        self._until = time.monotonic() + self._seconds

    def end(self) -> None:
        self._ended = True

    @property
    def at_s(self) -> float:
        """In seconds of `time.monotonic`."""
        return 0.0 if self._ended else self._until


class Tracer(ABC):
    """Profiles one model."""

    @abstractmethod
    def profile(self) -> tuple[str, StaticProfile]:
        """The model's name and profile.

        Raises:
            TrappmError: what is wrong with it.
        """

    @abstractmethod
    def step(self, settings: StepSettings, batch_size: int | None) -> StepProfile:
        """The model's steps in these settings; the batch size is that of a file with a single one.

        Raises:
            TrappmError: why they cannot be traced.
        """


def _options(settings: StepSettings) -> StepOptions:
    from trappm.profiler.tracing.tracer import StepOptions

    return StepOptions(precision=settings.precision, memory_format=settings.memory_format)


@dataclass(frozen=True)
class NameTracer(Tracer):
    """Of an architecture by its name, in this process."""

    model: str
    input_size: int | None

    def profile(self) -> tuple[str, StaticProfile]:
        from trappm.profiler.static_profile import static_profile

        name, input_size = self._named()
        return name, static_profile(name, input_size)

    def step(self, settings: StepSettings, batch_size: int | None) -> StepProfile:
        from trappm.profiler.static_profile import step_profile

        return step_profile(*self._named(), _options(settings))

    def _named(self) -> tuple[str, int]:
        """The architecture's current name, and the size of its input."""
        from trappm.profiler.models.sources import source_of

        source = source_of(self.model)
        name = source.check(self.model)
        return name, source.input_size_of(name, self.input_size)


@dataclass(frozen=True)
class FileTracer(Tracer):
    """Of an ONNX file, in this process: for files that can be trusted."""

    model: str
    input_size: int | None

    def profile(self) -> tuple[str, StaticProfile]:
        from trappm.profiler.static_profile import file_profile

        return Path(self.model).name, file_profile(Path(self.model), self.input_size)

    def step(self, settings: StepSettings, batch_size: int | None) -> StepProfile:
        from trappm.profiler.simulation.step_trace import TRACED_BATCH_SIZES
        from trappm.profiler.static_profile import rebuilt, step_profile

        module, sample, _ = rebuilt(Path(self.model), self.input_size)
        batch_sizes = (batch_size, batch_size) if batch_size else TRACED_BATCH_SIZES
        return step_profile(module, sample, _options(settings), batch_sizes)

    def step_with_origins(self, settings: StepSettings, batch_size: int, phase: Phase) -> bytes:
        """Trace one step with the origins of its tensors; in bytes.

        Raises:
            TrappmError: It cannot be traced.
        """
        from trappm.profiler.models.on_meta import on_meta
        from trappm.profiler.static_profile import rebuilt

        module, sample, only = rebuilt(Path(self.model), self.input_size)
        copied = on_meta(module, None, settings.memory_format, settings.precision)
        why = "the file has this one only; export it with a dynamic batch axis" if only else ""
        step = traced_step(copied, sample, _options(settings), phase, only or batch_size, why)
        return step.to_bytes()


@dataclass(frozen=True)
class OutsideTracer(Tracer):
    """Does in a process of its own what another tracer would do here."""

    process: TracingProcess
    inner: NameTracer | FileTracer
    name: str
    """For messages."""
    deadline: Deadline | None = None
    """For all traces together; else each has its own."""

    def profile(self) -> tuple[str, StaticProfile]:
        return profile_from_bytes(self._look(settings=None))

    def step(self, settings: StepSettings, batch_size: int | None) -> StepProfile:
        from trappm.profiler.simulation.step_profile import StepProfile

        return StepProfile.from_bytes(self._look(settings, batch_size))

    def _look(self, settings: StepSettings | None, batch_size: int | None = None) -> bytes:
        is_file = isinstance(self.inner, FileTracer)
        request = TracingRequest(
            model=os.path.abspath(self.inner.model) if is_file else self.inner.model,
            is_file=is_file,
            input_size=self.inner.input_size,
            settings=settings,
            batch_size=batch_size,
        )
        return self.process.look(request, self.name, self.deadline)


@dataclass(frozen=True)
class TracingRequest:
    """What a tracing process is to trace; JSON can hold all of it."""

    model: str
    """An architecture's name, or the absolute path of a file."""
    is_file: bool
    input_size: int | None
    settings: StepSettings | None = None
    """Those of the steps that are wanted; None where the profile is."""
    batch_size: int | None = None
    """That of a file that has but one, for its steps; or that of the step of `phase`."""
    phase: str | None = None
    """Of the step that is wanted with the origins of its tensors, of a file."""
    estimate: Mapping[str, Any] | None = None
    """Fields of an `EstimateRequest`, whose answer is wanted instead of profiles."""

    def tracer(self) -> NameTracer | FileTracer:
        """The tracer that does what is requested in this process."""
        return (FileTracer if self.is_file else NameTracer)(self.model, self.input_size)


@dataclass(frozen=True)
class TracingLimits:
    """What a tracing process may use beside what it has when it begins."""

    memory_bytes: int
    cpu_s: int


class TracingProcess:
    """A warm process to fork from, started when first needed; it traces one model at a time."""

    def __init__(
        self,
        preload: Sequence[str] = FOR_FILES,
        *,
        timeout_s: float = TIMEOUT_S,
        memory_mib: int = MEMORY_MIB,
        advice: str = "",
    ) -> None:
        """With `advice`: what to do about a model that takes too long."""
        self._timeout_s = timeout_s
        self._memory_mib = memory_mib
        self._advice = advice
        self._folder = tempfile.TemporaryDirectory(prefix="trappm-tracing-")
        kept = {k: v for k, v in os.environ.items() if k in _ENVIRONMENT}
        kept |= {k: v for k, v in os.environ.items() if k.startswith(("LC_", "PYTHON"))}
        self._server = ForkServer(preload, environment=kept, folder=self._folder.name)
        self._turn = threading.Lock()

    def start(self) -> None:
        """Raises ForkServerError: it cannot be started."""
        self._server.start()

    def stop(self) -> None:
        """Ends it with its current trace. May be called again; the next trace starts it anew."""
        self._server.stop()

    def abandon(self, deadline: Deadline) -> None:
        """Ends the trace that has this deadline, whichever thread waits for it."""
        deadline.end()
        self._server.interrupt()

    def look(self, request: TracingRequest, name: str, deadline: Deadline | None) -> bytes:
        """The result of a trace in a fork.

        Raises:
            TracingTimeoutError: it took too long, and was ended.
            ModelFileError: it needed more memory than it may have, or ended its process.
            TrappmError: what is wrong with the model.
            ForkServerError: the process to fork from failed.
        """
        with self._turn:
            self._server.begin()
            import torch  # noqa: F401  # meanwhile: the answer will need it

            self._server.start()
            until = deadline or Deadline(self._timeout_s)
            try:
                return self._look(request, name, until)
            except ForkServerError:
                self._server.stop()  # its next message would not be about the next model
                raise
            except TrappmError:
                raise
            except BaseException:  # the caller has left
                self._server.stop()
                raise

    def _limits(self, request: TracingRequest) -> TracingLimits:
        size, mib = 0, self._memory_mib
        if request.is_file:
            size, mib = os.stat(request.model).st_size, min(mib, _FILE_MEMORY_MIB)
        return TracingLimits((mib << 20) + _COPIES * size, int(self._timeout_s) + 1)

    def _look(self, request: TracingRequest, name: str, until: Deadline) -> bytes:
        reply: Mapping[str, Any] = {}
        limits = self._limits(request)
        message = {"request": asdict(request), "limits": asdict(limits)}
        child = self._server.fork("trappm.prediction.models.tracing_child:look", message)
        try:
            for reply in child.messages(lambda: until.at_s):  # noqa: B007  # the last one counts
                pass
        except TimeoutError:
            child.kill()
            raise TracingTimeoutError(
                f"looking at {name} took more than {self._timeout_s:g} s, and was ended"
                + self._advice
            ) from None
        finally:
            child.close()
        if "error" in reply:
            kind = getattr(errors, str(reply["error"]), TrappmError)
            raise kind(str(reply["message"]).replace(request.model, name))
        if "result" not in reply:
            raise ModelFileError(
                f"looking at {name} ended its process ({child.exit_code}): it needs more than "
                f"{limits.memory_bytes >> 20:,} MiB, or breaks a library"
            )
        return base64.b64decode(reply["result"])


_OWN: dict[int, TracingProcess] = {}
_OWN_LOCK = threading.Lock()


def own_process() -> TracingProcess:
    """The tracing process of this process; a fork of it has another."""
    with _OWN_LOCK:
        pid = os.getpid()
        if pid not in _OWN:
            _OWN[pid] = TracingProcess()
        return _OWN[pid]
