"""Cache of static profiles, so that the next process need not trace a model again.

An entry is named by all that it depends on: the architecture or the file's content, the input size,
and the versions of the libraries that traced it. Entries only ever save time: a damaged one is made
again, a folder that cannot be written caches nothing, and deleting it loses nothing.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from trappm.profiler.errors import InputError, ModelFileError, TrappmError
from trappm.profiler.files.whole_file import made_whole
from trappm.profiler.host.environment import data_folder
from trappm.profiler.models.known_names import is_hub_id, refuse_weights
from trappm.profiler.records import GraphTemplate

if TYPE_CHECKING:
    from trappm.profiler.records.trace import StaticProfile, StepProfile

FORMAT = 7
"""Version of the entries; increased when a profile of the same model changes."""
MAX_ENTRY_BYTES = 64 << 20
_STEP_REFUSED = b"refused\n"


def cached_profile(
    key: tuple[object, ...], make: Callable[[], tuple[str, StaticProfile]]
) -> tuple[str, StaticProfile]:
    """Return the name and profile of a model, made unless they are cached."""
    path = _path(key, "profile.json")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, TrappmError):
        return profile_from_bytes(_read(path))
    name, profile = make()
    _write(path, profile_to_bytes(name, profile))
    return name, profile


def cached_step(key: tuple[object, ...], make: Callable[[], StepProfile]) -> StepProfile | str:
    """Return the steps of a model, traced unless they are cached; or why there are none."""
    from trappm.profiler.records.trace import StepProfile

    path = _path(key, "step.npz")
    with contextlib.suppress(OSError, ValueError, TrappmError):
        data = _read(path)
        if data.startswith(_STEP_REFUSED):
            return data.removeprefix(_STEP_REFUSED).decode()
        return StepProfile.from_bytes(data)
    try:
        step = make()
    except InputError:
        raise
    except TrappmError as error:
        _write(path, _STEP_REFUSED + str(error).encode())
        return str(error)
    _write(path, step.to_bytes())
    return step


def cached_input_size(key: tuple[object, ...], make: Callable[[], int]) -> int:
    """Return a model's input size, asked of its library unless it is cached."""
    path = _path(key, "input-size.json")
    with contextlib.suppress(OSError, ValueError):
        return int(_read(path))
    size = make()
    _write(path, str(size).encode())
    return size


def _path(key: tuple[object, ...], suffix: str) -> Path:
    identity = repr((FORMAT, *tracing_versions(), *key))
    name = hashlib.sha256(identity.encode()).hexdigest()[:32]
    return data_folder() / "profiles" / f"{name}.{suffix}"


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_ENTRY_BYTES + 1)
    if len(data) > MAX_ENTRY_BYTES:
        raise ValueError(f"{path} is larger than any profile")
    return data


def _write(path: Path, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the answer does not depend on it
        path.parent.mkdir(parents=True, exist_ok=True)
        with made_whole(path, replace=True) as part:
            part.write_bytes(data)


def content_key(path: Path) -> str:
    """Return a hash of a file's bytes; this process reads an unchanged file once.

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


@cache
def tracing_versions() -> tuple[str, ...]:
    """Return the versions of the libraries that a trace depends on."""
    versions = [version(name) for name in ("trappm", "timm", "torch", "onnx")]
    for name in ("transformers", "peft"):  # of an extra
        with contextlib.suppress(PackageNotFoundError):
            versions.append(version(name))
    return tuple(versions)


def profile_to_bytes(name: str, profile: StaticProfile) -> bytes:
    """Return a model's name and profile as JSON."""

    def text(data: bytes | None) -> str | None:
        return None if data is None else base64.b64encode(data).decode()

    return json.dumps(
        {
            "name": name,
            "graph": text(profile.graph.to_bytes()),
            "step": text(None if profile.step is None else profile.step.to_bytes()),
            "step_refusal": profile.step_refusal,
            "step_source": profile.step_source,
            "step_remark": profile.step_remark,
        }
    ).encode()


def profile_from_bytes(data: bytes) -> tuple[str, StaticProfile]:
    """Return what `profile_to_bytes` wrote.

    Raises:
        ValueError, KeyError, TypeError, TrappmError: It is damaged.
    """
    from trappm.profiler.records.trace import StaticProfile, StepProfile, StepSource

    entry = json.loads(data)
    step, source = entry["step"], entry["step_source"]
    return entry["name"], StaticProfile(
        graph=GraphTemplate.from_bytes(base64.b64decode(entry["graph"])),
        step=None if step is None else StepProfile.from_bytes(base64.b64decode(step)),
        step_refusal=entry["step_refusal"],
        step_source=None if source is None else StepSource(source),
        step_remark=entry["step_remark"],
    )
