"""Published snapshots: list them, pull them from a registry, push them to one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.learner.snapshots.manifest import read_manifest
from trappm.prediction.selection import (
    DEFAULT_SNAPSHOT,
    SHIPPED,
    fetch_snapshot,
    find_folder,
    local_registry,
)
from trappm.profiler.errors import InputError, SnapshotError

if TYPE_CHECKING:
    from trappm.learner.snapshots.manifest import Manifest
    from trappm.learner.snapshots.promotion import Promotion
    from trappm.learner.snapshots.registry import Registry


@dataclass(frozen=True)
class SnapshotListing:
    """A snapshot in a list. Only the id and aliases of a damaged one are known."""

    id: str
    aliases: Sequence[str]
    campaign: str | None = None
    devices: Sequence[str] | None = None
    training_labels: Mapping[str, int] | None = None
    """Number of labels by provenance."""
    created_at: str | None = None
    damage: str | None = None

    @classmethod
    def of(cls, manifest: Manifest, aliases: Sequence[str]) -> SnapshotListing:
        return cls(
            id=manifest.id,
            aliases=aliases,
            campaign=manifest.campaign,
            devices=sorted(manifest.heads),
            training_labels=labels_by_provenance(manifest),
            created_at=manifest.created_at,
        )


def list(registry: str | None = None) -> Sequence[SnapshotListing]:  # noqa: A001  # snapshots.list
    """Return the snapshots of a registry, the latest first.

    Args:
        registry: Folder or URL (default: the snapshots of TRAPPM_HOME and the shipped one).
    """
    return list_snapshots(registry_at(registry), with_shipped=registry is None)


def pull(name: str = "latest", registry: str | None = None, to: Path | None = None) -> Path:
    """Fetch a snapshot, verify its checksums, and return its folder.

    An alias that is pulled then means the same snapshot on this machine.

    Args:
        name: Id, its beginning, or an alias.
        registry: Folder or URL (default: this machine's snapshots).
        to: New folder (default: among the snapshots of TRAPPM_HOME).

    Raises:
        InputError: Neither registry nor folder is given, or the folder exists.
        SnapshotError: There is no such snapshot, or it is damaged.
    """
    if to is not None and to.exists():
        raise InputError(f"{to} already exists; name a new folder")
    if registry is None:
        if to is None:
            raise InputError("name what to fetch from (--from) or where to put it (--to)")
        from trappm.learner.snapshots.snapshot import copy_snapshot

        copy_snapshot(find_folder(name), to)
        return to
    shared = registry_at(registry)
    if to is not None:
        shared.pull(shared.resolve(name), to)
        return to
    folder = fetch_snapshot(shared, name)
    if name in shared.aliases():
        local_registry().set_alias(name, folder.name, f"pulled from {shared.location}")
    return folder


def push(
    name: str,
    registry: str | None = None,
    alias: str = "latest",
    *,
    max_regression_percent: float | None = 20.0,
) -> Promotion:
    """Publish a snapshot, and move an alias to it unless it regressed.

    Args:
        name: Id, alias or folder of a snapshot of this machine, or id or alias in the registry.
        registry: Folder or URL (default: this machine's snapshots).
        alias: Alias to create or move.
        max_regression_percent: Increase of an error that counts as a regression; None moves the
            alias in any case.

    Raises:
        InputError: The alias is that of the shipped snapshot.
        SnapshotError: There is no such snapshot, or the registry cannot be written.
    """
    from trappm.learner.snapshots.promotion import Promotion, promote

    if alias == DEFAULT_SNAPSHOT:
        raise InputError(
            f"{DEFAULT_SNAPSHOT} always means the snapshot that ships with trappm; choose another "
            "name"
        )
    shared = registry_at(registry)
    try:
        folder = find_folder(name)
    except SnapshotError as error:
        try:
            snapshot_id = shared.resolve(name)
        except SnapshotError:
            raise error from None
    else:
        snapshot_id = shared.push(folder)
    if max_regression_percent is not None:
        return promote(shared, alias, snapshot_id, max_regression_percent)
    if shared.aliases().get(alias) != snapshot_id:
        shared.set_alias(alias, snapshot_id, "by hand")
    return Promotion(True, f"{alias} is {snapshot_id}")


def registry_at(location: str | None) -> Registry:
    """Return the registry at a folder or URL, or that of this machine."""
    from trappm.learner.snapshots.registry import Registry

    return local_registry() if location is None else Registry(location)


def list_snapshots(registry: Registry, *, with_shipped: bool) -> Sequence[SnapshotListing]:
    """Return the whole snapshots of a registry, the latest first and the shipped one last."""
    aliases = registry.aliases()
    rows = []
    for name in registry.ids():
        called = sorted(alias for alias, meant in aliases.items() if meant == name)
        try:
            rows.append(SnapshotListing.of(registry.manifest(name), called))
        except SnapshotError as error:
            rows.append(SnapshotListing(name, called, damage=str(error)))
    rows.sort(key=lambda row: str(row.created_at), reverse=True)
    if with_shipped:
        rows.append(SnapshotListing.of(read_manifest(SHIPPED), [DEFAULT_SNAPSHOT]))
    return rows


def labels_by_provenance(manifest: Manifest) -> dict[str, int]:
    """Return the number of training labels by provenance."""
    total: Counter[str] = Counter()
    for counts in manifest.training_labels.counts.values():
        total.update(counts)
    return dict(total)


_ERRORS = ("count", "mape", "median_ape", "coverage", "within_10_percent", "rmse")


def head_rows(manifest: Manifest) -> Sequence[dict[str, Any]]:
    """Return one row per device, phase and metric of a snapshot.

    Returns:
        Rows with device, phase, metric, number of labels, and errors in percent (`rmse` in the
        metric's unit); None if an error is unknown.
    """
    labels: Counter[tuple[str, str, str]] = Counter()
    for source in manifest.to_json().get("sources", []):
        device, phase, metric = (str(source.get(key)) for key in ("device", "phase", "metric"))
        labels[device, phase, metric] += source["labels"]
    rows = []
    for device, phases in manifest.heads.items():
        errors = (manifest.errors or {}).get(device, {})
        for phase, head in phases.items():
            by_metric = errors.get(phase, {})
            for metric in head.metrics:
                known = by_metric.get(metric)
                count = labels[device, phase.value, metric] or head.label_count
                row = {"device": device, "phase": phase, "metric": metric, "labels": count}
                rows.append(row | {e: known.number(e) if known else None for e in _ERRORS})
    return rows
