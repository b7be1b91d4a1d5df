"""Models that questions are about: a timm or transformer name, an ONNX file, or a module.

A subject is checked at once and profiled when its profile is needed. Names and files that any
process has profiled before need neither timm nor ONNX: `profile_cache` has their profiles.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from trappm.prediction.models.profile_cache import (
    cached_input_size,
    cached_profile,
    cached_step,
    content_key,
)
from trappm.prediction.models.tracers import (
    TRACE_SECONDS,
    NameTracer,
    OutsideTracer,
    StepTracer,
    TracedStep,
    file_tracer,
    own_process,
    step_options,
    traced_step,
)
from trappm.profiler.errors import InputError, TrappmError, UnsupportedModelError
from trappm.profiler.host.environment import data_folder
from trappm.profiler.models.known_names import (
    content_of,
    is_file,
    is_prefixed,
    refuse_unknown,
    unit_of,
)
from trappm.profiler.models.model_input import TARGETS, ExampleInputs, Sample
from trappm.profiler.records import (
    MAX_SIZE,
    Execution,
    MemoryFormat,
    Phase,
    Precision,
    StepSettings,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trappm.profiler.models.model_input import Inputs
    from trappm.profiler.simulation.step_profile import StaticProfile, StepProfile
    from trappm.profiler.tracing.tracer import StepOptions


class Subject(ABC):
    """The model that a question is about."""

    name: str
    batch_size: int | None = None
    """Batch size of a module's example; None if it is 1 by default."""
    input_size: int | None = None
    """Pixels or tokens of the question; None for the model's default."""
    sequence_length: int | None = None
    """Tokens of the question, of a file."""
    only_because = "the file has no other"
    """Why its steps can be traced at one batch size only, if that is so."""
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

    @abstractmethod
    def profile(self) -> StaticProfile:
        """Return the graph, with the step in fp32 and contiguous; raises TrappmError."""

    @abstractmethod
    def step(self, settings: StepSettings) -> StepProfile | str:
        """Return the steps in these settings, or the reason why they cannot be traced."""

    @abstractmethod
    def traced_step(self, settings: StepSettings, phase: Phase, batch_size: int) -> TracedStep:
        """Trace one step with the origins of its tensors; raises TrappmError if it cannot be."""


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
            return _file(path, content_key(path), size, is_tokens, limit_s, data_folder())
        size = _size_of(model, input_size, sequence_length)
        refuse_unknown(model)
        return _architecture(model, size, data_folder())
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


COMPILED = "compile-4"
"""Key of cached compiled steps; its number increases when the tracing of them changes."""


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

    def of_library() -> int:
        from trappm.profiler.models.sources import source_of

        return source_of(name).input_size_of(name, input_size)

    return cached_input_size(name_key(name, input_size), of_library)


class UnprofiledError(Exception):
    """This process does not trace models, and this one has no cached profile."""


def known_subject(key: tuple[object, ...]) -> Subject:
    """Return a model that some process has profiled, by its key; nothing is traced.

    Raises:
        UnprofiledError: There is no profile; the subject's `step` raises it, too.
    """
    return _known(key, data_folder())


def traced(key: tuple[object, ...], tracer: StepTracer, settings: Iterable[StepSettings]) -> None:
    """Profile a model and its steps in these settings, so that `known_subject` finds it.

    Raises:
        TrappmError: What is wrong with the model.
    """
    subject = _Cached(key, tracer)
    subject.pixels()
    for row in settings:
        subject.step(row)


def name_key(name: str, input_size: int | None) -> tuple[object, ...]:
    """Return the cache key of a named model."""
    return "timm", content_of(name), input_size


def file_key(digest: str, input_size: int | None) -> tuple[object, ...]:
    """Return the cache key of a file with this content (see `content_key`)."""
    return "file", digest, input_size


class _Cached(Subject):
    """A model that is the same for every process, so its profiles are cached."""

    def __init__(self, key: tuple[object, ...], tracer: StepTracer | None) -> None:
        self._key = key
        self.identity, self.is_named = key, key[0] == "timm"
        self.input_size = key[2] if isinstance(key[2], int) else None
        self._tracer_or_none = tracer
        self._steps: dict[tuple[str, ...], StepProfile | str] = {}
        self.name, self._profile = cached_profile(key, self._make)

    def pixels(self) -> int | None:
        if self.sequence_length is not None or size_kind(self.name) == "tokens":
            return None
        if self.input_size is None and self.is_named:
            return input_size_of(self.name, None)
        return self.input_size

    def profile(self) -> StaticProfile:
        return self._profile

    def step(self, settings: StepSettings) -> StepProfile | str:
        layout: tuple[str, ...] = settings.precision.value, settings.memory_format.value
        if settings.execution is Execution.COMPILE:
            layout = *layout, COMPILED
        if layout == (Precision.FP32, MemoryFormat.CONTIGUOUS):  # in the profile
            return self._profile.step or self._profile.step_refusal or ""
        if layout not in self._steps:
            batch_size = self._profile.graph.fixed_batch_size
            self._steps[layout] = cached_step(
                (*self._key, *layout), lambda: self._tracer.step(settings, batch_size)
            )
        return self._steps[layout]

    def traced_step(self, settings: StepSettings, phase: Phase, batch_size: int) -> TracedStep:
        size = self._profile.graph.fixed_batch_size or batch_size
        return self._tracer.traced_step(settings, phase, size)

    def _make(self) -> tuple[str, StaticProfile]:
        return self._tracer.profile()

    @property
    def _tracer(self) -> StepTracer:
        if self._tracer_or_none is None:
            raise UnprofiledError
        return self._tracer_or_none


class _TracedAt(TypedDict, total=False):
    """Batch sizes at which steps are traced, where not at the usual two."""

    batch_sizes: tuple[int, int]
    by_values: bool


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
        self._only_input = args[0] if getattr(dtype, "is_floating_point", False) else None
        self.has_one_input = self._only_input is not None
        self.batch_size = self._inputs.batch_size
        self._traced_at: _TracedAt = {}
        self._refuses_changes = True
        self._steps: dict[StepSettings, StepProfile | str] = {}
        self._known: dict[tuple[StepSettings, Phase, int], Module | str] = {}

    @property
    def _sample(self) -> Inputs:
        if self._only_input is None:
            return self._inputs
        return Sample.from_example(self.module, self._only_input)

    @cached_property
    def _profile(self) -> StaticProfile:
        from trappm.profiler.static_profile import static_profile

        options = self._options(StepSettings())
        with self._limit.applied():
            profile = static_profile(self.module, self._sample, options, **self._traced_at)
        if profile.step is None and not self.has_one_input:  # the graph has neither loss nor batch
            raise UnsupportedModelError(profile.step_refusal or "")
        remarks = filter(None, (self.remark, profile.step_remark))
        return replace(profile, step_remark=" ".join(remarks) or None)

    def _options(self, settings: StepSettings) -> StepOptions:
        from trappm.profiler.tracing.losses import loss_of

        has_targets = TARGETS in self._inputs.kwargs
        return replace(
            step_options(settings),
            loss=loss_of(self._loss, has_targets=has_targets),
            refuses_changes=self._refuses_changes,
        )

    def profile(self) -> StaticProfile:
        return self._profile

    def step(self, settings: StepSettings) -> StepProfile | str:
        if settings not in self._steps:
            self._steps[settings] = self._step(settings)
        return self._steps[settings]

    def _step(self, settings: StepSettings) -> StepProfile | str:
        from trappm.profiler.static_profile import step_profile

        try:
            options = self._options(settings)
            with self._limit.applied():
                return step_profile(self.module, self._sample, options, **self._traced_at)
        except TrappmError as error:
            return str(error)

    def traced_step(self, settings: StepSettings, phase: Phase, batch_size: int) -> TracedStep:
        from trappm.profiler.models.on_meta import on_meta

        options = self._options(settings)
        module = on_meta(self.module, None, settings.memory_format, settings.precision)
        with self._limit.applied():
            return traced_step(
                module, self._inputs, options, phase, batch_size, original=self.module
            )

    def covered(self, settings: StepSettings, phase: Phase, batch_size: int) -> Module | str:
        """Return what heads can predict, or the reason why only the memory is predicted.

        A module that cannot be traced at two batch sizes is traced at this one, on the values of
        the example if need be.

        Raises:
            InputError: PyTorch refuses the step.
            UnsupportedModelError: It cannot be traced.
        """
        key = settings, phase, batch_size
        if key not in self._known:
            self._known[key] = self._covered(*key)
        return self._known[key]

    def _changed(self, **attributes: object) -> Module:
        """Return a copy with other attributes that has traced nothing."""
        other = copy(self)
        other.__dict__.pop("_profile", None)
        vars(other).update(attributes, _steps={}, _known={})
        return other

    def _covered(self, settings: StepSettings, phase: Phase, batch_size: int) -> Module | str:
        """Return `covered`, which keeps it."""
        why = ""
        try:
            if self._profile.step is not None:
                return self
        except (InputError, UnsupportedModelError) as error:
            why = str(error)
        if phase is Phase.INFER and self._refuses_changes:
            return self._changed(_refuses_changes=False).covered(settings, phase, batch_size)
        try:
            step = self.traced_step(settings, phase, batch_size)
        except UnsupportedModelError:
            if why:
                raise
            return self  # its graph gives a rough estimate
        if step.only_batch is None:
            return why or self
        one = self._changed(
            _traced_at={"batch_sizes": (batch_size, batch_size), "by_values": step.by_values},
            _only_input=None, has_one_input=False, batch_size=batch_size, only_because=step.reason,
        )  # fmt: skip
        try:
            one.profile()
        except (InputError, UnsupportedModelError) as error:
            return str(error)
        return one


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


# A subject depends on the data folder, which has its cached profiles.


@lru_cache(maxsize=64)
def _architecture(name: str, input_size: int | None, _home: Path) -> Subject:
    return _Cached(name_key(name, input_size), NameTracer(name, input_size))


@lru_cache(maxsize=64)
def _file(
    path: Path, digest: str, size: int | None, is_tokens: bool, limit_s: float, _home: Path
) -> Subject:
    inner = file_tracer(str(path), size, is_tokens)
    tracer = OutsideTracer(own_process(), inner, str(path), limit_s=limit_s)
    key = file_key(digest, size)
    subject = _Cached((*key, "tokens") if is_tokens else key, tracer)
    subject.sequence_length = size if is_tokens else None
    subject.name = str(path)
    subject.identity = (subject.identity, subject.name)
    return subject


@lru_cache(maxsize=256)
def _known(key: tuple[object, ...], _home: Path) -> Subject:
    return _Cached(key, None)
