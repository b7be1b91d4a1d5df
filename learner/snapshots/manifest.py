"""A snapshot's files: manifest, checksums, and folders that appear all at once.

    <id>/manifest.json                       contents, errors, labels, and checksums
         encoder.safetensors                 only where some heads need it
         heads-<device>-<phase>.safetensors  `all` where all phases of a device have the same

A snapshot's id is a hash of its content, so it never changes. Bytes are checked before use.
A checksum shows damage, not intent: anyone who can write into a registry can seal a manifest of any
content. Fields that are not named here are not read.
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
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
)

from trappm.profiler.devices.catalogue import card_of, read_name
from trappm.profiler.errors import InputError, SnapshotError
from trappm.profiler.files import read_plain
from trappm.profiler.records import METRICS, Phase

if TYPE_CHECKING:
    from trappm.learner.interface import TrainingLabel

MAX_SNAPSHOT_BYTES = 256 << 20
"""Limit of all files together; the shipped snapshot has 10 MiB."""
MAX_PARTS = 32
MAX_LOG_CONSTANT = 20.0
MAX_FILES = 256
MAX_FAMILIES = 10_000
MAX_DEVICES = 1000


def _time(text: str) -> str:
    datetime.fromisoformat(text)
    return text


def _metric(text: str) -> str:
    if text not in METRICS:
        raise ValueError(f"no metric; those are {', '.join(METRICS)}")
    return text


_Metric = Annotated[str, AfterValidator(_metric)]


def _files(entries: dict[str, FileEntry]) -> dict[str, FileEntry]:
    if sum(entry.bytes for entry in entries.values()) > MAX_SNAPSHOT_BYTES:
        raise ValueError(f"more than {MAX_SNAPSHOT_BYTES >> 20} MiB together")
    return entries


def _cards(cards: dict[str, str]) -> dict[str, str]:
    """Refuse another card for a device, and so for its heads' files, than its own name says."""
    for device, card in cards.items():
        if card_of(device) and card_of(card) and read_name(device).model != read_name(card).model:
            raise ValueError(f"{device} is no {card}")
    return cards


def _printable(text: str) -> str:
    """Refuse what would control the terminal that it is printed on."""
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


_Short = Annotated[str, StringConstraints(max_length=1000), AfterValidator(_printable)]
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]
_Count = Annotated[int, Field(ge=0, le=2**53)]
_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Number = Annotated[int, Field(ge=-(2**53), le=2**53)] | float
_Numbers = dict[str, _Number | None]
_ShortTexts = dict[str, _Short]


class _Record(BaseModel):
    """Part of a manifest; more fields are allowed."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class FileEntry(_Record):
    """Checksum and size of a file."""

    sha256: _Sha256
    bytes: _Count


class HeadEntry(_Record):
    """Heads of one device and phase; further fields are settings of their kind."""

    kind: _Short
    label_count: _Count
    label_settings: list[tuple[_Short, _Short, _Short]]
    metrics: list[_Metric]


class MetricErrors(_Record):
    """Errors of one head on architectures that it had not seen, in percent unless named."""

    __pydantic_extra__: _Numbers
    count: _Number | None = None
    mape: _Number | None = None
    by_family: dict[str, _Numbers] | None = None
    reliability: _Numbers | None = None
    """Coverage in percent, by the nominal coverage in percent."""

    def number(self, name: str) -> float | None:
        """Return a figure such as `coverage`; None if it is missing."""
        value: float | None = self.model_dump(exclude={"by_family", "reliability"}).get(name)
        return value


class PresetEntry(_Record):
    """Preset of encoder and heads, with its numbers."""

    name: _Short
    encoder: dict[str, bool | _Number | Annotated[list[int], Field(max_length=32)]]
    head: dict[str, bool | _Number | _Short | Annotated[list[int], Field(max_length=32)]]


class _LabelCounts(_Record):
    counts: dict[str, dict[str, _Count]]
    sha256: _Sha256


class _LabelSource(_Record):
    labels: _Count
    file: _Short
    source: _Short


_Constant = Annotated[float, Field(ge=-MAX_LOG_CONSTANT, le=MAX_LOG_CONSTANT)]


class CompiledRatio(_Record):
    """Step time under `torch.compile` relative to eager steps, from measured pairs."""

    log_ratio: float
    """Logarithm of the median ratio."""
    log_error: float
    """Bound of the logarithmic error of a step, with 90 % probability."""
    pairs: _Count
    constants: Annotated[tuple[_Constant, ...], Field(max_length=MAX_PARTS)] = ()
    """Logarithms of `compiled_step.PARTS`, if the ratio is that of fused kernels."""
    families: Annotated[dict[_Name, _Constant], Field(max_length=MAX_FAMILIES)] = {}
    """Logarithms that are added to the ratio, by family of architectures."""


class Manifest(_Record):
    """Contents of a snapshot, its errors, training labels and files."""

    id: _Short
    created_at: Annotated[str, AfterValidator(_time)]
    files: Annotated[
        dict[_Name, FileEntry], Field(min_length=1, max_length=MAX_FILES), AfterValidator(_files)
    ]
    heads: dict[_Name, dict[Phase, HeadEntry]]
    source_device: _Name
    preset: PresetEntry
    training_labels: _LabelCounts
    units: _ShortTexts
    feature_schema: _ShortTexts
    versions: _ShortTexts
    errors: dict[str, dict[Phase, dict[_Metric, MetricErrors]]] | None = None
    """Errors by device and phase; equal for phases that were judged together."""
    sources: list[_LabelSource] = []
    campaign: _Short | None = None
    compiled: dict[_Name, dict[Phase, CompiledRatio]] = {}
    """Ratios of compiled steps by device and phase."""
    parent: _Short | None = None
    split: _Short | None = None
    label_counts: dict[str, _Count] = {}
    cards: Annotated[dict[_Name, _Short], AfterValidator(_cards)] = {}
    families: Annotated[list[_Short], Field(max_length=MAX_FAMILIES)] | None = None
    """Families of the models in a campaign's pool."""
    _json: dict[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls, values: dict[str, Any], data: bytes) -> Self:
        """Return the record of a manifest, given as JSON values and as their text.

        Raises:
            pydantic.ValidationError: A field is invalid.
        """
        manifest = cls.model_validate_json(data, strict=True)
        manifest._json = values
        return manifest

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as it was written, with unknown fields."""
        return self._json


FORMAT = "trappm-snapshot"
FORMAT_VERSION = 6
"""6: files of heads name their device, phase and metrics."""
OTHER_DEVICES_FILE = "other-devices.safetensors"
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


def label_set_hash(labels: Sequence[TrainingLabel]) -> str:
    """Return 64 hexadecimal digits, equal for equal sets of labels in any order."""
    rows = sorted(
        json.dumps([x.device, x.configuration_id, list(x.values), x.provenance]) for x in labels
    )
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
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


def parse_manifest(data: bytes, place: str) -> Manifest:
    """Return the manifest in bytes that were found at `place`.

    Raises:
        SnapshotError: It is damaged, of something else, or of another format version.
    """
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damage_error(place, f"{MANIFEST} is not valid JSON") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise SnapshotError(
            f"{place}/{MANIFEST} is not the manifest of a TraPPM snapshot; "
            "see: trappm snapshot show"
        )
    if manifest.get("format_version") != FORMAT_VERSION:
        raise SnapshotError(
            f"snapshot {place} has format version {manifest.get('format_version')!r}, and this "
            f"version of trappm reads {FORMAT_VERSION}; upgrade trappm or publish it again"
        )
    for part in ("heads", "cards", "errors"):
        count = len(manifest[part]) if isinstance(manifest.get(part), dict) else 0
        if count > MAX_DEVICES:  # before their entries are read
            raise damage_error(place, f"{part} has {count:,} devices; at most {MAX_DEVICES:,}")
    sound = manifest.get("checksum") == _checksum(manifest)
    if not sound or manifest.get("id") != _content_id(manifest):
        raise damage_error(place, f"{MANIFEST} does not match its own checksum")
    try:
        checked = Manifest.of(manifest, data)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part)[:60] for part in fault["loc"])
        raise damage_error(place, f"in {MANIFEST} is {where}: {fault['msg']}") from None
    if MANIFEST in checked.files:
        raise damage_error(place, f"it names a file {MANIFEST!r}")
    return checked


def check_file(name: str, entry: FileEntry, data: bytes, place: str) -> None:
    """Raise SnapshotError for bytes that differ from the manifest's entry."""
    if len(data) != entry.bytes:
        raise damage_error(place, f"{name} has {len(data)} bytes, not {entry.bytes}")
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise damage_error(place, f"{name} does not match its checksum")


def read_manifest(folder: Path) -> Manifest:
    """Return a folder's manifest; raise SnapshotError if it is missing or damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        raise SnapshotError(
            f"{folder} is not a snapshot: it has no {MANIFEST}; see: trappm snapshot show"
        )
    return parse_manifest(_read(path, MAX_MANIFEST_BYTES), str(folder))


def read_whole(folder: Path) -> tuple[Manifest, dict[str, bytes]]:
    """Return manifest and files of a snapshot, every byte checked.

    Raises:
        SnapshotError: It is missing, damaged, of another format or version, or too large.
    """
    manifest = read_manifest(folder)
    contents = {}
    for name, entry in manifest.files.items():
        if not (folder / name).is_file():
            raise damage_error(str(folder), f"{name} is missing")
        contents[name] = _read(folder / name, entry.bytes)
        check_file(name, entry, contents[name], str(folder))
    return manifest, contents


def write_folder(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write a folder with these files at once, unless it is already there.

    Raises:
        SnapshotError: It cannot be written, or the one that is there is damaged.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder.parent)
        _write_folder(folder, contents)
    except OSError as error:
        raise SnapshotError(f"cannot write the snapshot to {folder.parent}: {error}") from error


def damage_error(place: str, reason: str) -> SnapshotError:
    return SnapshotError(
        f"snapshot {place} is damaged: {reason}; remove it, then pull or publish it again"
    )


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
            read_whole(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


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
        raise damage_error(str(path.parent), str(error)) from error


def _content_id(manifest: Mapping[str, Any]) -> str:
    """Return 20 hexadecimal digits for everything except when it was made."""
    return _checksum({k: v for k, v in manifest.items() if k not in _NOT_IN_ID})[:20]


def _checksum(manifest: Mapping[str, Any]) -> str:
    content = {k: v for k, v in manifest.items() if k != "checksum"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
