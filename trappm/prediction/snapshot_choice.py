"""Choice of the snapshot that predicts: the named one, else the latest, else the shipped one.

For devices and phases that the latest one has no heads for, the earlier ones come next, so a
campaign on another device takes nothing away. Names are those of the local registry, the folder
`snapshots` of TRAPPM_HOME; `default` is the shipped one. Nothing here needs SQL, and only the
location of another registry, which means its latest, needs a network.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trappm.learner.snapshots.manifest import MANIFEST, read_manifest
from trappm.profiler.errors import SnapshotError
from trappm.profiler.host.environment import data_folder

if TYPE_CHECKING:
    from trappm.learner.snapshots.manifest import Manifest
    from trappm.learner.snapshots.registry import Registry
    from trappm.learner.snapshots.snapshot import Snapshot

Read = TypeVar("Read")

DEFAULT = "default"
LEAST_PREFIX = 4
"""Minimum length of the beginning of an id."""
SHIPPED = Path(__file__).parents[1] / "shipped_snapshot"


def local_registry() -> Registry:
    """Return the registry of this machine."""
    from trappm.learner.snapshots.registry import Registry

    return Registry(data_folder() / "snapshots")


def snapshots_that_answer(name: str | Path | None) -> list[Snapshot]:
    """Return the snapshots that predict, in the order in which they are tried.

    Args:
        name: As of `folder_of` (default: the latest, earlier ones with heads that it lacks, and the
            shipped one last).

    Raises:
        SnapshotError: There is no such snapshot, or it is damaged.
    """
    return _answering(name, _loaded)


def manifests_that_answer(name: str | Path | None) -> list[Manifest]:
    """Return the manifests of the same snapshots, which are read without torch."""
    return _answering(name, read_manifest)


def _answering(name: str | Path | None, read: Callable[[Path], Read]) -> list[Read]:
    if name is not None:
        return [read(folder_of(name))]
    shipped = read(SHIPPED)
    if not (data_folder() / "snapshots").is_dir():
        return [shipped]
    answering: list[Read] = []
    known: set[tuple[str, str]] = set()
    for snapshot_id in local_registry().meanings("latest"):  # the newest first
        try:
            folder = folder_of(snapshot_id)
            heads = {
                (d, phase) for d, phases in read_manifest(folder).heads.items() for phase in phases
            }
            if not answering or heads - known:
                answering.append(read(folder))
                known |= heads
        except SnapshotError as error:
            if not answering:
                raise SnapshotError(
                    f"{error}; --snapshot {DEFAULT} uses the one that ships with trappm"
                ) from error
            # an earlier one that was removed, or that this version cannot read
    return [*answering, shipped]


def folder_of(name: str | Path) -> Path:
    """Return the folder of a snapshot.

    Args:
        name: Folder, alias or id, or the folder or URL of a registry, whose latest is fetched.

    Raises:
        SnapshotError: There is no such snapshot, or the registry cannot be reached.
    """
    if isinstance(name, Path) or (Path(name) / MANIFEST).is_file():
        return Path(name)
    if name == DEFAULT or (
        len(name) >= LEAST_PREFIX and read_manifest(SHIPPED).id.startswith(name)
    ):
        return SHIPPED
    if (other := _registry_named(name)) is not None:
        return fetched(other, "latest")
    registry = local_registry()
    try:
        snapshot_id = registry.resolve(name)
    except SnapshotError as error:
        raise SnapshotError(
            f"{error}; {DEFAULT} is the one that ships with trappm, and trappm snapshot pull "
            "brings those of other registries"
        ) from error
    registry.manifest(snapshot_id)  # raises if it is under another one's name
    return Path(registry.location) / snapshot_id


def _registry_named(name: str) -> Registry | None:
    """Return the registry at a URL or folder; None if the name is not a location."""
    from trappm.learner.snapshots.registry import ALIASES, Registry

    is_location = "://" in name or ("/" in name and (Path(name) / ALIASES).is_dir())
    return Registry(name) if is_location else None


def fetched(registry: Registry, name: str) -> Path:
    """Return the folder of a registry's snapshot, copied to this machine unless it is there whole.

    Raises:
        SnapshotError: There is no such snapshot, or it is damaged.
    """
    local, snapshot_id = local_registry(), registry.resolve(name)
    folder = Path(local.location) / snapshot_id
    if not local.is_whole(snapshot_id):
        registry.pull(snapshot_id, folder)
    return folder


def _loaded(folder: Path) -> Snapshot:
    path = folder / MANIFEST
    return _load(folder, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(maxsize=8)
def _load(folder: Path, _modified_ns: int) -> Snapshot:
    from trappm.learner.snapshots.snapshot import load_snapshot

    return load_snapshot(folder)
