"""Which snapshot answers: one that is named, else the latest here, else the one that ships with us.

For devices and phases that the latest one has no heads for, what was the latest before it comes
first: a campaign on another device takes nothing away.

Names are those of the local registry, the folder `snapshots` of TRAPPM_HOME; `default` is the one
that ships with the package. Nothing here needs a network or the label store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trappm.learner.snapshots.manifest import MANIFEST, read_manifest
from trappm.profiler.errors import SnapshotError
from trappm.profiler.host.environment import data_folder

if TYPE_CHECKING:
    from trappm.learner.snapshots.manifest_fields import Manifest
    from trappm.learner.snapshots.registry import Registry
    from trappm.learner.snapshots.snapshot import Snapshot

Read = TypeVar("Read")

DEFAULT = "default"
LEAST_PREFIX = 4
"""Letters of an id that mean it."""
SHIPPED = Path(__file__).parents[1] / "shipped_snapshot"


def local_registry() -> Registry:
    """The registry of this machine."""
    from trappm.learner.snapshots.registry import Registry

    return Registry(data_folder() / "snapshots")


def snapshots_that_answer(name: str | Path | None) -> list[Snapshot]:
    """The snapshots that answer a question, in the order in which they are tried.

    Args:
        name: a folder, an alias or an id; None for the latest one, those before it with heads that
            it lacks, and the shipped one at last.

    Raises:
        SnapshotError: there is none of that name, or it is damaged.
    """
    return _answering(name, _loaded)


def manifests_that_answer(name: str | Path | None) -> list[Manifest]:
    """Their manifests, which are read without torch; errors as of `snapshots_that_answer`."""
    return _answering(name, read_manifest)


def _answering(name: str | Path | None, read: Callable[[Path], Read]) -> list[Read]:
    if name is not None:
        return [read(folder_of(name))]
    shipped = read(SHIPPED)
    meanings = _meanings_of_latest()
    if not meanings:
        return [shipped]
    latest = folder_of(meanings[0])
    try:
        answering, known = [read(latest)], _heads(latest)
    except SnapshotError as error:
        raise SnapshotError(
            f"{error}; --snapshot {DEFAULT} uses the one that ships with trappm"
        ) from error
    for snapshot_id in meanings[1:]:
        with contextlib.suppress(SnapshotError):  # removed, or of a version that nobody reads now
            folder = folder_of(snapshot_id)
            if new := _heads(folder) - known:
                answering.append(read(folder))
                known |= new
    return [*answering, shipped]


def _heads(folder: Path) -> set[tuple[str, str]]:
    """Devices and phases that a snapshot has heads for."""
    heads = read_manifest(folder).heads
    return {(device, phase) for device, phases in heads.items() for phase in phases}


def folder_of(name: str | Path) -> Path:
    """The folder of a snapshot.

    Raises:
        SnapshotError: there is none of that name.
    """
    if isinstance(name, Path) or (Path(name) / MANIFEST).is_file():
        return Path(name)
    shipped_id = read_manifest(SHIPPED).id
    if name == DEFAULT or (len(name) >= LEAST_PREFIX and shipped_id.startswith(name)):
        return SHIPPED
    registry = local_registry()
    try:
        snapshot_id = registry.resolve(name)
    except SnapshotError as error:
        raise SnapshotError(
            f"{error}; {DEFAULT} is the one that ships with trappm, and trappm snapshot pull "
            "brings those of other registries"
        ) from error
    registry.manifest(snapshot_id)  # refuses one that stands under another one's name
    return Path(registry.location) / snapshot_id


def _meanings_of_latest() -> list[str]:
    """The snapshots that `latest` of the local registry means and meant, the newest first."""
    if not (data_folder() / "snapshots").is_dir():
        return []
    return local_registry().meanings("latest")


def _loaded(folder: Path) -> Snapshot:
    path = folder / MANIFEST
    return _load(folder, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(maxsize=8)
def _load(folder: Path, _modified_ns: int) -> Snapshot:
    from trappm.learner.snapshots.snapshot import load_snapshot

    return load_snapshot(folder)
