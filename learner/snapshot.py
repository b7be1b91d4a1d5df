"""Snapshots: encoder and heads as files that can be checked, moved, and run no code when loaded.

    <registry>/<id>/manifest.json         what it is, how good, from which labels, and checksums
                    encoder.safetensors
                    heads-<device>.safetensors

A snapshot is written beside its place and moved there in one step, and never changed: its id is a
hash of its content. Whoever loads it checks every byte against the manifest first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from learner.heads import heads_from_tensors
from learner.networks.gae import Encoder
from learner.networks.presets import EncoderPreset, HeadPreset, LearnerPreset
from learner.predictions import DeviceHeads, Predictions
from learner.workload import Workload
from profiler.errors import SnapshotError, one_line
from profiler.records import METRICS, Provenance

FORMAT = "trappm-snapshot"
FORMAT_VERSION = 2
"""2: heads of physics and residual, beside networks."""
MANIFEST = "manifest.json"
ENCODER = "encoder.safetensors"

MAX_MANIFEST_BYTES = 16 << 20
MAX_FILE_BYTES = 2 << 30
MAX_FILES = 256

STALE_S = 24 * 3600.0
"""A folder that has been unfinished for longer belongs to a process that was killed."""

_UNFINISHED = ".unfinished-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_NOT_IN_ID = ("id", "created_at", "checksum")


class Label(Protocol):
    """What a snapshot tells of each label that it was trained on."""

    @property
    def configuration_id(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def values(self) -> tuple[float | None, ...]: ...
    @property
    def provenance(self) -> str: ...


@dataclass(frozen=True)
class SnapshotInfo:
    """A snapshot on disk."""

    id: str
    folder: Path
    manifest: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A loaded snapshot, ready to predict."""

    id: str
    manifest: Mapping[str, Any]
    encoder: Encoder
    heads: Mapping[str, DeviceHeads]
    source_device: str

    def predict(self, workloads: Sequence[Workload], device: str) -> Predictions:
        """What the heads of this device say of the workloads.

        Raises:
            SnapshotError: there are no heads for the device.
        """
        if device not in self.heads:
            raise SnapshotError(
                f"snapshot {self.id} has no head for device {device!r}; "
                f"it has: {', '.join(sorted(self.heads))}"
            )
        heads = self.heads[device]
        if heads.needs_embeddings and workloads:
            rows = self.encoder.embed([workload.graph for workload in workloads])
            workloads = [
                replace(workload, embedding=row)
                for workload, row in zip(workloads, rows, strict=True)
            ]
        return heads.predict(workloads)


def save_snapshot(
    registry: Path,
    *,
    encoder: Encoder,
    heads: Mapping[str, DeviceHeads],
    source_device: str,
    preset: LearnerPreset,
    labels: Sequence[Label],
    fields: Mapping[str, Any],
) -> SnapshotInfo:
    """Writes a snapshot into `<registry>/<id>`; one that is already there is left as it is.

    Args:
        registry: the folder of all snapshots; made if it is missing.
        encoder: the frozen encoder.
        heads: by device.
        source_device: the device that is meant when none is named; must have heads.
        preset: of encoder and heads.
        labels: those that the heads were trained on.
        fields: more for the manifest, as JSON values: campaign, errors with their split, and such.

    Raises:
        SnapshotError: a simulated label, no head for the source device, a device key that cannot
            be a file name, a field that the manifest already has, or a folder that cannot be
            written.
    """
    counts = _count_labels(labels)
    simulated = Provenance.SIMULATED.value
    if any(simulated in c for c in counts.values()) or fields.get("label_counts", {}).get(
        simulated
    ):
        raise SnapshotError("simulated labels never train a published snapshot; leave them out")
    if source_device not in heads:
        raise SnapshotError(f"there is no head for the source device {source_device!r} to save")
    contents = {ENCODER: save_tensors(_contiguous(encoder.tensors()))}
    for device in heads:
        if not _NAME.fullmatch(device):
            raise SnapshotError(f"device key {device!r} cannot be part of a file name")
        contents[f"heads-{device}.safetensors"] = save_tensors(_contiguous(heads[device].tensors()))
    own = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "source_device": source_device,
        "preset": dataclasses.asdict(preset),
        "heads": {device: head.settings() for device, head in sorted(heads.items())},
        "units": dict(METRICS),
        "training_labels": {"counts": counts, "sha256": label_set_hash(labels)},
        "versions": _versions(),
        "files": {
            name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
            for name, data in sorted(contents.items())
        },
    }
    clash = sorted(set(fields) & {*own, "id", "checksum"})
    if clash:
        raise SnapshotError(f"the manifest has a field {clash[0]!r} of its own")
    manifest = json.loads(json.dumps({**fields, **own}, allow_nan=False))
    manifest["id"] = _content_id(manifest)
    manifest["checksum"] = _checksum(manifest)
    contents[MANIFEST] = json.dumps(manifest, indent=2, sort_keys=True).encode()
    folder = registry / manifest["id"]
    try:
        registry.mkdir(parents=True, exist_ok=True)
        _remove_stale(registry)
        _write_folder(folder, contents)
    except OSError as error:
        raise SnapshotError(f"cannot write the snapshot to {registry}: {error}") from error
    return SnapshotInfo(manifest["id"], folder, _read_manifest(folder))


def load_snapshot(folder: Path) -> Snapshot:
    """Reads a snapshot, after checking every byte against the manifest.

    Raises:
        SnapshotError: missing, damaged, truncated, of another format or version, or too large.
    """
    manifest = _read_manifest(folder)
    contents = {
        name: _read_checked(folder, name, entry) for name, entry in manifest["files"].items()
    }
    try:
        encoder_preset, head_preset = _presets(manifest["preset"])
        encoder = Encoder.from_tensors(encoder_preset, load_tensors(contents[ENCODER]))
        heads = {
            device: heads_from_tensors(
                head_preset, settings, load_tensors(contents[f"heads-{device}.safetensors"])
            )
            for device, settings in manifest["heads"].items()
        }
        source_device = str(manifest["source_device"])
    except (
        KeyError,
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
        SafetensorError,
    ) as error:
        raise SnapshotError(
            f"snapshot {folder} does not fit this version of trappm: {one_line(error)}"
        ) from error
    return Snapshot(manifest["id"], manifest, encoder, heads, source_device)


def copy_snapshot(source: Path, to: Path) -> SnapshotInfo:
    """Copies a snapshot to a new folder, checking every byte on the way.

    Raises:
        SnapshotError: the source is no whole snapshot, or `to` exists or cannot be written.
    """
    manifest = _read_manifest(source)
    contents = {
        name: _read_checked(source, name, entry) for name, entry in manifest["files"].items()
    }
    contents[MANIFEST] = _read(source / MANIFEST, MAX_MANIFEST_BYTES)
    if to.exists():
        raise SnapshotError(f"{to} is already there; name a new folder")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        _write_folder(to, contents)
    except OSError as error:
        raise SnapshotError(f"cannot write the snapshot to {to}: {error}") from error
    return SnapshotInfo(manifest["id"], to, manifest)


def label_set_hash(labels: Sequence[Label]) -> str:
    """64 hexadecimal digits, equal for equal sets of labels in any order."""
    rows = sorted(
        json.dumps([x.device, x.configuration_id, list(x.values), x.provenance]) for x in labels
    )
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def _count_labels(labels: Sequence[Label]) -> dict[str, dict[str, int]]:
    """Labels by device and provenance."""
    counts: dict[str, dict[str, int]] = {}
    for label in labels:
        by_provenance = counts.setdefault(label.device, {})
        name = str(label.provenance)
        by_provenance[name] = by_provenance.get(name, 0) + 1
    return counts


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("trappm", "torch", "torch-geometric", "numpy", "safetensors"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _write_folder(folder: Path, contents: Mapping[str, bytes]) -> None:
    """The folder with these files, all at once; one that another process made first stays."""
    unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder.parent))
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
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _remove_stale(registry: Path) -> None:
    """Removes what processes that were killed while they wrote have left behind."""
    for folder in registry.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours to remove
            if time.time() - folder.stat().st_mtime > STALE_S:
                shutil.rmtree(folder)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise SnapshotError(f"{folder} is not a snapshot: it has no {MANIFEST}")
    try:
        manifest = json.loads(_read(path, MAX_MANIFEST_BYTES))
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, f"{MANIFEST} is not valid JSON") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise SnapshotError(f"{path} is not the manifest of a TraPPM snapshot")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise SnapshotError(
            f"snapshot {folder} has format version {manifest.get('format_version')!r}, and this "
            f"version of trappm reads {FORMAT_VERSION}; upgrade trappm or publish it again"
        )
    sound = manifest.get("checksum") == _checksum(manifest)
    if not sound or manifest.get("id") != _content_id(manifest):
        raise _damaged(folder, f"{MANIFEST} does not match its own checksum")
    files = manifest.get("files")
    if not isinstance(files, dict) or not 0 < len(files) <= MAX_FILES:
        raise _damaged(folder, "its list of files cannot be right")
    return manifest


def _read_checked(folder: Path, name: str, entry: Any) -> bytes:
    """The bytes of one file of a snapshot, if they are those that the manifest tells of."""
    if not _NAME.fullmatch(name) or not isinstance(entry, dict):
        raise _damaged(folder, f"it names a file {name!r}")
    path = folder / name
    if not path.is_file():
        raise _damaged(folder, f"{name} is missing")
    data = _read(path, MAX_FILE_BYTES)
    if len(data) != entry.get("bytes"):
        raise _damaged(folder, f"{name} has {len(data)} bytes, not {entry.get('bytes')}")
    if hashlib.sha256(data).hexdigest() != entry.get("sha256"):
        raise _damaged(folder, f"{name} does not match its checksum")
    return data


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error}") from error
    if len(data) > limit:
        raise SnapshotError(f"{path} has more than {limit} bytes, too much for a snapshot")
    return data


def _damaged(folder: Path, what: str) -> SnapshotError:
    return SnapshotError(f"snapshot {folder} is damaged: {what}; pull or publish it again")


def _presets(preset: Mapping[str, Any]) -> tuple[EncoderPreset, HeadPreset]:
    def tuples(values: Mapping[str, Any]) -> dict[str, Any]:
        return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}

    return EncoderPreset(**tuples(preset["encoder"])), HeadPreset(**tuples(preset["head"]))


def _content_id(manifest: Mapping[str, Any]) -> str:
    """20 hexadecimal digits: of everything but when it was made."""
    return _checksum({k: v for k, v in manifest.items() if k not in _NOT_IN_ID})[:20]


def _checksum(manifest: Mapping[str, Any]) -> str:
    content = {k: v for k, v in manifest.items() if k != "checksum"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _contiguous(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
