"""Selection of what answers a question: devices by their names, snapshots, heads, and settings.

Devices have many names, such as `a100` or `NVIDIA GeForce RTX 3090`, and one key in a snapshot.

The snapshot that predicts is the named one, else the latest, else the shipped one. For devices and
phases that the latest one has no heads for, the earlier ones come next, so a campaign on another
device takes nothing away. Names are those of the local registry, the folder `snapshots` of
TRAPPM_HOME; `default` is the shipped one. Nothing here needs SQL, and only the location of another
registry, which means its latest, needs a network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trappm.learner.snapshots.manifest import MANIFEST, OTHER_DEVICES_FILE, read_manifest
from trappm.profiler.devices.catalogue import (
    arithmetic_of,
    card_capacity_mib,
    card_keys,
    card_of,
    cards,
    rank_key,
    read_name,
)
from trappm.profiler.errors import InputError, SnapshotError, nearest
from trappm.profiler.extensions import extension_modules
from trappm.profiler.host.environment import data_folder
from trappm.profiler.models.known_names import is_prefixed
from trappm.profiler.records import (
    Execution,
    Optimizer,
    Phase,
    Precision,
    StepSettings,
    is_cpu_device,
)

if TYPE_CHECKING:
    from trappm.learner.interface import TrainedHeads
    from trappm.learner.snapshots.manifest import Manifest
    from trappm.learner.snapshots.registry import Registry
    from trappm.learner.snapshots.snapshot import Snapshot
    from trappm.prediction.question import Question


class Selection:
    """Devices by their keys, snapshots, heads and settings that answer a question."""

    def __init__(self, question: Question, snapshots: Sequence[Snapshot] | None = None) -> None:
        """Set up the selection; nothing is read yet.

        Args:
            question: What is asked.
            snapshots: Loaded snapshots to try in this order, instead of the one of the question.
        """
        self.question = question
        self._given_snapshots = snapshots
        self.device_is_default = False
        """True if the last `device_keys` got no device."""

    @cached_property
    def snapshots(self) -> Sequence[Snapshot]:
        return self._given_snapshots or load_snapshots(self.question.snapshot)

    def device_keys(self, device: str | None, devices: Iterable[str] | str | None) -> list[str]:
        """Return the keys of the devices with these names; of `DEFAULT_DEVICE` without a name.

        `all` means all GPUs with trained models that can run the precision. Named ones need not be
        able to (see `gap`).

        Raises:
            SnapshotError: There are no heads for one of them, or none at all for the phase.
            InputError: A name is not that of a device, or none of them can run the precision.
        """
        self.device_is_default = device is None and devices is None
        if devices is not None and device is not None:
            raise InputError("give device or devices, not both")
        if device == "all":
            raise InputError(
                "device 'all' is not a single device; compare all GPUs with: trappm compare MODEL"
            )
        names: list[Any] = [DEFAULT_DEVICE if device is None else device]
        if devices is not None:
            names = [devices] if isinstance(devices, str) else list(devices)
        if not names:
            raise InputError("the list of devices is empty; name some, or ask for all")
        keys: dict[str, None] = {}
        for name in names:
            if name == "all":
                every = gpus_of(self._manifests, self.question.phase)
                keys |= dict.fromkeys([key for key in every if not self.gap(key)] or every)
            else:
                keys[key_among(self._manifests, name)] = None
        gaps = [self.gap(key) for key in keys]
        if None not in gaps:
            raise InputError(f"{gaps[0]}")
        return list(keys)

    def gap(self, device: str) -> str | None:
        """Return why the question's settings are not predicted on a device; None if they are."""
        given, phase = self.question.given, self.question.phase
        is_8_bit = given.get("optimizer") is Optimizer.ADAMW_8BIT and phase is Phase.TRAIN
        if is_8_bit and is_cpu_device(device):
            return (
                f"{Optimizer.ADAMW_8BIT} is predicted on GPUs only, as bitsandbytes has other "
                "kernels on a CPU; name a GPU"
            )
        precision = given.get("precision")
        card = card_behind(self._manifests, device)
        return precision and precision_gap(card, precision, self.question.execution)

    def unable_devices(self) -> dict[str, str]:
        """Return the GPUs with heads that are not among `all`, with the reason.

        They cannot run the settings, or have heads for the other phase only.
        """
        measured = gpus_of(self._manifests, self.question.phase)
        gaps = {key: gap for key in measured if (gap := self.gap(key)) is not None}
        [other] = set(Phase) - {self.question.phase}
        every = {key for manifest in self._manifests for key in manifest.heads}
        only_other = sorted(key for key in every - {*measured} if not is_cpu_device(key))
        return gaps | dict.fromkeys(only_other, ONLY_MEASURED[other])

    @cached_property
    def _manifests(self) -> Sequence[Manifest]:
        """Manifests of the snapshots that predict, which are read without torch."""
        if self._given_snapshots:
            return [snapshot.manifest for snapshot in self._given_snapshots]
        return read_manifests(self.question.snapshot)

    def snapshot_for(self, device: str) -> Snapshot:
        """Return the first with heads of device and phase; else the last one, for its card."""
        known = (s for s in self.snapshots if self.question.phase in s.heads.get(device, {}))
        return next(known, self.snapshots[-1])

    def trained(self, device: str, model: str) -> tuple[TrainedHeads, str | None]:
        """Return the heads for a model, and the source of step times that these heads have no
        labels of.

        An extension may have heads for models of its source, such as transformers. They are used
        unless labels of a campaign have the precision. Heads of the shipped snapshot do not answer
        for a precision or layout without labels if others published steps of the card.

        Raises:
            SnapshotError: There are no heads for the device and the phase.
        """
        snapshot = self.snapshot_for(device)
        trained = snapshot.trained(device, self.question.phase)
        of_ranks = rank_key(device).ranks > 1  # their steps include communication
        if snapshot.others is None or of_ranks:
            return trained, None
        settings, is_campaign = self.settings(trained), snapshot.manifest.campaign is not None
        card = snapshot.card(device)
        settings = settings._replace(precision=arithmetic_of(card, settings.precision))
        if is_campaign and settings.precision in {row.precision for row in trained.settings}:
            return trained, None
        for extension in extension_modules("model_heads") if is_prefixed(model) else ():
            made: tuple[TrainedHeads, str] | None
            made = extension.model_heads(model, trained, snapshot.others, card, settings.precision)
            if made is not None:
                return made
        if not is_campaign and settings[:2] not in {row[:2] for row in trained.settings}:
            return snapshot.others.by_steps(trained, card, self.question.phase)
        return trained, None

    def settings_traced(self, devices: Iterable[str]) -> list[StepSettings]:
        """Return the settings that a model's steps are traced in."""
        trained = [self.snapshot_for(key).trained(key, self.question.phase) for key in devices]
        predicted = list(map(self.settings, trained))
        eager = [
            row._replace(execution=Execution.EAGER) for row in predicted
        ]  # ratios are to these
        return list(dict.fromkeys([*eager, *predicted]))

    def settings(self, trained: TrainedHeads) -> StepSettings:
        """Return the question's settings, the rest as in most labels that agree with it.

        Labels of Adam serve AdamW and vice versa: both have the same states and traffic. Where no
        label has `tf32` or `fp32-strict`, labels in `fp32` agree with it.
        """
        given = self.question.given
        if "optimizer" in given and given["optimizer"].is_adam:
            labelled = [row.optimizer for row in trained.settings if row.optimizer.is_adam]
            if given["optimizer"] not in labelled:
                given = {**given, "optimizer": (*labelled, Optimizer.ADAM)[0]}
        rows = sorted(trained.settings, key=lambda row: row.precision != given.get("precision"))
        agreeing = [
            row
            for row in rows
            if all(
                getattr(row, name) in (value, getattr(value, "types", value))
                for name, value in given.items()
            )
        ]
        usual = (*agreeing, *trained.settings, StepSettings())[0]
        return usual._replace(**given, execution=self.question.execution)


ONLY_MEASURED = {
    Phase.TRAIN: "only training was measured",
    Phase.INFER: "only inference was measured",
}
"""Reason why a GPU is not among `all` in the other phase."""
DEFAULT_DEVICE = "a100-40gb"
"""Device of commands and functions if none is named."""
_COUNT = re.compile(r":(\d+)$")
_HERE = re.compile(r"(cuda|gpu|mps|xpu|cpu)(:\d+)?", re.IGNORECASE)
"""Names of a device of this machine, without its model."""


def key_among(manifests: Sequence[Manifest], name: object) -> str:
    """Return the key of a device that these snapshots predict; raises as `device_key` does."""
    return device_key(
        name,
        {key for manifest in manifests for key in manifest.heads},
        catalogued=any(OTHER_DEVICES_FILE in manifest.files for manifest in manifests),
        cards={key: card_behind(manifests, key) for m in manifests for key in m.cards},
    )


def gpus_of(manifests: Sequence[Manifest], phase: Phase) -> list[str]:
    """Return the keys of all GPUs that have heads for this phase, in order.

    Raises:
        SnapshotError: There are none.
    """
    keys = {key for m in manifests for key, phases in m.heads.items() if phase in phases}
    gpus = sorted(key for key in keys if not is_cpu_device(key))
    if not gpus:
        named = f"; name a CPU device: {', '.join(sorted(keys))}" if keys else ""
        raise SnapshotError(f"the snapshot has no model of {phase} steps on a GPU{named}")
    return gpus


def device_title(card: str) -> str:
    """Return a card's name as people write it, such as `A100 40 GB`; other keys as they are."""
    listed = None if is_cpu_device(card) else card_of(card)
    if listed is None:
        return card
    part = f" MIG {listed.name.part}" if listed.name.part else f" {listed.memory_gb:g} GB"
    return f"{listed.name.model.upper().replace('-', ' ')}{part}"


def precision_gap(
    card: str, precision: Precision, execution: Execution = Execution.EAGER
) -> str | None:
    """Return why a card cannot run a precision, and what to use instead; None if it can."""
    listed = None if is_cpu_device(card) else card_of(card)
    if listed is None or listed.can_run(precision, execution):
        return None
    capability = ".".join(map(str, listed.capability))
    if listed.can_run(precision, Execution.EAGER):
        return (
            f"torch.compile has no {precision} kernels for the {device_title(card)} (compute "
            f"capability {capability}, Triton needs 8.0); leave --compile out, or use fp32"
        )
    return (
        f"{device_title(card)} has no bf16 hardware (compute capability {capability}, bf16 needs "
        f"8.0), so {precision} is not predicted; use amp-fp16"
    )


def card_behind(manifests: Sequence[Manifest], key: str) -> str:
    """Return the card of a device where a measurement has named it; else the key."""
    return next((m.cards[key] for m in manifests if key in m.cards), key)


def refuse_unnamed(name: str) -> None:
    """Raise InputError if the name does not say which card it is, such as `cuda:0` or `gpu`."""
    if _HERE.fullmatch(name):
        raise InputError(
            f"device {name!r} does not say which model it is; name one, such as a100, rtx-4090 or "
            "cpu-4t, and list them with: trappm devices"
        )


def unknown_device(name: str, keys: Iterable[str] = ()) -> str:
    """Return the error message about a device that no snapshot and no data sheet covers."""
    covered = "TraPPM covers NVIDIA cards, and CPU devices such as cpu-4t"
    hint = nearest(name, {*keys, *card_keys()}, otherwise="", cutoff=0.7)
    parts = [f"unknown device {name!r}", hint.removesuffix("?"), covered]
    return "; ".join([*filter(None, parts), "list devices with: trappm devices"])


@dataclass(frozen=True)
class DeviceEvidence:
    """A device that is predicted, and the evidence for it."""

    device: str
    memory_gib: float | None
    """Memory of a card of the catalogue; None for CPU cores, since it depends on their host."""
    evidence: Mapping[str, Mapping[str, str]]
    """Evidence by phase and metric: the device's labels, or what replaces them."""

    @property
    def has_labels(self) -> bool:
        return any(OWN_LABELS in by_metric.values() for by_metric in self.evidence.values())


OWN_LABELS = "its labels"


def devices(
    snapshot: str | Path | None = None, names: Sequence[str] | None = None
) -> list[DeviceEvidence]:
    """Return the devices that are predicted, and the evidence for each metric.

    Args:
        snapshot: Id, alias or folder (default: all snapshots that predict).
        names: Devices by any of their names (default: those with heads, then all catalogue cards).

    Raises:
        SnapshotError: There is no such snapshot or device, or the snapshot is damaged.
    """
    snapshots = load_snapshots(snapshot)
    manifests = [one.manifest for one in snapshots]
    if names is not None:
        keys = dict.fromkeys(key_among(manifests, name) for name in names)
    else:
        keys = dict.fromkeys(key for one in snapshots for key in sorted(one.heads))
        keys |= dict.fromkeys(catalogue_keys(manifests))
    return [_find_evidence(snapshots, key) for key in keys]


def catalogue_keys(manifests: Sequence[Manifest]) -> list[str]:
    """Return the keys of all catalogue cards, with those of cards that have heads.

    Empty if no snapshot predicts cards without heads.
    """
    if not any(OTHER_DEVICES_FILE in manifest.files for manifest in manifests):
        return []
    names = dict.fromkeys(f"{card.name.model}-{card.memory_gb:g}gb" for card in cards())
    return [key_among(manifests, name) for name in names]


def _find_evidence(snapshots: Sequence[Snapshot], key: str) -> DeviceEvidence:
    by_phase: dict[str, dict[str, str]] = {}
    for phase in Phase:
        knows = (s for s in snapshots if phase in s.heads.get(key, {}))
        snapshot = next(knows, snapshots[-1])
        try:
            metrics = snapshot.trained(key, phase).heads.metrics
        except SnapshotError:
            continue
        bases = snapshot.bases(key, phase)
        by_phase[phase.value] = {metric: bases.get(metric, OWN_LABELS) for metric in metrics}
    capacity_mib = card_capacity_mib(snapshots[-1].card(key))
    return DeviceEvidence(key, capacity_mib and capacity_mib / 1024, by_phase)


def device_key(
    name: object,
    keys: Iterable[str],
    *,
    catalogued: bool = False,
    cards: Mapping[str, str] | None = None,
) -> str:
    """Return the key that a name means.

    Args:
        name: A key, or any other name of a card.
        keys: Keys of the devices with heads.
        catalogued: Whether any other card of the catalogue is predicted, too.
        cards: Name of the card by key, if measurements have named it.

    Raises:
        SnapshotError: The name means no device, or more than one.
        InputError: It is of several GPUs, or no name.
    """
    if not isinstance(name, str):
        raise InputError(f"device is {name!r}; give its name, such as 'a100'")
    keys = sorted(set(keys))
    if name in keys:
        return name
    refuse_unnamed(name)
    count = _COUNT.search(name)
    if count is not None and int(count[1]) != 1:
        raise InputError(f"device {name!r} is {count[1]} GPUs; predictions are of one (':1')")
    ranks = rank_key(name)
    if ranks.ranks > 1:
        raise SnapshotError(
            f"no label is of {name!r}, {ranks.ranks} ranks that share each step; "
            f"measure it, or predict {ranks.member!r}"
        )
    card = read_name(name[: count.start()] if count else name)
    behind = cards or {}
    single = [key for key in keys if rank_key(key).ranks == 1]
    same_card = (
        key for key in single if card.model and card.may_be(read_name(behind.get(key, key)))
    )
    candidates = [key for key in same_card if read_name(key).part == card.part]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise SnapshotError(f"device {name!r} may be {' or '.join(candidates)}; name one of them")
    if catalogued and card.model and card_of(str(card)) is not None:
        return str(card).replace(" ", "-")
    if is_cpu_device(name) or card_of(name) is not None:
        raise SnapshotError(
            f"the snapshot has no model of device {name!r}; choose one with --device: "
            f"{', '.join(keys)}"
        )
    raise SnapshotError(unknown_device(name, keys))


Result = TypeVar("Result")

DEFAULT_SNAPSHOT = "default"
MIN_PREFIX = 4
"""Minimum length of the beginning of an id."""
SHIPPED = Path(__file__).parents[1] / "shipped_snapshot"


def local_registry() -> Registry:
    """Return the registry of this machine."""
    from trappm.learner.snapshots.registry import Registry

    return Registry(data_folder() / "snapshots")


def load_snapshots(name: str | Path | None) -> list[Snapshot]:
    """Return the snapshots that predict, in the order in which they are tried.

    Args:
        name: As of `find_folder` (default: the latest, earlier ones with heads that it lacks, and
            the shipped one last).

    Raises:
        SnapshotError: There is no such snapshot, or it is damaged.
    """
    return _read_in_order(name, _load_unless_cached)


def read_manifests(name: str | Path | None) -> list[Manifest]:
    """Return the manifests of the same snapshots, which are read without torch."""
    return _read_in_order(name, read_manifest)


def _read_in_order(name: str | Path | None, read: Callable[[Path], Result]) -> list[Result]:
    if name is not None:
        return [read(find_folder(name))]
    shipped = read(SHIPPED)
    if not (data_folder() / "snapshots").is_dir():
        return [shipped]
    results: list[Result] = []
    known: set[tuple[str, str]] = set()
    for snapshot_id in local_registry().meanings("latest"):  # the newest first
        try:
            folder = find_folder(snapshot_id)
            heads = {
                (d, phase) for d, phases in read_manifest(folder).heads.items() for phase in phases
            }
            if not results or heads - known:
                results.append(read(folder))
                known |= heads
        except SnapshotError as error:
            if not results:
                raise SnapshotError(
                    f"{error}; --snapshot {DEFAULT_SNAPSHOT} uses the one that ships with trappm"
                ) from error
            # an earlier one that was removed, or that this version cannot read
    return [*results, shipped]


def find_folder(name: str | Path) -> Path:
    """Return the folder of a snapshot.

    Args:
        name: Folder, alias or id, or the folder or URL of a registry, whose latest is fetched.

    Raises:
        SnapshotError: There is no such snapshot, or the registry cannot be reached.
    """
    if isinstance(name, Path) or (Path(name) / MANIFEST).is_file():
        return Path(name)
    if name == DEFAULT_SNAPSHOT or (
        len(name) >= MIN_PREFIX and read_manifest(SHIPPED).id.startswith(name)
    ):
        return SHIPPED
    if (other := _find_registry(name)) is not None:
        return fetch_snapshot(other, "latest")
    registry = local_registry()
    try:
        snapshot_id = registry.resolve(name)
    except SnapshotError as error:
        raise SnapshotError(
            f"{error}; {DEFAULT_SNAPSHOT} is the one that ships with trappm, and trappm snapshot "
            "pull brings those of other registries"
        ) from error
    registry.manifest(snapshot_id)  # raises if it is under another one's name
    return Path(registry.location) / snapshot_id


def _find_registry(name: str) -> Registry | None:
    """Return the registry at a URL or folder; None if the name is not a location."""
    from trappm.learner.snapshots.registry import ALIASES, Registry

    is_location = "://" in name or ("/" in name and (Path(name) / ALIASES).is_dir())
    return Registry(name) if is_location else None


def fetch_snapshot(registry: Registry, name: str) -> Path:
    """Return the folder of a registry's snapshot, copied to this machine unless it is there whole.

    Raises:
        SnapshotError: There is no such snapshot, or it is damaged.
    """
    local, snapshot_id = local_registry(), registry.resolve(name)
    folder = Path(local.location) / snapshot_id
    if not local.is_whole(snapshot_id):
        registry.pull(snapshot_id, folder)
    return folder


def _load_unless_cached(folder: Path) -> Snapshot:
    path = folder / MANIFEST
    return _load(folder, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(maxsize=8)
def _load(folder: Path, _modified_ns: int) -> Snapshot:
    from trappm.learner.snapshots.snapshot import load_snapshot

    return load_snapshot(folder)
