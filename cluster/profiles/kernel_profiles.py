"""Kernel profiles of many configurations: traced once, and kept in the data folder.

A profile is named by all that it depends on, the versions of timm and PyTorch included, so a new
version traces anew. Unlike graphs they belong to a precision, a layout and a way to compute
attention; they only ever save the time of tracing again, so deleting the folder loses nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Self

from trappm.cluster.profiles.worker_processes import (
    TooLongError,
    limited_cpu_time,
    submit,
    worker_pool,
)
from trappm.profiler.errors import TrappmError, one_line
from trappm.profiler.records import Configuration, MemoryFormat, Precision

if TYPE_CHECKING:
    from trappm.profiler.simulation.kernel_profile import KernelProfile

FORMAT = 2
"""Counted up when the recorder changes what it writes."""

ENDED_ITS_PROCESS = "tracing its kernels ended the process"


@dataclass(frozen=True, order=True)
class KernelKey:
    """What a kernel profile depends on."""

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
    def file_name(self) -> str:
        parts = (FORMAT, *_versions(), self.architecture, self.input_size, str(self.precision),
                str(self.memory_format), self.fused_attention)  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class TracedKernels:
    """The kernels of one key, or why there are none."""

    key: KernelKey
    profile: bytes | None
    """As `KernelProfile.to_bytes` gives it."""
    refusal: str
    is_final: bool = True
    """Whether tracing it again would end alike; False where its process died, maybe of others."""


@dataclass(frozen=True)
class KernelCache:
    """The folder of one data folder."""

    folder: Path

    def get(self, key: KernelKey) -> KernelProfile | None:
        """The profile, if there is one; a damaged one is removed, to be traced again."""
        loaded = self._load(key)
        return None if loaded is None else loaded[1]

    def read(self, key: KernelKey) -> bytes | None:
        """The same as `KernelProfile.to_bytes` gives it."""
        loaded = self._load(key)
        return None if loaded is None else loaded[0]

    def _load(self, key: KernelKey) -> tuple[bytes, KernelProfile] | None:
        from trappm.profiler.simulation.kernel_profile import KernelProfile

        path = self._path(key, "npz")
        try:
            content = path.read_bytes()
            return content, KernelProfile.from_bytes(content)
        except OSError:
            return None
        except TrappmError:
            path.unlink(missing_ok=True)
            return None

    def missing(self, keys: Iterable[KernelKey]) -> list[KernelKey]:
        """Those neither traced nor refused."""
        there = {path.stem for path in self.folder.glob("*.*")}
        return [key for key in keys if key.file_name not in there]

    def put(self, traced: TracedKernels) -> None:
        """Keeps what was traced or refused; other processes may do so at the same time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f".{traced.key.file_name}.{os.getpid()}.part"
        part.write_bytes(traced.profile or traced.refusal.encode())
        part.replace(self._path(traced.key, "npz" if traced.profile else "txt"))

    def make(self, keys: Sequence[KernelKey], processes: int) -> Iterator[TracedKernels]:
        """Traces and keeps them, in processes of this machine, in the order of completion.

        Raises:
            TrappmError: a trace ended its process; what was made until then is kept.
        """
        with worker_pool(processes) as workers:
            jobs = [submit(workers, trace_kernels, part) for part in alike(keys)]
            try:
                for job in as_completed(jobs):
                    for traced in job.result():
                        self.put(traced)
                        yield traced
            except BrokenProcessPool as error:
                raise TrappmError(
                    "tracing kernels ended its process; the same command goes on behind it"
                ) from error

    def _path(self, key: KernelKey, suffix: str) -> Path:
        return self.folder / f"{key.file_name}.{suffix}"


def trace_kernels(keys: Sequence[KernelKey]) -> list[TracedKernels]:
    """The kernels of a few keys; whatever goes wrong costs that key only.

    Call it from the main thread, which is where signals arrive.
    """
    return [_trace(key) for key in keys]


def alike(keys: Iterable[KernelKey]) -> list[list[KernelKey]]:
    """Keys that are traced together: those of one architecture and input size."""
    by_graph = groupby(sorted(keys), lambda key: (key.architecture, key.input_size))
    return [list(part) for _, part in by_graph]


@cache
def _versions() -> tuple[str, str]:
    return version("timm"), version("torch")


def _trace(key: KernelKey) -> TracedKernels:
    from trappm.profiler.static_profile import kernel_profile

    try:
        with limited_cpu_time():
            profile = kernel_profile(
                key.architecture,
                key.input_size,
                precision=key.precision,
                memory_format=key.memory_format,
                fused_attention=key.fused_attention,
            )
        return TracedKernels(key, profile.to_bytes(), "")
    except TooLongError as error:
        return TracedKernels(key, None, str(error))
    except Exception as error:  # a model's own code may raise anything; it costs that model only
        return TracedKernels(key, None, one_line(error))
