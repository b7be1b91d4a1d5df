"""Snapshots: heads, and the encoder of those that need one, as files that run no code when loaded.

Heads are stored by device and phase, each with the settings (precision, layout, optimizer) of its
labels. A snapshot is written in one step and never changed. Loading checks every byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from trappm.learner.heads.physics_heads import (
    STEPS_BASIS,
    Basis,
    Heads,
    OtherDevices,
    heads_from_tensors,
)
from trappm.learner.interface import DeviceHeads, Predictions, TrainedHeads, TrainingLabel, Workload
from trappm.learner.paper.presets import EncoderPreset, HeadPreset, LearnerPreset
from trappm.learner.physics.memory import CONVOLUTION_FEATURES, FEATURE_GROUPS
from trappm.learner.physics.prior import OPERATORS
from trappm.learner.physics.step_time import GROUPS, SHARE_GROUPS
from trappm.learner.snapshots.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    NAME,
    OTHER_DEVICES_FILE,
    Manifest,
    PresetEntry,
    entries,
    label_set_hash,
    manifest_bytes,
    read_manifest,
    read_whole,
    seal,
    write_folder,
)
from trappm.profiler.devices.catalogue import CPU, known_spec, read_name
from trappm.profiler.errors import SnapshotError, one_line
from trappm.profiler.graphs import features
from trappm.profiler.host.environment import code_commit
from trappm.profiler.records import (
    METRICS,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
    Provenance,
    StepSettings,
)
from trappm.profiler.traced_step import KernelKind, Size

if TYPE_CHECKING:
    from trappm.learner.paper.encoder import Encoder

ENCODER = "encoder.safetensors"
ALL_PHASES = "all"
"""Name of a file that all phases of a device share."""

_MISFITS = (KeyError, RuntimeError, TypeError, ValueError, AttributeError, SafetensorError)
"""Errors of tensors and settings that do not fit together."""

FEATURE_VERSIONS = {"graph": 1, "memory": 1, "kernels": 4}
"""Versions of the features, which processes and constants identify by position only.
Increase one when code computes different values under the same names and shapes
(`tests/learner/physics/test_kernel_features.py` has the values of each version)."""


@cache
def feature_schema() -> dict[str, str]:
    """Return a short hash of the features of each part: graphs, memory, kernels."""
    schema = {
        "graph": (FEATURE_VERSIONS["graph"], features.OPERATORS, OPERATORS),
        "memory": (FEATURE_VERSIONS["memory"], FEATURE_GROUPS, CONVOLUTION_FEATURES),
        "kernels": (
            FEATURE_VERSIONS["kernels"],
            [kind.name for kind in KernelKind],
            [size.name for size in Size],
            [(group.name, group.shape) for group in GROUPS],
            SHARE_GROUPS,
        ),
    }
    return {
        name: hashlib.sha256(repr(value).encode()).hexdigest()[:16]
        for name, value in schema.items()
    }


@dataclass(frozen=True)
class SnapshotInfo:
    """A snapshot on disk."""

    id: str
    folder: Path
    manifest: Manifest


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A loaded snapshot, ready to predict."""

    id: str
    manifest: Manifest
    heads: Mapping[str, Mapping[Phase, TrainedHeads]]
    """Heads by device and phase."""
    source_device: str
    encoder_bytes: bytes | None = None
    cards: Mapping[str, str] = field(default_factory=dict)
    """Card behind a device's key, where measurements have named it."""
    others: OtherDevices | None = None
    """Heads of cards, and of metrics, without labels."""

    def card(self, device: str) -> str:
        """Return the catalogue's key of a device."""
        return self.cards.get(device, device)

    def trained(self, device: str, phase: Phase) -> TrainedHeads:
        """Return the heads of a device and phase.

        Metrics without labels have heads of the same card in another form, or of all cards.

        Raises:
            SnapshotError: There are none.
        """
        own, card = self._find_labelled(device, phase), self.card(device)
        if self.others is not None and own is not None:
            return self.others.completed(own, card, phase)
        own = own or (None if self.others is None else self.others.heads(card, phase))
        if own is not None:
            return own
        if device not in self.heads:
            raise SnapshotError(
                f"snapshot {self.id} has no head for device {device!r}; "
                f"it has: {', '.join(sorted(self.heads))}"
            )
        raise SnapshotError(
            f"snapshot {self.id} has no head for {phase} steps on {device}; "
            f"it has: {', '.join(sorted(self.heads[device]))}"
        )

    def _find_labelled(self, device: str, phase: Phase) -> TrainedHeads | None:
        """Return heads of the device, or of its card in another form (a V100 of 32 GB for 16 GB).

        A form of another speed shares memory only.
        """
        key = self._key(device, phase)
        trained = self.heads.get(key, {}).get(phase)
        alike = known_spec(self.card(device)) == known_spec(self.card(key))
        if trained is None or key == device or alike or not isinstance(trained.heads, Heads):
            return trained
        memory = {m: head for m, head in trained.heads.heads.items() if m == "memory_mib"}
        if not memory:
            return None
        return replace(trained, heads=Heads(memory, trained.heads.label_count))

    def _key(self, device: str, phase: Phase) -> str:
        """Return the device with the heads: another form of the same card if it has none."""
        name = read_name(self.card(device))
        if self.others is None or phase in self.heads.get(device, {}) or name.part:
            return device
        forms = (k for k in sorted(self.heads) if read_name(self.card(k)).model == name.model)
        alike = (k for k in forms if name.model and not read_name(self.card(k)).part)
        return next((key for key in alike if phase in self.heads[key]), device)

    def bases(self, device: str, phase: Phase) -> dict[str, str]:
        """Return the basis of each metric's predictions that is not labels of this device."""
        if self.others is None:
            return {}
        key, own = self._key(device, phase), self._find_labelled(device, phase)
        labelled = () if own is None else own.heads.metrics
        bases = {} if key == device else dict.fromkeys(labelled, f"labels of {key}")
        if known_spec(device) is CPU and self.manifest.campaign is None:
            return dict.fromkeys(labelled, _OTHER_CORES)
        for metric in self.trained(device, phase).heads.metrics:
            if metric == "memory_mib" and metric not in labelled:
                bases[metric] = "the simulated step alone"
            elif metric not in labelled:
                bases[metric] = _BASES[self.others.basis(self.card(device)) or Basis.SPECIFICATION]
        return bases

    def predict(
        self, workloads: Sequence[Workload], device: str, phase: Phase = Phase.TRAIN,
        heads: DeviceHeads | None = None,
    ) -> Predictions:  # fmt: skip
        """Predict with the heads of a device and phase, or with the given ones.

        Raises:
            SnapshotError: There are no heads.
        """
        heads = heads or self.trained(device, phase).heads
        if heads.needs_embeddings and workloads:
            rows = self.encoder.embed([workload.graph for workload in workloads])
            workloads = [
                replace(workload, embedding=row)
                for workload, row in zip(workloads, rows, strict=True)
            ]
        return heads.predict(workloads)

    @cached_property
    def encoder(self) -> Encoder:
        """Frozen encoder, read on first use.

        Raises:
            SnapshotError: There is none, or it does not fit this version.
        """
        from trappm.learner.paper.encoder import Encoder

        if self.encoder_bytes is None:
            raise SnapshotError(f"snapshot {self.id} has no encoder")
        try:
            preset, _ = _presets(self.manifest.preset)
            return Encoder.from_tensors(preset, load_tensors(self.encoder_bytes))
        except _MISFITS as error:
            raise _misfit(self.id, error) from error


_OTHER_CORES = "labels of other machines' cores"
_BASES = {
    Basis.STEPS: STEPS_BASIS,
    Basis.KERNELS: "kernels of this card and other cards' labels",
    Basis.SPECIFICATION: "this card's data sheet and other cards' labels",
}


def save_snapshot(
    registry: Path,
    *,
    encoder: Encoder | None = None,
    others: OtherDevices | None = None,
    heads: Mapping[str, Mapping[Phase, TrainedHeads]],
    source_device: str,
    preset: LearnerPreset,
    labels: Sequence[TrainingLabel],
    fields: Mapping[str, Any],
) -> SnapshotInfo:
    """Write a snapshot into `<registry>/<id>`, unless it is already there.

    Args:
        registry: Folder of all snapshots.
        encoder, others: Encoder if a head needs it; heads of cards without labels, or none.
        heads: Heads by device and phase.
        source_device: Default device of predictions, with heads.
        preset, labels: Preset of encoder and heads, and training labels.
        fields: More fields of the manifest as JSON values, such as errors.

    Raises:
        SnapshotError: A label is simulated, the source device has no head, a device key cannot be
            a file name, a field exists twice, or the folder cannot be written.
    """
    counts = _count_labels(labels)
    simulated = Provenance.SIMULATED.value
    if any(simulated in c for c in counts.values()) or fields.get("label_counts", {}).get(
        simulated
    ):
        raise SnapshotError("simulated labels never train a published snapshot; leave them out")
    if source_device not in heads:
        raise SnapshotError(f"there is no head for the source device {source_device!r} to save")
    contents = _contents(encoder, heads)
    if others is not None:
        contents[OTHER_DEVICES_FILE] = _save(others.tensors())
    own = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "source_device": source_device,
        "preset": dataclasses.asdict(preset),
        "heads": _settings(heads),
        "units": dict(METRICS),
        "feature_schema": feature_schema(),
        "training_labels": {"counts": counts, "sha256": label_set_hash(labels)},
        "versions": _versions(),
        "files": entries(contents),
    }
    clash = sorted(set(fields) & {*own, "id", "checksum"})
    if clash:
        raise SnapshotError(f"the manifest has a field {clash[0]!r} of its own")
    manifest = seal({**fields, **own})
    folder = registry / manifest["id"]
    write_folder(folder, {**contents, MANIFEST: manifest_bytes(manifest)})
    return SnapshotInfo(manifest["id"], folder, read_manifest(folder))


def _contents(
    encoder: Encoder | None, heads: Mapping[str, Mapping[Phase, TrainedHeads]]
) -> dict[str, bytes]:
    """Return the files of tensors by name; phases with equal heads share one file."""
    contents = {} if encoder is None else {ENCODER: _save(encoder.tensors())}
    for device, phases in heads.items():
        if not NAME.fullmatch(device):
            raise SnapshotError(f"device key {device!r} cannot be part of a file name")
        named = {str(phase): trained.heads for phase, trained in phases.items()}
        if len(named) > 1 and len({_save(heads.tensors()) for heads in named.values()}) == 1:
            named = {ALL_PHASES: next(iter(named.values()))}
        contents |= {
            _file(device, phase): _save(heads.tensors(), _identity(device, phase, heads.metrics))
            for phase, heads in named.items()
        }
    return contents


def _identity(device: str, phase: str, metrics: Sequence[str]) -> dict[str, str]:
    """Return the metadata of a file of heads, so that it is refused elsewhere.

    It is one entry, because safetensors writes several in any order.
    """
    return {"heads": f"{device} {phase} {','.join(sorted(metrics))}"}


def _refuse_other_heads(data: bytes, identity: Mapping[str, str]) -> None:
    """Raise ValueError for a file of heads of another device, phase or metrics.

    safetensors returns the metadata of files on disk only; the header is its documented format.
    """
    size = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + size]).get("__metadata__", {})
    if metadata != identity:
        raise ValueError(
            f"a file has the heads {metadata.get('heads')!r} in place of {identity['heads']!r}"
        )


def _settings(heads: Mapping[str, Mapping[Phase, TrainedHeads]]) -> dict[str, Any]:
    """Return the manifest's entries for heads, by device and phase."""
    return {
        device: {
            phase.value: {
                **trained.heads.settings(),
                "label_settings": [[str(x) for x in row[:3]] for row in trained.settings],
            }
            for phase, trained in sorted(phases.items())
        }
        for device, phases in sorted(heads.items())
    }


def load_snapshot(folder: Path) -> Snapshot:
    """Load a snapshot after checking every byte against the manifest.

    Raises:
        SnapshotError: It is missing, damaged, of another format or version, or too large, or heads
            are those of another device, phase or metric.
    """
    manifest, contents = read_whole(folder)
    ours = feature_schema()
    other = [name for name in ours if manifest.feature_schema.get(name) != ours[name]]
    if other:
        raise _misfit(str(folder), ValueError(f"it saw other features of {' and '.join(other)}"))
    try:
        heads = {
            device: {phase: _trained(manifest, contents, device, phase) for phase in phases}
            for device, phases in manifest.heads.items()
        }
        others = None
        if OTHER_DEVICES_FILE in contents:
            others = OtherDevices.from_tensors(load_tensors(contents[OTHER_DEVICES_FILE]))
    except _MISFITS as error:
        raise _misfit(str(folder), error) from error
    return Snapshot(
        manifest.id,
        manifest,
        heads,
        manifest.source_device,
        contents.get(ENCODER),
        manifest.cards,
        others,
    )


def _trained(
    manifest: Manifest, contents: Mapping[str, bytes], device: str, phase: Phase
) -> TrainedHeads:
    """Return the heads of a device and phase.

    Where all labels of the device were published by others, its memory is that of a plain process.
    Imported labels of a campaign or a calibration are the user's own.
    """
    entry = manifest.heads[device][phase]
    file_phase = phase.value if _file(device, phase) in contents else ALL_PHASES
    data = contents[_file(device, file_phase)]
    _, head_preset = _presets(manifest.preset)
    heads = heads_from_tensors(head_preset, entry.model_dump(), load_tensors(data))
    _refuse_other_heads(data, _identity(device, file_phase, heads.metrics))
    provenances = manifest.training_labels.counts.get(device, {})
    is_published = manifest.campaign is None and {*provenances} == {Provenance.IMPORTED}
    if isinstance(heads, Heads) and is_published:
        heads = heads.of_published_labels(manifest.cards.get(device, device), phase)
    return TrainedHeads(heads, tuple(_step_settings(row) for row in entry.label_settings))


def copy_snapshot(source: Path, to: Path) -> SnapshotInfo:
    """Copy a snapshot to a new folder, checking every byte.

    Raises:
        SnapshotError: The source is damaged, or `to` exists or cannot be written.
    """
    manifest, contents = read_whole(source)
    if to.exists():
        raise SnapshotError(f"{to} is already there; name a new folder")
    write_folder(to, {**contents, MANIFEST: manifest_bytes(manifest.to_json())})
    return SnapshotInfo(manifest.id, to, manifest)


def _count_labels(labels: Sequence[TrainingLabel]) -> dict[str, dict[str, int]]:
    """Return the number of labels by device and provenance."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for label in labels:
        counts[label.device][str(label.provenance)] += 1
    return {device: dict(of_device) for device, of_device in counts.items()}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("trappm", "torch", "torch-geometric", "numpy", "safetensors"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    commit = code_commit().name
    return versions if commit is None else {**versions, "commit": commit}


def _file(device: str, phase: str) -> str:
    return f"heads-{device}-{phase}.safetensors"


def _save(tensors: Mapping[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    return save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)


def _step_settings(row: Sequence[str]) -> StepSettings:
    precision, memory_format, optimizer = row
    return StepSettings(Precision(precision), MemoryFormat(memory_format), Optimizer(optimizer))


def _misfit(place: str, error: Exception) -> SnapshotError:
    return SnapshotError(
        f"snapshot {place} does not fit this version of trappm: {one_line(error)}; "
        "publish it again with this version"
    )


def _presets(preset: PresetEntry) -> tuple[EncoderPreset, HeadPreset]:
    def tuples(values: Mapping[str, Any]) -> dict[str, Any]:
        return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}

    return EncoderPreset(**tuples(preset.encoder)), HeadPreset(**tuples(preset.head))
