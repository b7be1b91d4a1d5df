"""Kernel profiles, traced once and kept in the data folder.

A profile is named by all that it depends on, the versions of timm and PyTorch included, so a new
version traces anew. Unlike graphs they belong to a precision, a layout and a way to compute
attention; they only ever save the time of tracing again, so deleting the folder loses nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.processes import submit, worker_pool
from profiler.errors import TrappmError, one_line
from profiler.records import MemoryFormat, Precision

if TYPE_CHECKING:
    from profiler.simulation.kernel_profile import KernelProfile

FORMAT = 2
"""Counted up when the recorder changes what it writes."""


@dataclass(frozen=True, order=True)
class KernelKey:
    """What a kernel profile depends on."""

    architecture: str
    input_size: int
    precision: Precision
    memory_format: MemoryFormat
    fused_attention: bool

    @property
    def file_name(self) -> str:
        told = (FORMAT, *_versions(), self.architecture, self.input_size, str(self.precision),
                str(self.memory_format), self.fused_attention)  # fmt: skip
        return hashlib.sha256(repr(told).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class KernelCache:
    """The folder of one data folder."""

    folder: Path

    def get(self, key: KernelKey) -> KernelProfile | None:
        """The profile, if there is one; a damaged one is removed, to be traced again."""
        from profiler.simulation.kernel_profile import KernelProfile

        path = self.folder / f"{key.file_name}.npz"
        try:
            return KernelProfile.from_bytes(path.read_bytes())
        except OSError:
            return None
        except TrappmError:
            path.unlink(missing_ok=True)
            return None

    def missing(self, keys: Sequence[KernelKey]) -> list[KernelKey]:
        """Those neither traced nor refused."""
        there = {path.stem for path in self.folder.glob("*.*")}
        return [key for key in keys if key.file_name not in there]

    def make(self, keys: Sequence[KernelKey], processes: int) -> Iterator[tuple[KernelKey, str]]:
        """Traces and keeps them, in processes of this machine; each with "" or why it was refused.

        Raises:
            TrappmError: a trace ended its process; what was made until then is kept.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with worker_pool(processes) as workers:
            jobs = {submit(workers, _trace, key): key for key in keys}
            try:
                for job in as_completed(jobs):
                    key, (profile, refusal) = jobs[job], job.result()
                    suffix, content = ("npz", profile) if profile else ("txt", refusal.encode())
                    part = self.folder / f".{key.file_name}.{os.getpid()}.part"
                    part.write_bytes(content)
                    part.replace(self.folder / f"{key.file_name}.{suffix}")
                    yield key, refusal
            except BrokenProcessPool as error:
                raise TrappmError(
                    "tracing kernels ended its process; the same command goes on behind it"
                ) from error


@cache
def _versions() -> tuple[str, str]:
    return version("timm"), version("torch")


def _trace(key: KernelKey) -> tuple[bytes, str]:
    from profiler.simulation.kernel_profile import kernel_profile

    try:
        profile = kernel_profile(
            key.architecture,
            key.input_size,
            precision=key.precision,
            memory_format=key.memory_format,
            fused_attention=key.fused_attention,
        )
        return profile.to_bytes(), ""
    except Exception as error:  # a model's own code may raise anything; it costs that model only
        return b"", one_line(error)
