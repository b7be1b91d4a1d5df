"""Tracing of models that no process has traced: here, or in a confined process.

A file of unknown origin is traced in a fork of a warm process with limits of time and memory,
without this process's environment and in an empty folder. So is every model of a server. The result
is the bytes of a trace, or one line about what is wrong.
"""

from __future__ import annotations

import base64
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from itertools import chain
from typing import Any, ClassVar, Protocol

from trappm.profiler import errors
from trappm.profiler.errors import (
    InputError,
    ModelFileError,
    TraceTimeoutError,
    TrappmError,
    is_of_this_machine,
    one_line,
)
from trappm.profiler.extensions import extension_modules
from trappm.profiler.host.forks import ForkServer, ForkServerError
from trappm.profiler.records import Execution, MemoryFormat, Phase, Precision
from trappm.profiler.traced_step import Trace, TraceSettings

_FOR_TRACES = (
    "torch._dynamo",
    "trappm.prediction.models.tracers",
    "trappm.profiler.trace",
)
"""Modules that the warm process imports to trace, in addition to those of extensions."""
FOR_NAMES = ("trappm.profiler.models.zoo",)

TRACE_SECONDS = 120.0
"""Default limit of a trace: of a file, or of steps that run on values."""
MEMORY_MIB = 2048
_FILE_MEMORY_MIB = 1024
"""Upper bound for a file: it has shapes only, while a model of timm has its weights."""
_COPIES = 3
"""Copies of a file's bytes that reading it may make, in addition to the memory above."""
_MAX_WRITTEN_BYTES = 1 << 20
_MAX_OPEN_FILES = 64
_ENVIRONMENT = (
    "HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "TIMM_FUSED_ATTN", "TMPDIR", "TRAPPM_HOME",
    "VIRTUAL_ENV",
)  # fmt: skip


class TracingTimeoutError(ModelFileError, TraceTimeoutError):
    """A trace in another process took too long and was ended."""


class StepTracer(Protocol):
    """Traces the steps of one model."""

    def trace(
        self, settings: TraceSettings, phase: Phase, batch_size: int | None, with_origins: bool
    ) -> Trace:
        """Return a step; the arguments and errors are those of `profiler.trace.trace`."""


@dataclass(frozen=True)
class LocalTracer(StepTracer):
    """Tracer in this process; a confined process is sent its class and its fields."""

    model: str
    input_size: int | None
    is_file: ClassVar[bool] = False
    """True if the model is the path of a file."""


@dataclass(frozen=True)
class NameTracer(LocalTracer):
    """Tracer of an architecture by its name, in this process."""

    def trace(
        self, settings: TraceSettings, phase: Phase, batch_size: int | None, with_origins: bool
    ) -> Trace:
        from trappm.profiler.models.sources import source_of
        from trappm.profiler.trace import trace

        size = source_of(self.model).input_size_of(self.model, self.input_size)
        return trace(
            self.model, size, settings, phase, batch_size=batch_size, with_origins=with_origins
        )


def file_tracer(path: str, input_size: int | None, is_tokens: bool = False) -> LocalTracer:
    """Return the tracer of an ONNX file, for files that can be trusted; an extension has it.

    Args:
        path, input_size: The file, and the size of its open axes except the batch.
        is_tokens: True if the input size is a number of tokens.

    Raises:
        InputError: No installed extension reads files.
    """
    extension = next(iter(extension_modules("model_files")), None)
    if extension is None:
        raise InputError(
            "ONNX files need the extension trappm.extensions.onnx, which is not installed; "
            "install TraPPM again, or give a timm name such as resnet50"
        )
    tracer: LocalTracer = extension.FileTracer(path, input_size, is_tokens)
    return tracer


@dataclass(frozen=True)
class OutsideTracer:
    """Tracer that has another tracer run in a confined process."""

    process: TracingProcess
    inner: LocalTracer
    name: str
    """Name of the model in messages."""
    until_s: float | None = None
    """Deadline of all traces, by `time.monotonic`; None for one of its own per trace."""
    limit_s: float | None = None
    """Limit of each trace in seconds; None for that of the process."""

    def trace(
        self, settings: TraceSettings, phase: Phase, batch_size: int | None, with_origins: bool
    ) -> Trace:
        data = self.process.trace(self, settings, phase, batch_size, with_origins)
        return Trace.from_bytes(data)


class TracingProcess:
    """A warm process to fork from, started when first needed; it traces one model at a time."""

    def __init__(
        self,
        preload: Sequence[str] = (),
        *,
        timeout_s: float = TRACE_SECONDS,
        memory_mib: int = MEMORY_MIB,
        advice: str = "",
    ) -> None:
        """Prepare the process.

        Args:
            preload: Modules to import before the first trace, in addition to those for files.
            timeout_s, memory_mib: Limits of a trace.
            advice: End of the error message about a timeout.
        """
        self._timeout_s = timeout_s
        self._memory_mib = memory_mib
        self._advice = advice
        self._folder = tempfile.TemporaryDirectory(prefix="trappm-tracing-")
        kept = {k: v for k, v in os.environ.items() if k in _ENVIRONMENT}
        kept |= {k: v for k, v in os.environ.items() if k.startswith(("LC_", "PYTHON"))}
        for_files = (extension.PRELOAD for extension in extension_modules("model_files"))
        modules = (*chain.from_iterable(for_files), *_FOR_TRACES, *preload)
        self._server = ForkServer(modules, environment=kept, folder=self._folder.name)
        self._turn = threading.Lock()

    def start(self) -> None:
        """Start the process; raises ForkServerError if it cannot be started."""
        self._server.start()

    def stop(self) -> None:
        """End the process with its current trace; the next trace starts it again."""
        self._server.stop()

    def trace(self, outside: OutsideTracer, *arguments: object) -> bytes:
        """Run an inner tracer in a fork, and return its trace as bytes.

        Args:
            outside: The inner tracer, with the model's name and the deadline.
            arguments: Arguments of `StepTracer.trace`.

        Raises:
            TracingTimeoutError: It took too long, and was ended.
            ModelFileError: It needed more memory than it may have, or its process crashed.
            TrappmError: What is wrong with the model.
            ForkServerError: The process to fork from failed.
        """
        with self._turn:
            self._server.begin()
            import torch  # noqa: F401  # in parallel: the prediction will need it

            self._server.start()
            try:
                return self._trace(outside, arguments)
            except BaseException as error:
                if isinstance(error, ForkServerError) or not isinstance(error, TrappmError):
                    self._server.stop()  # its next message would not be about the next model
                raise

    def _trace(self, outside: OutsideTracer, arguments: Sequence[object]) -> bytes:
        tracer, name = outside.inner, outside.name
        limit_s = outside.limit_s or self._timeout_s
        until_s = outside.until_s or time.monotonic() + limit_s
        memory_bytes = self._memory_mib << 20
        if tracer.is_file:
            tracer = replace(tracer, model=os.path.abspath(tracer.model))
            memory_bytes = min(memory_bytes, _FILE_MEMORY_MIB << 20)
            memory_bytes += _COPIES * os.stat(tracer.model).st_size
        message = {
            "kind": f"{type(tracer).__module__}:{type(tracer).__name__}",
            "tracer": asdict(tracer),
            "arguments": arguments,
            "memory_bytes": memory_bytes,
            "cpu_s": int(limit_s) + 1,
        }
        reply: Mapping[str, Any] = {}
        child = self._server.fork("trappm.prediction.models.tracers:trace_confined", message)
        try:
            for reply in child.messages(lambda: until_s):  # noqa: B007  # the last one counts
                pass
        except TimeoutError:
            child.kill()
            raise TracingTimeoutError(
                f"looking at {name} took more than {limit_s:g} s, and was ended" + self._advice
            ) from None
        finally:
            child.close()
        if "error" in reply:
            kind = getattr(errors, str(reply["error"]), TrappmError)
            raise kind(str(reply["message"]).replace(tracer.model, name))
        if "result" not in reply:
            raise ModelFileError(
                f"looking at {name} ended its process ({child.exit_code}): it needs more than "
                f"{memory_bytes >> 20:,} MiB, or breaks a library"
            )
        return base64.b64decode(reply["result"])


_OWN: dict[int, TracingProcess] = {}
_OWN_LOCK = threading.Lock()


def own_process() -> TracingProcess:
    """Return the tracing process of this process; a fork of it has another."""
    with _OWN_LOCK:
        pid = os.getpid()
        if pid not in _OWN:
            _OWN[pid] = TracingProcess(advice="; give it longer with --trace-seconds")
        return _OWN[pid]


def trace_confined(message: Mapping[str, Any], send: Callable[[Mapping[str, Any]], None]) -> None:
    """Run a tracer in a confined process, and send the trace."""
    import torch

    confine(message["memory_bytes"], message["cpu_s"])
    torch.set_num_threads(1)
    model = message["tracer"]["model"]
    try:
        result = _result(message)
    except TrappmError as error:
        send({"error": type(error).__name__, "message": str(error)})
    except MemoryError:
        needs = f"{model} needs more than {message['memory_bytes'] >> 20:,} MiB"
        send({"error": "ModelFileError", "message": needs})
    except Exception as error:  # a file may hold anything
        if is_of_this_machine(error):
            reason = f"{model} was not traced, try again: {one_line(error)}"
            send({"error": "TrappmError", "message": reason})
            return
        unexpected = f"unexpected {type(error).__name__} ({one_line(error)})"
        reason = f"{model} cannot be read: {unexpected}; please report it"
        send({"error": "UnsupportedModelError", "message": reason})
    else:
        send({"result": base64.b64encode(result).decode()})


def confine(memory_bytes: int, cpu_s: int) -> None:
    """Limit what this process uses: memory in addition to now, CPU time, files."""
    from trappm.profiler.host.procfs import memory_status_kib

    for kind, most in (
        (resource.RLIMIT_AS, (memory_status_kib()["VmSize"] << 10) + memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, _MAX_WRITTEN_BYTES),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(
            kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
        )


def _result(message: Mapping[str, Any]) -> bytes:
    module, _, kind = message["kind"].partition(":")
    tracer: LocalTracer = getattr(import_module(module), kind)(**message["tracer"])
    (precision, layout, execution, fused), phase, batch_size, with_origins = message["arguments"]
    settings = TraceSettings(
        Precision(precision), MemoryFormat(layout), Execution(execution), fused
    )
    return tracer.trace(settings, Phase(phase), batch_size, with_origins).to_bytes()
