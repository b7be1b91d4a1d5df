"""A snapshot's files: manifest, checksums, and folders that appear all at once.

    <id>/manifest.json                       contents, errors, labels, and checksums
         encoder.safetensors                 only where some heads need it
         heads-<device>-<phase>.safetensors  `all` where all phases of a device have the same

A snapshot's id is a hash of its content, so it never changes. Bytes are checked before use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from trappm.learner.snapshots.manifest_fields import FileEntry, Manifest
from trappm.profiler.errors import InputError, SnapshotError
from trappm.profiler.files.untrusted import read_plain

FORMAT = "trappm-snapshot"
FORMAT_VERSION = 4
"""4: Gaussian processes by unique landmarks and their whitened posterior."""
OTHERS = "other-devices.safetensors"
"""File with the constants of cards without labels."""
MANIFEST = "manifest.json"

MAX_MANIFEST_BYTES = 4 << 20

STALE_S = 24 * 3600.0
"""Age in seconds from which an unfinished folder belongs to a killed process."""
UNFINISHED = ".unfinished-"

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
"""Pattern of files, device keys and aliases."""
ID = re.compile(r"[0-9a-f]{20}")
_NOT_IN_ID = ("id", "created_at", "parent", "checksum")
"""Fields outside the id, so that the same content is the same snapshot."""


class Label(Protocol):
    """Fields of a training label that a snapshot records."""

    @property
    def configuration_id(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def values(self) -> tuple[float | None, ...]: ...
    @property
    def provenance(self) -> str: ...


def label_set_hash(labels: Sequence[Label]) -> str:
    """Return 64 hexadecimal digits, equal for equal sets of labels in any order."""
    rows = sorted(
        json.dumps([x.device, x.configuration_id, list(x.values), x.provenance]) for x in labels
    )
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with its id and checksum as JSON values; raise ValueError for NaN."""
    whole: dict[str, Any] = json.loads(json.dumps(manifest, allow_nan=False))
    whole["id"] = _content_id(whole)
    whole["checksum"] = _checksum(whole)
    return whole


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    return json.dumps(manifest, indent=2, sort_keys=True).encode()


def entries(contents: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """Return the manifest's entries for files: checksum and size of each."""
    return {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        for name, data in sorted(contents.items())
    }


def checked_manifest(data: bytes, place: str) -> Manifest:
    """Return the manifest in bytes that were found at `place`.

    Raises:
        SnapshotError: It is damaged, of something else, or of another format version.
    """
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(place, f"{MANIFEST} is not valid JSON") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise SnapshotError(
            f"{place}/{MANIFEST} is not the manifest of a TraPPM snapshot; "
            "see: trappm snapshot list"
        )
    if manifest.get("format_version") != FORMAT_VERSION:
        raise SnapshotError(
            f"snapshot {place} has format version {manifest.get('format_version')!r}, and this "
            f"version of trappm reads {FORMAT_VERSION}; upgrade trappm or publish it again"
        )
    sound = manifest.get("checksum") == _checksum(manifest)
    if not sound or manifest.get("id") != _content_id(manifest):
        raise damaged(place, f"{MANIFEST} does not match its own checksum")
    try:
        checked = Manifest.of(manifest, data)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part)[:60] for part in fault["loc"])
        raise damaged(place, f"in {MANIFEST} is {where}: {fault['msg']}") from None
    if MANIFEST in checked.files:
        raise damaged(place, f"it names a file {MANIFEST!r}")
    return checked


def check_file(name: str, entry: FileEntry, data: bytes, place: str) -> None:
    """Raise SnapshotError for bytes that differ from the manifest's entry."""
    if len(data) != entry.bytes:
        raise damaged(place, f"{name} has {len(data)} bytes, not {entry.bytes}")
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise damaged(place, f"{name} does not match its checksum")


def read_manifest(folder: Path) -> Manifest:
    """Return a folder's manifest; raise SnapshotError if it is missing or damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        raise SnapshotError(
            f"{folder} is not a snapshot: it has no {MANIFEST}; see: trappm snapshot list"
        )
    return checked_manifest(_read(path, MAX_MANIFEST_BYTES), str(folder))


def read_whole(folder: Path) -> tuple[Manifest, dict[str, bytes]]:
    """Return manifest and files of a snapshot, every byte checked.

    Raises:
        SnapshotError: It is missing, damaged, of another format or version, or too large.
    """
    manifest = read_manifest(folder)
    contents = {}
    for name, entry in manifest.files.items():
        if not (folder / name).is_file():
            raise damaged(str(folder), f"{name} is missing")
        contents[name] = _read(folder / name, entry.bytes)
        check_file(name, entry, contents[name], str(folder))
    return manifest, contents


def write_folder(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write a folder with these files at once; repair one that exists and is damaged.

    Raises:
        SnapshotError: It cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder.parent)
        _write_folder(folder, contents)
    except OSError as error:
        raise SnapshotError(f"cannot write the snapshot to {folder.parent}: {error}") from error


def damaged(place: str, reason: str) -> SnapshotError:
    return SnapshotError(f"snapshot {place} is damaged: {reason}; pull or publish it again")


def _write_folder(folder: Path, contents: Mapping[str, bytes]) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder.parent))
    try:
        for name, data in contents.items():
            with (unfinished / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        unfinished.chmod(0o755)
        try:
            unfinished.replace(folder)
        except OSError:
            if not (folder / MANIFEST).is_file():
                raise
            _mend(folder, unfinished)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _mend(folder: Path, whole: Path) -> None:
    """Move the files of a whole snapshot into a damaged folder of it."""
    wanted = read_manifest(whole).id
    with contextlib.suppress(SnapshotError):
        if read_whole(folder)[0].id == wanted:
            return
    for path in sorted(whole.iterdir(), key=lambda path: path.name == MANIFEST):
        path.replace(folder / path.name)


def _remove_stale(registry: Path) -> None:
    """Remove unfinished folders of killed processes."""
    for folder in registry.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError):  # removed by another process, or not permitted
            if time.time() - folder.stat().st_mtime > STALE_S:
                shutil.rmtree(folder)


def _read(path: Path, limit: int) -> bytes:
    """Return the bytes of a plain file of limited size."""
    try:
        return read_plain(path, limit)
    except InputError as error:
        raise damaged(str(path.parent), str(error)) from error


def _content_id(manifest: Mapping[str, Any]) -> str:
    """Return 20 hexadecimal digits for everything except when it was made."""
    return _checksum({k: v for k, v in manifest.items() if k not in _NOT_IN_ID})[:20]


def _checksum(manifest: Mapping[str, Any]) -> str:
    content = {k: v for k, v in manifest.items() if k != "checksum"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
