"""Models that questions are about, and their traces.

A model is a timm or transformer name, an ONNX file, or a module. It is checked at once and traced
when its step is needed. Names and files that any process has traced before need neither timm nor
ONNX: the cache has their steps.

A file of unknown origin is traced in a fork of a warm process with limits of time and memory,
without this process's environment and in an empty folder. So is every model of a server. The result
is the bytes of a trace, or one line about what is wrong.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import inspect
import json
import os
import resource
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from trappm.profiler import errors
from trappm.profiler.errors import (
    InputError,
    ModelFileError,
    TraceTimeoutError,
    TrappmError,
    UnsupportedModelError,
    is_of_this_machine,
    one_line,
)
from trappm.profiler.extensions import extension_modules
from trappm.profiler.files import write_atomically
from trappm.profiler.host.environment import data_folder, library_versions
from trappm.profiler.host.forks import ForkServer, ForkServerError
from trappm.profiler.models.known_names import (
    content_of,
    is_file,
    is_hub_id,
    is_prefixed,
    refuse_length,
    refuse_unknown,
    refuse_weights,
    unit_of,
)
from trappm.profiler.models.model_input import TARGETS, ExampleInputs
from trappm.profiler.models.own_modules import with_version
from trappm.profiler.records import (
    MAX_SIZE,
    Execution,
    MemoryFormat,
    Phase,
    Precision,
    StepSettings,
)
from trappm.profiler.traced_step import (
    CONTENT,
    Refusal,
    Trace,
    TraceFolder,
    TraceKey,
    TraceSettings,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

TRACE_SECONDS = 120.0
"""Default limit of a trace: of a file, or of steps that run on values."""


class Subject(ABC):
    """The model that a question is about."""

    name: str
    batch_size: int | None = None
    """Batch size of a module's example; None if it is 1 by default."""
    input_size: int | None = None
    """Pixels or tokens of the question; None for the model's default."""
    sequence_length: int | None = None
    """Tokens of the question, of a file."""
    has_one_input: bool = True
    """False for modules of whole numbers, several inputs, targets or a loss."""
    is_named: bool = False
    """True for architectures by their name."""
    module: nn.Module | None = None
    """Module of the caller, if the model was given as one."""
    identity: object = None
    """Equal for the same model in any process; None for a module, whose content is unknown."""

    def pixels(self) -> int | None:
        """Return the size of its images in pixels; None if it takes text, or is not known."""
        return None

    def trace(
        self,
        settings: StepSettings,
        phase: Phase,
        batch_size: int | None = None,
        *,
        with_origins: bool = False,
    ) -> Trace:
        """Return a step in these settings; this object traces it once.

        Args:
            settings, phase: Settings and phase of the step.
            batch_size: The only one to trace at, if the step's sizes do not grow evenly.
            with_origins: Whether the origin of each tensor is needed.

        Raises:
            TrappmError: It cannot be traced.
        """
        how, size = TraceSettings.of(settings), batch_size or self.batch_size
        for batch in (None, size):
            if (trace := self._traces.get((how, phase, batch, with_origins))) is not None:
                return trace
        trace = self._trace(how, phase, size, with_origins)
        batch = None if trace.batch_size is None else size
        self._traces[how, phase, batch, with_origins] = trace
        return trace

    @cached_property
    def _traces(self) -> dict[tuple[TraceSettings, Phase, int | None, bool], Trace]:
        """Traces by settings, phase, only batch size or None, and whether they have origins."""
        return {}

    @abstractmethod
    def _trace(
        self, how: TraceSettings, phase: Phase, batch_size: int | None, with_origins: bool
    ) -> Trace:
        """Trace a step; arguments and errors as of `trace`."""


def subject_of(
    model: object,
    *,
    example_input: object = None,
    targets: object = None,
    loss: Callable[..., Tensor] | None = None,
    input_size: int | None = None,
    sequence_length: int | None = None,
    trace_seconds: float | None = None,
) -> Subject:
    """Return the subject of a question; the arguments are those of `trappm.predict`.

    Raises:
        InputError: It is not a model, or does not take these inputs.
        UnknownArchitectureError, ModelFileError: There is no such architecture or file.
    """
    check_size("input size", input_size)
    check_size("sequence length", sequence_length)
    limit_s = _limit_s(trace_seconds)
    if isinstance(model, str | Path):
        for name, value in (("example_input", example_input), ("targets", targets), ("loss", loss)):
            if value is not None:
                raise InputError(f"{name} is for modules; names and files know their input")
        if isinstance(model, Path) or is_file(model):
            if None not in (input_size, sequence_length):
                raise InputError(
                    f"{model} is a file; give an input size or a sequence length, not both"
                )
            path, is_tokens = Path(model), sequence_length is not None
            size = input_size or sequence_length
            key = file_key(digest_of(path), size, is_tokens=is_tokens)
            return _file(path, key, is_tokens, limit_s, data_folder())
        size = _size_of(model, input_size, sequence_length)
        refuse_unknown(model)
        model = with_version(model)
        if sequence_length is not None:
            refuse_length(model, sequence_length)
        return _architecture(ModelKey(model, size), data_folder())
    from torch import nn

    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {kind}"
        raise InputError(f"the model is {what}; give a timm name, an ONNX file or a module")
    _size_of(model, input_size, sequence_length)
    if example_input is None or input_size is not None:
        raise InputError(
            f"{type(model).__name__} is a module; give an example of its input and no input size, "
            "such as example_input=torch.empty(8, 3, 224, 224)"
        )
    return Module(model, example_input, targets, loss, limit_s)


def size_kind(model: object) -> str:
    """Return the unit of a model's input size: `tokens` for transformers by name, else `px`."""
    return unit_of(model) if isinstance(model, str) and is_prefixed(model) else "px"


def _size_of(model: object, input_size: int | None, sequence_length: int | None) -> int | None:
    """Return the size that is for such a model; raises InputError if the other one is given."""
    if size_kind(model) == "tokens":
        if input_size is not None:
            raise InputError(
                f"{model} takes tokens; give a sequence length, not the input size {input_size}"
            )
        return sequence_length
    if sequence_length is not None:
        raise InputError(
            f"{model if isinstance(model, str) else type(model).__name__} takes no tokens; give an "
            f"input size, not the sequence length {sequence_length}"
        )
    return input_size


def check_size(name: str, value: object) -> None:
    """Raise InputError if a value is neither None nor a size of a batch or an input."""
    if value is not None and not (type(value) is int and 1 <= value <= MAX_SIZE):
        raise InputError(f"{name} is {value!r}; it must be a whole number from 1 to {MAX_SIZE:,}")


def _limit_s(trace_seconds: float | None) -> float:
    """Return the limit of a trace; raises InputError if it is not a number of seconds to a day."""
    if trace_seconds is None:
        return TRACE_SECONDS
    if not isinstance(trace_seconds, int | float) or not 0 < trace_seconds <= 86_400:
        raise InputError(f"trace_seconds is {trace_seconds!r}; it must be above 0, up to 86400")
    return trace_seconds


def input_size_of(name: str, input_size: int | None) -> int:
    """Return the input size of a named model, which is its default unless one is given.

    Raises:
        InputError, UnknownArchitectureError: The model does not exist or has no such size.
    """
    return name_and_size(name, input_size)[1]


def name_and_size(name: str, input_size: int | None) -> tuple[str, int]:
    """Return a model's current name and input size, asked of its library unless it is noted.

    Raises:
        InputError, UnknownArchitectureError: The model does not exist or has no such size.
    """
    note = _note(name, input_size)
    with contextlib.suppress(OSError, ValueError, TypeError):
        current, size = json.loads(note.read_bytes())
        return str(current), int(size)
    from trappm.profiler.models.sources import source_of

    source = source_of(name)
    current = source.check(name)
    size = source.input_size_of(current, input_size)
    with contextlib.suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(note, replace=True) as part:
            part.write_text(json.dumps([current, size]))
    return current, size


def _note(name: str, input_size: int | None) -> Path:
    text = repr((library_versions(), content_of(name), input_size))
    return data_folder() / "names" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


class ModelKey(NamedTuple):
    """A named model or a file, the same for every process."""

    model: str
    """The name, or the content of the file."""
    input_size: int | None
    is_named: bool = True


def file_key(digest: str, input_size: int | None, *, is_tokens: bool = False) -> ModelKey:
    """Return the key of a file with this content."""
    unit = " tokens" if is_tokens else ""
    return ModelKey(f"{CONTENT}{digest}{unit}", input_size, is_named=False)


def digest_of(path: Path) -> str:
    """Return the hash of a file's bytes; this process reads an unchanged file once.

    Raises:
        ModelFileError: It cannot be read, or does not begin as ONNX files do.
        UnknownArchitectureError: It holds weights, not a model.
    """
    refuse_weights(str(path))
    try:
        status = path.stat()
        return _content_hash(path, status.st_size, status.st_mtime_ns, status.st_ino)
    except OSError as error:
        hub = f"; for a transformer of the Hub write hf:{path}" if is_hub_id(str(path)) else ""
        raise ModelFileError(f"{path} cannot be read: {error.strerror}{hub}") from error


_FIRST_BYTE = b"\x08"
"""First byte of an ONNX file: the tag of its version, which all exporters write first. The rest is
read in a confined process."""


@lru_cache(maxsize=4096)
def _content_hash(path: Path, _size: int, _modified_ns: int, _inode: int) -> str:
    with path.open("rb") as file:
        if file.read(1) != _FIRST_BYTE:
            _extension_of_files()
            raise ModelFileError(
                f"{path} is not an ONNX file, or is cut short; export the model again"
            )
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


class UntracedError(Exception):
    """This process does not trace models, and none has traced this step."""


def load_subject(key: ModelKey) -> Subject:
    """Return a model by its key, of steps that some process has traced; nothing is traced here.

    The subject's `trace` raises UntracedError for others.
    """
    return _load_subject(key, data_folder())


def trace_and_cache(
    key: ModelKey, tracer: StepTracer, settings: Iterable[StepSettings], phase: Phase
) -> None:
    """Trace a model's steps in these settings, so that `load_subject` has them.

    Raises:
        TrappmError: What is wrong with the model.
    """
    subject = _Cached(key, tracer)
    subject.pixels()
    for row in settings:
        subject.trace(row, phase)


class _Cached(Subject):
    """A model that is the same for every process, so its traces are cached."""

    def __init__(self, key: ModelKey, tracer: StepTracer | None) -> None:
        self.identity = content_of(key.model) if key.is_named else key.model, key.input_size
        self.name, self.is_named, self.input_size = key.model, key.is_named, key.input_size
        self._key, self._tracer = key, tracer
        self._cache = TraceFolder(data_folder() / "traces")

    @property
    def _name_and_size(self) -> tuple[str, int | None]:
        """Current name and size, or content and size; raises UntracedError as `trace`."""
        if not self.is_named:
            return self._key[:2]
        if self._tracer is None and not _note(*self._key[:2]).exists():
            raise UntracedError
        return name_and_size(*self._key[:2])

    def pixels(self) -> int | None:
        if self.sequence_length is not None or size_kind(self.name) == "tokens":
            return None
        return self._name_and_size[1]

    def _trace(
        self, how: TraceSettings, phase: Phase, batch_size: int | None, with_origins: bool
    ) -> Trace:
        if with_origins:
            return self._own_tracer.trace(how, phase, batch_size, with_origins)
        key = TraceKey(*self._name_and_size, how, phase)
        made = self._cache.get(key)
        if made is None:
            made = self._make(key)
            self._cache.put(key, made)
        if isinstance(made, Refusal):
            raise UnsupportedModelError(made.reason)
        return made

    def _make(self, key: TraceKey) -> Trace | Refusal:
        try:
            return self._own_tracer.trace(key.settings, key.phase, None, False)
        except UnsupportedModelError as error:
            return Refusal(str(error))

    @property
    def _own_tracer(self) -> StepTracer:
        if self._tracer is None:
            raise UntracedError
        return self._tracer


class Module(Subject):
    """A module of the caller; what is traced of it is kept as long as this object."""

    def __init__(
        self,
        module: nn.Module,
        example_input: object,
        targets: object = None,
        loss: Callable[..., Tensor] | None = None,
        limit_s: float = TRACE_SECONDS,
    ) -> None:
        """Read the inputs, as `trappm.predict` takes them; raises InputError if it does not."""
        from trappm.profiler.models.on_meta import EAGER, eager, is_compiled
        from trappm.profiler.tracing.time_limit import TimeLimit

        self.module: nn.Module = eager(module)
        self.name = type(self.module).__name__
        self.remark = EAGER if is_compiled(module) else None
        self._loss = loss
        self._limit = TimeLimit(self.name, limit_s, partial(_progress, self.name))
        args: tuple[object, ...] = (example_input,)
        kwargs: dict[str, object] = {}
        if isinstance(example_input, Mapping):
            args, kwargs = (), dict(example_input)
        elif isinstance(example_input, tuple | list):
            args = tuple(example_input)
        self._inputs = _example_inputs(self.module, args, kwargs, targets)
        is_one = len(args) == 1 and not kwargs and loss is None and targets is None
        dtype = getattr(args[0], "dtype", None) if is_one else None
        self.has_one_input = getattr(dtype, "is_floating_point", False)
        self.batch_size = self._inputs.batch_size

    def _trace(
        self, how: TraceSettings, phase: Phase, batch_size: int | None, with_origins: bool
    ) -> Trace:
        from trappm.profiler.trace import trace
        from trappm.profiler.tracing.losses import loss_of

        with self._limit.apply():
            made = trace(
                self.module,
                self._inputs,
                how,
                phase,
                loss=loss_of(self._loss, has_targets=TARGETS in self._inputs.kwargs),
                batch_size=batch_size,
                with_origins=with_origins,
            )
        remarks = filter(None, (self.remark, made.remark))
        return replace(made, remark=" ".join(remarks) or None)


def _progress(model: str) -> AbstractContextManager[object]:
    """Return the progress of a module that runs on the CPU."""
    from trappm.terminal.progress_bars import RunDisplay

    return RunDisplay(model)


def _example_inputs(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], targets: object
) -> ExampleInputs:
    """Return what `forward()` and the loss are called with.

    A last positional input that `forward()` does not accept becomes the targets. Optional `labels`,
    as of Transformers' models, are inputs of training only.

    Raises:
        InputError: `forward()` does not take these inputs; with a call that works.
    """
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # not of Python, such as a scripted module
        signature = inspect.signature(lambda *_, **__: None)
    if targets is not None and "targets" in signature.parameters:
        kwargs, targets = {**kwargs, "targets": targets}, None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        if targets is not None or len(args) < 2 or not _binds(signature, args[:-1], kwargs):
            needed = [
                name for name, p in signature.parameters.items()
                if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            ]  # fmt: skip
            raise InputError(
                f"{type(module).__name__}.forward() does not take these inputs: {error}; give "
                f"example_input=({', '.join(needed)}), and targets=labels for the loss"
            ) from error
        args, targets = args[:-1], args[-1]
    example = ExampleInputs.of(*args, **kwargs)
    labels = signature.parameters.get("labels")
    if labels is not None and labels.default is None:
        example = replace(example, of_training=example.of_training | {"labels"})
    if targets is None:
        return example
    return replace(example, kwargs={**example.kwargs, TARGETS: targets})


def _binds(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


# A subject depends on the data folder, which has its traces.


@lru_cache(maxsize=64)
def _architecture(key: ModelKey, _home: Path) -> Subject:
    return _Cached(key, NameTracer(*key[:2]))


def variant_of(name: str, input_size: int | None, content: str, tracer: StepTracer) -> Subject:
    """Return a named model that runs otherwise, such as with activation checkpoints.

    Args:
        name, input_size: The named model.
        content: Text that is equal for equal steps; traces are cached by it.
        tracer: Tracer of the variant's steps.
    """
    digest = hashlib.sha256(content.encode()).hexdigest()
    subject = _Cached(file_key(digest, input_size), tracer)
    subject.name = name
    return subject


@lru_cache(maxsize=64)
def _file(path: Path, key: ModelKey, is_tokens: bool, limit_s: float, _home: Path) -> Subject:
    inner = file_tracer(str(path), key.input_size, is_tokens)
    tracer = OutsideTracer(own_process(), inner, str(path), limit_s=limit_s)
    subject = _Cached(key, tracer)
    subject.sequence_length = key.input_size if is_tokens else None
    subject.name = str(path)
    subject.identity = (subject.identity, subject.name)
    return subject


@lru_cache(maxsize=256)
def _load_subject(key: ModelKey, _home: Path) -> Subject:
    return _Cached(key, None)


_FOR_TRACES = (
    "torch._dynamo",
    "trappm.prediction.models",
    "trappm.profiler.trace",
)
"""Modules that the warm process imports to trace, in addition to those of extensions."""
FOR_NAMES = ("trappm.profiler.models.zoo",)

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
    tracer: LocalTracer = _extension_of_files().FileTracer(path, input_size, is_tokens)
    return tracer


def _extension_of_files() -> ModuleType:
    """Return the extension that reads files; raises InputError if none is installed."""
    extension = next(iter(extension_modules("model_files")), None)
    if extension is None:
        raise InputError(
            "ONNX files need the extension trappm.extensions.onnx, which is not installed; "
            "install TraPPM again, or give a timm name such as resnet50"
        )
    return extension


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
        child = self._server.fork("trappm.prediction.models:trace_confined", message)
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
