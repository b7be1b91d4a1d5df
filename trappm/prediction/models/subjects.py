"""What a question is about: a timm name, an ONNX file or a module, as predictors see it.

A subject is checked at once and profiled when its profile is needed. Names and files that were
profiled before, by any process, need neither timm nor ONNX: `profile_cache` has them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from trappm.learner.heads.predictions import StepSettings
from trappm.prediction.models.profile_cache import ProfileCache, content_key
from trappm.prediction.models.tracing import (
    FileTracer,
    NameTracer,
    OutsideTracer,
    Tracer,
    own_process,
)
from trappm.profiler.errors import InputError, TrappmError
from trappm.profiler.host.data_folder import data_folder
from trappm.profiler.models.known_names import content_of, is_file
from trappm.profiler.records import MemoryFormat, Precision

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trappm.profiler.models.model_input import Sample
    from trappm.profiler.simulation.step_profile import StaticProfile, StepProfile


class Subject(ABC):
    """The model that a question is about."""

    name: str
    batch_size: int | None = None
    """Its own, where it has one that a question may leave out."""
    input_size: int | None = None
    """As the question gives it, in pixels or tokens; None for the model's default."""

    @abstractmethod
    def profile(self) -> StaticProfile:
        """Raises TrappmError where no graph can be made of it."""

    @abstractmethod
    def step(self, settings: StepSettings) -> StepProfile | str:
        """Its steps as they are run in these settings, or why they cannot be traced."""


def subject_of(
    model: object,
    *,
    example_input: torch.Tensor | None = None,
    input_size: int | None = None,
) -> Subject:
    """What `model` stands for, in the words of `trappm.predict`.

    Raises:
        InputError: not a model, or one that does not fit what is given beside it.
        UnknownArchitectureError, ModelFileError: no such architecture or file.
    """
    if isinstance(model, str | Path):
        if example_input is not None:
            raise InputError("example_input is for modules; names and files know their input")
        if isinstance(model, Path) or is_file(model):
            return _file(Path(model), content_key(Path(model)), input_size, _profiles())
        return _architecture(model, input_size, _profiles())
    from torch import nn

    if not isinstance(model, nn.Module):
        raise InputError(
            f"the model is a {type(model).__name__}; give a timm name, an ONNX file, a module, "
            "or a list of these"
        )
    if example_input is None or input_size is not None:
        raise InputError(
            f"{type(model).__name__} is a module; give an example of its input and no input size, "
            "such as example_input=torch.empty(8, 3, 224, 224)"
        )
    from trappm.profiler.models.model_input import Sample
    from trappm.profiler.models.on_meta import EAGER, eager, is_compiled

    sample = Sample.from_example(eager(model), example_input)
    remark = EAGER if is_compiled(model) else None
    return _Module(eager(model), sample, example_input.shape[0], remark)


def input_size_of(name: str, input_size: int | None) -> int:
    """The size of input of a named model, where one is given or left to its default.

    Raises:
        InputError, UnknownArchitectureError: as `profiler.models.sources`.
    """

    def of_library() -> int:
        from trappm.profiler.models.sources import source_of

        return source_of(name).input_size_of(name, input_size)

    return _profiles().input_size(name_key(name, input_size), of_library)


class UnprofiledError(Exception):
    """This process does not profile models by itself, and this one has no profile yet."""


def known_subject(key: tuple[object, ...]) -> Subject:
    """A model that some process has profiled, by `name_key` or `file_key`; nothing is traced here.

    Raises:
        UnprofiledError: none has; so does the subject's `step` where that is not there.
    """
    return _known(key, _profiles())


def traced(key: tuple[object, ...], tracer: Tracer, settings: Iterable[StepSettings]) -> None:
    """Profiles a model, and its steps in these settings, so that `known_subject` finds it.

    Raises:
        TrappmError: what is wrong with the model.
    """
    subject = _Kept(key, _profiles(), tracer)
    for row in settings:
        subject.step(row)


def name_key(name: str, input_size: int | None) -> tuple[object, ...]:
    """What profiles of a named model are kept under."""
    return "timm", content_of(name), input_size


def file_key(digest: str, input_size: int | None) -> tuple[object, ...]:
    """What profiles of a file with this content (see `content_key`) are kept under."""
    return "file", digest, input_size


class _Kept(Subject):
    """A model that is the same for every process: its profiles are kept."""

    def __init__(self, key: tuple[object, ...], cache: ProfileCache, tracer: Tracer | None) -> None:
        self._cache = cache
        self._key = key
        self.input_size = key[2] if isinstance(key[2], int) else None
        self._tracer = tracer
        self._steps: dict[tuple[str, str], StepProfile | str] = {}
        self.name, self._profile = self._cache.profile(key, self._make)

    def profile(self) -> StaticProfile:
        return self._profile

    def step(self, settings: StepSettings) -> StepProfile | str:
        layout = _layout(settings)
        if layout == PLAIN:
            return self._profile.step or self._profile.step_refusal or ""
        if layout not in self._steps:
            batch_size = self._profile.graph.fixed_batch_size
            self._steps[layout] = self._cache.step(
                (*self._key, *layout), lambda: self._unprofiled.step(settings, batch_size)
            )
        return self._steps[layout]

    def _make(self) -> tuple[str, StaticProfile]:
        return self._unprofiled.profile()

    @property
    def _unprofiled(self) -> Tracer:
        if self._tracer is None:
            raise UnprofiledError
        return self._tracer


class _Module(Subject):
    """A module of the caller's own; nothing of it is kept."""

    def __init__(
        self, module: nn.Module, sample: Sample, batch_size: int, remark: str | None
    ) -> None:
        self.name = type(module).__name__
        self._remark = remark
        self.batch_size = batch_size
        self._module = module
        self._sample = sample

    @cached_property
    def _profile(self) -> StaticProfile:
        from trappm.profiler.static_profile import static_profile

        return replace(static_profile(self._module, self._sample), step_remark=self._remark)

    def profile(self) -> StaticProfile:
        return self._profile

    def step(self, settings: StepSettings) -> StepProfile | str:
        from trappm.profiler.static_profile import step_profile
        from trappm.profiler.tracing.tracer import StepOptions

        try:
            options = StepOptions(
                precision=settings.precision, memory_format=settings.memory_format
            )
            return step_profile(self._module, self._sample, options)
        except TrappmError as error:
            return str(error)


@lru_cache(maxsize=64)
def _architecture(name: str, input_size: int | None, cache: ProfileCache) -> Subject:
    return _Kept(name_key(name, input_size), cache, NameTracer(name, input_size))


@lru_cache(maxsize=64)
def _file(path: Path, digest: str, input_size: int | None, cache: ProfileCache) -> Subject:
    tracer = OutsideTracer(own_process(), FileTracer(str(path), input_size), str(path))
    subject = _Kept(file_key(digest, input_size), cache, tracer)
    subject.name = str(path)
    return subject


@lru_cache(maxsize=256)
def _known(key: tuple[object, ...], cache: ProfileCache) -> Subject:
    return _Kept(key, cache, None)


def _profiles() -> ProfileCache:
    return ProfileCache(data_folder() / "profiles")


PLAIN = (Precision.FP32.value, MemoryFormat.CONTIGUOUS.value)
"""What the profile itself is traced in."""


def _layout(settings: StepSettings) -> tuple[str, str]:
    """What a trace depends on."""
    return settings.precision.value, settings.memory_format.value
