"""Loaded snapshots, and their replacement by newer ones while requests are in flight.

A request keeps the snapshots that were active when it arrived. A new snapshot is loaded in the
background and activated atomically, so that no request waits or fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trappm.extensions.web.metrics import Metrics
from trappm.prediction.requests import refuse_folder
from trappm.prediction.selection import DEFAULT_SNAPSHOT, load_snapshots, local_registry
from trappm.profiler.errors import TrappmError

if TYPE_CHECKING:
    from trappm.learner.snapshots.snapshot import Snapshot

_log = logging.getLogger("trappm.web")


class LoadedSnapshots:
    """Active snapshots in the order in which they are tried."""

    def __init__(self, name: str | None, metrics: Metrics) -> None:
        """Load the snapshots; raises SnapshotError if one does not exist or is damaged."""
        self._name = name
        self._metrics = metrics
        self._refused: str | None = None
        self.current: Sequence[Snapshot] = load_snapshots(name)
        metrics.answering(self.ids)

    @property
    def ids(self) -> list[str]:
        return [snapshot.id for snapshot in self.current]

    async def named(self, name: str | None) -> Sequence[Snapshot]:
        """Return the active snapshots, or the snapshot with a name in this machine's registry.

        Raises:
            SnapshotError: The snapshot does not exist or is damaged.
        """
        if name is None:
            return self.current
        for snapshot in self.current:
            if name == snapshot.id:
                return [snapshot]
        refuse_folder(name, "see: GET /v1/snapshot")
        return await asyncio.to_thread(_of_registry, name)

    async def reload(self) -> bool:
        """Reload the named snapshot, and return whether it has changed.

        Raises:
            SnapshotError: The snapshot is damaged; the active ones stay active.
        """
        try:
            snapshots = await asyncio.to_thread(load_snapshots, self._name)
        except TrappmError:
            self._metrics.reloads.labels("failed").inc()
            raise
        changed = [snapshot.id for snapshot in snapshots] != self.ids
        self._metrics.reloads.labels("changed" if changed else "same").inc()
        if changed:
            self.current = snapshots
            self._metrics.answering(self.ids)
            _log.info("active snapshots: %s", ", ".join(self.ids))
        return changed

    async def watch(self, every_s: float) -> None:
        """Reload periodically and forever; log each loading error once."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.reload()
                self._refused = None
            except Exception as error:  # the active snapshots stay active after any error
                if str(error) != self._refused:
                    _log.warning("reload failed, the active snapshots stay: %s", error)
                self._refused = str(error)


def _of_registry(name: str) -> list[Snapshot]:
    """Load a snapshot from the registry, never from a folder of the server."""
    if name != DEFAULT_SNAPSHOT:
        name = local_registry().resolve(name)
    return load_snapshots(name)
