"""Traced steps of many configurations, each made once and kept in the data folder.

A profile is named by all that it depends on, the versions of timm and PyTorch included, so a new
version traces anew. Unlike graphs they belong to a precision, a layout and a way to compute
attention (those in fp32 and contiguous, with fused attention, are kept in the store beside the
graphs); they only ever save the time of tracing again, so deleting the folder loses nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Self

from trappm.cluster.profiles.static_profiles import TooLongError, limited_cpu_time
from trappm.profiler.errors import TrappmError, one_line
from trappm.profiler.records import Configuration, MemoryFormat, Precision

if TYPE_CHECKING:
    from trappm.profiler.simulation.step_profile import StepProfile

FORMAT = 3
"""Counted up when the recorder changes what it writes."""

ENDED_ITS_PROCESS = "tracing its steps ended the process"


@dataclass(frozen=True, order=True)
class StepKey:
    """What a traced step depends on."""

    architecture: str
    input_size: int
    precision: Precision
    memory_format: MemoryFormat
    fused_attention: bool

    @classmethod
    def of(cls, configuration: Configuration, *, fused_attention: bool = True) -> Self:
        """Of a configuration; PyTorch fuses attention from version 2 on."""
        return cls(
            architecture=configuration.architecture,
            input_size=configuration.input_size,
            precision=configuration.precision,
            memory_format=configuration.memory_format,
            fused_attention=fused_attention,
        )

    @property
    def is_plain(self) -> bool:
        """Whether the store has it beside the graph."""
        settings = self.precision, self.memory_format, self.fused_attention
        return settings == (Precision.FP32, MemoryFormat.CONTIGUOUS, True)

    @property
    def file_name(self) -> str:
        parts = (FORMAT, *_versions(), self.architecture, self.input_size, str(self.precision),
                str(self.memory_format), self.fused_attention)  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class TracedStep:
    """The steps of one key, or why there are none."""

    key: StepKey
    profile: bytes | None
    """As `StepProfile.to_bytes` gives it."""
    refusal: str
    is_final: bool = True
    """Whether tracing it again would end alike; False where its process died, maybe of others."""


@dataclass(frozen=True)
class StepCache:
    """Kernel profiles in a folder: bytes by key, and the reasons of refusals."""

    folder: Path

    def get(self, key: StepKey) -> StepProfile | None:
        """The profile, if there is one; a damaged one is removed, to be traced again."""
        loaded = self._load(key)
        return None if loaded is None else loaded[1]

    def read(self, key: StepKey) -> bytes | None:
        """The same as `StepProfile.to_bytes` gives it."""
        loaded = self._load(key)
        return None if loaded is None else loaded[0]

    def _load(self, key: StepKey) -> tuple[bytes, StepProfile] | None:
        from trappm.profiler.simulation.step_profile import StepProfile

        path = self._path(key, "npz")
        try:
            content = path.read_bytes()
            return content, StepProfile.from_bytes(content)
        except OSError:
            return None
        except TrappmError:
            path.unlink(missing_ok=True)
            return None

    def missing(self, keys: Iterable[StepKey]) -> list[StepKey]:
        """Those neither traced nor refused."""
        there = {path.stem for path in self.folder.glob("*.*")}
        return [key for key in keys if key.file_name not in there]

    def put(self, traced: TracedStep) -> None:
        """Keeps what was traced or refused; other processes may do so at the same time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f".{traced.key.file_name}.{os.getpid()}.part"
        part.write_bytes(traced.profile or traced.refusal.encode())
        part.replace(self._path(traced.key, "npz" if traced.profile else "txt"))

    def _path(self, key: StepKey, suffix: str) -> Path:
        return self.folder / f"{key.file_name}.{suffix}"


def trace_steps(keys: Sequence[StepKey]) -> list[TracedStep]:
    """The steps of a few keys; whatever goes wrong costs that key only.

    Call it from the main thread, which is where signals arrive.
    """
    return [_trace(key) for key in keys]


def alike(keys: Iterable[StepKey]) -> list[list[StepKey]]:
    """Groups keys of the same architecture and input size, which are traced together."""
    by_graph = groupby(sorted(keys), lambda key: (key.architecture, key.input_size))
    return [list(part) for _, part in by_graph]


@cache
def _versions() -> tuple[str, str]:
    return version("timm"), version("torch")


def _trace(key: StepKey) -> TracedStep:
    from trappm.profiler.static_profile import step_profile
    from trappm.profiler.tracing.tracer import StepOptions

    options = StepOptions(
        precision=key.precision,
        memory_format=key.memory_format,
        fused_attention=key.fused_attention,
    )
    try:
        with limited_cpu_time():
            profile = step_profile(key.architecture, key.input_size, options)
        return TracedStep(key, profile.to_bytes(), "")
    except TooLongError as error:
        return TracedStep(key, None, str(error))
    except Exception as error:  # a model's own code may raise anything; it costs that model only
        return TracedStep(key, None, one_line(error))
