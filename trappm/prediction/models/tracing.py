"""Tracing of models without a cached profile: here, or in a confined process.

A file of unknown origin is traced in a fork of a warm process with limits of time and memory,
without this process's environment and in an empty folder. So is every model that a server has no
profile of.
The result is bytes: a profile, a step, or one line about what is wrong.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from trappm.learner.heads.predictions import StepSettings
from trappm.prediction.models.profile_cache import profile_from_bytes, profile_to_bytes
from trappm.profiler import errors
from trappm.profiler.errors import BatchOrderError, ModelFileError, TrappmError, one_line
from trappm.profiler.files.array_archive import pack, unpack
from trappm.profiler.host.forks import ForkServer, ForkServerError
from trappm.profiler.records import MemoryFormat, Optimizer, Phase, Precision
from trappm.profiler.simulation.step_trace import TRACED_BATCH_SIZES, Origin, StepTrace

if TYPE_CHECKING:
    from torch import nn

    from trappm.profiler.models.model_input import Inputs
    from trappm.profiler.simulation.step_profile import StaticProfile, StepProfile
    from trappm.profiler.tracing.tracer import StepOptions

FOR_FILES = (
    "onnx", "torch._dynamo", "trappm.prediction.models.tracing",
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
_MAX_WRITTEN_BYTES = 1 << 20
_MAX_OPEN_FILES = 64
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


class TracedStep(NamedTuple):
    """Allocations of a step, and who makes them."""

    trace: StepTrace
    origins: Sequence[Origin]
    """Of each block of the trace."""
    only_batch: int | None
    """The only batch size that it holds for, if there is only one."""
    reason: str
    """Why there is only one."""

    def to_bytes(self) -> bytes:
        """Return the step as a compressed archive."""
        arrays = {name: np.asarray(getattr(self.trace, name)) for name in _ARRAYS}
        rest = json.dumps([self.origins, self.only_batch, self.reason]).encode()
        return pack({**arrays, "rest": np.frombuffer(rest, dtype=np.uint8)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the step that `to_bytes` wrote."""
        arrays = unpack(data)
        origins, only_batch, reason = json.loads(arrays.pop("rest").tobytes())
        sizes = arrays.pop("batch_sizes").tolist()
        trace = StepTrace(batch_sizes=tuple(sizes), **arrays)
        return cls(trace, [Origin(*origin) for origin in origins], only_batch, reason)


_ARRAYS = (
    "kinds", "blocks", "sizes", "gradients", "parameter_bytes", "buffer_bytes", "batch_sizes",
)  # fmt: skip


def traced_step(
    module: nn.Module,
    inputs: Inputs,
    options: StepOptions,
    phase: Phase,
    batch_size: int,
    only_because: str = "",
) -> TracedStep:
    """Trace a step for all batch sizes, or for a single one where it is no line over them.

    Args:
        module: On the meta device.
        inputs: What it is called with.
        options: How the step is run.
        phase: Training or inference.
        batch_size: The single one.
        only_because: Why no other one can be traced, if that is known.

    Raises:
        TrappmError: It cannot be traced at that batch size either.
    """
    from trappm.profiler.tracing.tracer import Tracer

    reason = only_because
    try:
        if not only_because:
            tracer = Tracer(module, inputs, options, with_origins=True)
            trace, _ = tracer.phase(phase)
            if tracer.is_affine(phase):
                return TracedStep(trace, tracer.origins[phase], None, "")
            reason = "some tensors grow faster than the batch, as where all samples are compared"
    except BatchOrderError:
        reason = "other operators run at every batch size, as where it loops over its samples"
    except TrappmError as error:
        reason = (
            f"at batch {TRACED_BATCH_SIZES[0]} {str(error).rstrip('.')}; if the loss has labels of "
            "a fixed batch, give them as targets=labels"
        )
    tracer = Tracer(module, inputs, options, (batch_size, batch_size), with_origins=True)
    trace, _ = tracer.phase(phase)
    return TracedStep(trace, tracer.origins[phase], batch_size, reason)


class Tracer(ABC):
    """Profiles one model."""

    @abstractmethod
    def profile(self) -> tuple[str, StaticProfile]:
        """Return the model's name and profile.

        Raises:
            TrappmError: The model cannot be read or traced.
        """

    @abstractmethod
    def step(self, settings: StepSettings, batch_size: int | None) -> StepProfile:
        """Trace the model's steps.

        Args:
            settings: Precision, memory format and optimizer.
            batch_size: The only batch size of a file that has one; else None.

        Raises:
            TrappmError: They cannot be traced.
        """

    @abstractmethod
    def traced_step(self, settings: StepSettings, phase: Phase, batch_size: int) -> TracedStep:
        """Trace one step with the origins of its tensors; raises TrappmError as `step` does."""


def step_options(settings: StepSettings) -> StepOptions:
    """Return how the tracer runs a step in these settings."""
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

        return step_profile(*self._named(), step_options(settings))

    def traced_step(self, settings: StepSettings, phase: Phase, batch_size: int) -> TracedStep:
        from trappm.profiler.models.on_meta import on_meta
        from trappm.profiler.models.sources import source_of

        name, input_size = self._named()
        module = on_meta(name, input_size, settings.memory_format, settings.precision)
        inputs = source_of(name).inputs(name, input_size)
        return traced_step(module, inputs, step_options(settings), phase, batch_size)

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
        return step_profile(module, sample, step_options(settings), batch_sizes)

    def traced_step(self, settings: StepSettings, phase: Phase, batch_size: int) -> TracedStep:
        from trappm.profiler.models.on_meta import on_meta
        from trappm.profiler.static_profile import rebuilt

        module, sample, only = rebuilt(Path(self.model), self.input_size)
        copied = on_meta(module, None, settings.memory_format, settings.precision)
        why = "the file has this one only; export it with a dynamic batch axis" if only else ""
        return traced_step(copied, sample, step_options(settings), phase, only or batch_size, why)


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
        return profile_from_bytes(self._look())

    def step(self, settings: StepSettings, batch_size: int | None) -> StepProfile:
        from trappm.profiler.simulation.step_profile import StepProfile

        return StepProfile.from_bytes(self._look(settings, batch_size))

    def traced_step(self, settings: StepSettings, phase: Phase, batch_size: int) -> TracedStep:
        return TracedStep.from_bytes(self._look(settings, batch_size, phase.value))

    def _look(
        self,
        settings: StepSettings | None = None,
        batch_size: int | None = None,
        phase: str | None = None,
    ) -> bytes:
        is_file = isinstance(self.inner, FileTracer)
        request = TracingRequest(
            model=os.path.abspath(self.inner.model) if is_file else self.inner.model,
            is_file=is_file,
            input_size=self.inner.input_size,
            settings=settings,
            batch_size=batch_size,
            phase=phase,
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
    """Settings of the steps; None to trace the profile."""
    batch_size: int | None = None
    """The only batch size of a file that has one; or that of the step of `phase`."""
    phase: str | None = None
    """Phase of one step with the origins of its tensors; None for the steps without."""

    def tracer(self) -> NameTracer | FileTracer:
        """Return the tracer for this process."""
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
        child = self._server.fork("trappm.prediction.models.tracing:trace_confined", message)
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


def trace_confined(message: Mapping[str, Any], send: Callable[[Mapping[str, Any]], None]) -> None:
    """Trace the model of a request in a confined process, and send the result."""
    import torch

    request, limits = TracingRequest(**message["request"]), TracingLimits(**message["limits"])
    confine(limits)
    torch.set_num_threads(1)
    try:
        result = _result(request)
    except TrappmError as error:
        send({"error": type(error).__name__, "message": str(error)})
    except MemoryError:
        needs = f"{request.model} needs more than {limits.memory_bytes >> 20:,} MiB"
        send({"error": "ModelFileError", "message": needs})
    except Exception as error:  # a file may hold anything
        unexpected = f"unexpected {type(error).__name__} ({one_line(error)})"
        reason = f"{request.model} cannot be read: {unexpected}; please report it"
        send({"error": "UnsupportedModelError", "message": reason})
    else:
        send({"result": base64.b64encode(result).decode()})


def confine(limits: TracingLimits) -> None:
    """Limit what this process uses: memory in addition to now, CPU time, files."""
    from trappm.profiler.host.procfs import memory_status_kib

    _limit(resource.RLIMIT_AS, (memory_status_kib()["VmSize"] << 10) + limits.memory_bytes)
    _limit(resource.RLIMIT_CPU, limits.cpu_s)
    _limit(resource.RLIMIT_FSIZE, _MAX_WRITTEN_BYTES)
    _limit(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES)
    _limit(resource.RLIMIT_CORE, 0)


def _result(request: TracingRequest) -> bytes:
    tracer = request.tracer()
    if request.settings is None:
        return profile_to_bytes(*tracer.profile())
    precision, memory_format, optimizer = request.settings  # JSON has plain strings
    settings = StepSettings(Precision(precision), MemoryFormat(memory_format), Optimizer(optimizer))
    if request.phase is not None:
        step = tracer.traced_step(settings, Phase(request.phase), request.batch_size or 1)
        return step.to_bytes()
    return tracer.step(settings, request.batch_size).to_bytes()


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
