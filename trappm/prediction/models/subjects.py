"""Models that questions are about: a timm or transformer name, an ONNX file, or a module.

A subject is checked at once and traced when its step is needed. Names and files that any process
has traced before need neither timm nor ONNX: the cache has their steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trappm.prediction.models.tracers import (
    TRACE_SECONDS,
    NameTracer,
    OutsideTracer,
    StepTracer,
    file_tracer,
    own_process,
)
from trappm.profiler.errors import (
    InputError,
    ModelFileError,
    UnsupportedModelError,
)
from trappm.profiler.files import made_whole
from trappm.profiler.host.environment import data_folder, library_versions
from trappm.profiler.models.known_names import (
    content_of,
    is_file,
    is_hub_id,
    is_prefixed,
    refuse_unknown,
    refuse_weights,
    unit_of,
)
from trappm.profiler.models.model_input import TARGETS, ExampleInputs
from trappm.profiler.records import MAX_SIZE, Phase, StepSettings
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
    return named(name, input_size)[1]


def named(name: str, input_size: int | None) -> tuple[str, int]:
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
        with made_whole(note, replace=True) as part:
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
        ModelFileError: It cannot be read.
        UnknownArchitectureError: It holds weights, not a model.
    """
    refuse_weights(str(path))
    try:
        status = path.stat()
        return _content_hash(path, status.st_size, status.st_mtime_ns, status.st_ino)
    except OSError as error:
        hub = f"; for a transformer of the Hub write hf:{path}" if is_hub_id(str(path)) else ""
        raise ModelFileError(f"{path} cannot be read: {error.strerror}{hub}") from error


@lru_cache(maxsize=4096)
def _content_hash(path: Path, _size: int, _modified_ns: int, _inode: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class UntracedError(Exception):
    """This process does not trace models, and none has traced this step."""


def known_subject(key: ModelKey) -> Subject:
    """Return a model by its key, of steps that some process has traced; nothing is traced here.

    The subject's `trace` raises UntracedError for others.
    """
    return _known(key, data_folder())


def traced(
    key: ModelKey, tracer: StepTracer, settings: Iterable[StepSettings], phase: Phase
) -> None:
    """Trace a model's steps in these settings, so that `known_subject` has them.

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
    def _model(self) -> tuple[str, int | None]:
        """Current name and size, or content and size; raises UntracedError as `trace`."""
        if not self.is_named:
            return self._key[:2]
        if self._tracer is None and not _note(*self._key[:2]).exists():
            raise UntracedError
        return named(*self._key[:2])

    def pixels(self) -> int | None:
        if self.sequence_length is not None or size_kind(self.name) == "tokens":
            return None
        return self._model[1]

    def _trace(
        self, how: TraceSettings, phase: Phase, batch_size: int | None, with_origins: bool
    ) -> Trace:
        if with_origins:
            return self._own_tracer.trace(how, phase, batch_size, with_origins)
        key = TraceKey(*self._model, how, phase)
        made = self._cache.get(key)
        if made is None:
            made = self._made(key)
            self._cache.put(key, made)
        if isinstance(made, Refusal):
            raise UnsupportedModelError(made.reason)
        return made

    def _made(self, key: TraceKey) -> Trace | Refusal:
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

        with self._limit.applied():
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
def _known(key: ModelKey, _home: Path) -> Subject:
    return _Cached(key, None)
