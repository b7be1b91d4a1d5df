"""Cache of traced steps: one key, one interface, two homes (a folder here, a table in `store`).

A step is traced once for `trappm predict`, campaigns, servers and pools. Its key has all that the
trace depends on. Entries only save time: a damaged one is made again, and deleting them loses
nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from trappm.profiler.errors import TrappmError
from trappm.profiler.files import made_whole
from trappm.profiler.host.environment import library_versions, uses_fused_attention
from trappm.profiler.models.known_names import content_of
from trappm.profiler.records import Configuration, Phase
from trappm.profiler.records.trace import TRACE_VERSION, Trace, TraceSettings

MAX_BYTES = 2 << 30
"""Default size of a cache; beyond it the oldest entries go."""
MAX_ENTRY_BYTES = 64 << 20
CONTENT = "sha256 "
"""Beginning of a model's key that is the hash of a file."""
_REFUSED = b"refused\n"


class TraceKey(NamedTuple):
    """A model and the way its step is run; the versions of the libraries come on top."""

    model: str
    """Name of an architecture, or the content of a file."""
    input_size: int | None
    """Pixels or tokens; None for the file's own."""
    settings: TraceSettings = TraceSettings()
    phase: Phase = Phase.TRAIN

    @classmethod
    def of(cls, configuration: Configuration, *, fused_attention: bool = True) -> Self:
        """Return the key of a configuration's step."""
        c = configuration
        settings = TraceSettings(c.precision, c.memory_format, c.execution, fused_attention)
        return cls(c.architecture, c.input_size, settings, c.phase)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits of the key, of the libraries and of the tracer's version.

        Raises:
            InputError: There is no such model.
        """
        model = self.model if self.model.startswith(CONTENT) else content_of(self.model)
        libraries = library_versions(), uses_fused_attention()
        parts = TRACE_VERSION, *libraries, model, self.input_size, *self.settings
        text = repr((*map(str, parts), str(self.phase)))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class Refusal(NamedTuple):
    """Why a step cannot be traced, if the model is the reason."""

    reason: str


def entry_to_bytes(made: Trace | Refusal) -> bytes:
    """Return an entry as bytes."""
    return _REFUSED + made.reason.encode() if isinstance(made, Refusal) else made.to_bytes()


def entry_from_bytes(data: bytes) -> Trace | Refusal:
    """Return the entry of `entry_to_bytes`; raises TrappmError if it is damaged."""
    if data.startswith(_REFUSED):
        return Refusal(data.removeprefix(_REFUSED).decode(errors="replace"))
    return Trace.from_bytes(data)


class TraceCache(ABC):
    """Traced steps and refusals by their keys; a contract of both homes."""

    @abstractmethod
    def get(self, key: TraceKey) -> Trace | Refusal | None:
        """Return what is known of a step, or None; a damaged entry is removed."""

    @abstractmethod
    def put(self, key: TraceKey, made: Trace | Refusal) -> None:
        """Keep a step; other processes may do so at the same time."""

    @abstractmethod
    def missing(self, keys: Collection[TraceKey]) -> list[TraceKey]:
        """Return the keys without an entry, in their order."""


@dataclass(frozen=True)
class TraceFolder(TraceCache):
    """Traced steps in a folder; one that cannot be written keeps nothing."""

    folder: Path
    max_bytes: int = MAX_BYTES

    def get(self, key: TraceKey) -> Trace | Refusal | None:
        path = self._path(key)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_ENTRY_BYTES + 1)
            return entry_from_bytes(data)
        except OSError:
            return None
        except TrappmError:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None

    def put(self, key: TraceKey, made: Trace | Refusal) -> None:
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with made_whole(self._path(key), replace=True) as part:
                part.write_bytes(entry_to_bytes(made))
            self._shrink()

    def missing(self, keys: Collection[TraceKey]) -> list[TraceKey]:
        there = {path.stem for path in self.folder.glob("*.trace")}
        return [key for key in keys if key.digest not in there]

    def _path(self, key: TraceKey) -> Path:
        return self.folder / f"{key.digest}.trace"

    def _shrink(self) -> None:
        """Remove the oldest entries beyond the largest size."""
        entries = [(path.stat(), path) for path in self.folder.glob("*.trace")]
        entries.sort(key=lambda entry: entry[0].st_mtime_ns, reverse=True)
        kept_bytes = 0
        for status, path in entries:
            kept_bytes += status.st_size
            if kept_bytes > self.max_bytes:
                path.unlink(missing_ok=True)
