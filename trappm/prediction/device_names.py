"""Devices by any of their names, such as `a100` or `NVIDIA GeForce RTX 3090`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trappm.learner.snapshots.manifest import OTHERS
from trappm.profiler.devices.catalogue import (
    card_keys,
    card_of,
    cards,
    memory_mib,
    rank_key,
    read_name,
)
from trappm.profiler.errors import InputError, SnapshotError, nearest
from trappm.profiler.records import Execution, Phase, Precision, is_cpu_device

if TYPE_CHECKING:
    from trappm.learner.snapshots.manifest import Manifest
    from trappm.learner.snapshots.snapshot import Snapshot

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
        catalogued=any(OTHERS in manifest.files for manifest in manifests),
        cards={key: card_behind(manifests, key) for m in manifests for key in m.cards},
    )


def gpus_of(manifests: Sequence[Manifest], phase: Phase) -> list[str]:
    """Return the keys of all GPUs that a model was trained on for this phase, in order.

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
        return any(OWN in by_metric.values() for by_metric in self.evidence.values())


OWN = "its labels"


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
    from trappm.prediction.snapshot_choice import snapshots_that_answer

    snapshots = snapshots_that_answer(snapshot)
    manifests = [one.manifest for one in snapshots]
    if names is not None:
        keys = dict.fromkeys(key_among(manifests, name) for name in names)
    else:
        keys = dict.fromkeys(key for one in snapshots for key in sorted(one.heads))
        keys |= dict.fromkeys(catalogue_keys(manifests))
    return [_evidence(snapshots, key) for key in keys]


def catalogue_keys(manifests: Sequence[Manifest]) -> list[str]:
    """Return the keys of all catalogue cards, with those of cards that have heads.

    Empty if no snapshot predicts cards without heads.
    """
    if not any(OTHERS in manifest.files for manifest in manifests):
        return []
    names = dict.fromkeys(f"{card.name.model}-{card.memory_gb:g}gb" for card in cards())
    return [key_among(manifests, name) for name in names]


def _evidence(snapshots: Sequence[Snapshot], key: str) -> DeviceEvidence:
    by_phase: dict[str, dict[str, str]] = {}
    for phase in Phase:
        knows = (s for s in snapshots if phase in s.heads.get(key, {}))
        snapshot = next(knows, snapshots[-1])
        try:
            metrics = snapshot.trained(key, phase).heads.metrics
        except SnapshotError:
            continue
        bases = snapshot.bases(key, phase)
        by_phase[phase.value] = {metric: bases.get(metric, OWN) for metric in metrics}
    capacity_mib = memory_mib(snapshots[-1].card(key))
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
    alike = (key for key in single if card.model and card.may_be(read_name(behind.get(key, key))))
    candidates = [key for key in alike if read_name(key).part == card.part]
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
