"""The snapshots that answer, and the change to newer ones while questions are being answered.

A question takes the snapshots along that were in force when it came. A new one is loaded beside
them and put in force in one step, so that no question waits for it or is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trappm.extensions.web.metrics import Metrics
from trappm.learner.snapshots.manifest import NAME
from trappm.prediction.snapshot_choice import DEFAULT, local_registry, snapshots_that_answer
from trappm.profiler.errors import SnapshotError, TrappmError

if TYPE_CHECKING:
    from trappm.learner.snapshots.snapshot import Snapshot

_log = logging.getLogger("trappm.web")


class LoadedSnapshots:
    """The loaded snapshots in force, in the order in which they are tried."""

    def __init__(self, name: str | None, metrics: Metrics) -> None:
        """Raises SnapshotError: there is none of that name, or it is damaged."""
        self._name = name
        self._metrics = metrics
        self._refused: str | None = None
        self.current: Sequence[Snapshot] = snapshots_that_answer(name)
        metrics.answering(self.ids)

    @property
    def ids(self) -> list[str]:
        return [snapshot.id for snapshot in self.current]

    async def named(self, name: str | None) -> Sequence[Snapshot]:
        """The snapshots for a question: those in force, or the one of this registry that it names.

        Raises:
            SnapshotError: there is none of that name, or it is damaged.
        """
        if name is None:
            return self.current
        for snapshot in self.current:
            if name == snapshot.id:
                return [snapshot]
        if not NAME.fullmatch(name):
            raise SnapshotError(f"{name!r} is no id and no alias; see: GET /v1/snapshot")
        return await asyncio.to_thread(_of_registry, name)

    async def reload(self) -> bool:
        """Loads what the name means by now; returns whether that has changed.

        Raises:
            SnapshotError: it is damaged; what was in force stays.
        """
        try:
            snapshots = await asyncio.to_thread(snapshots_that_answer, self._name)
        except TrappmError:
            self._metrics.reloads.labels("failed").inc()
            raise
        changed = [snapshot.id for snapshot in snapshots] != self.ids
        self._metrics.reloads.labels("changed" if changed else "same").inc()
        if changed:
            self.current = snapshots
            self._metrics.answering(self.ids)
            _log.info("from now on these snapshots answer: %s", ", ".join(self.ids))
        return changed

    async def watch(self, every_s: float) -> None:
        """Reloads for ever; logs a snapshot that cannot be loaded once."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.reload()
                self._refused = None
            except Exception as error:  # whatever it is, the ones in force go on answering
                if str(error) != self._refused:
                    _log.warning("the snapshots in force stay: %s", error)
                self._refused = str(error)


def _of_registry(name: str) -> list[Snapshot]:
    """Never a folder of the server's, whatever the name looks like."""
    if name != DEFAULT:
        name = local_registry().resolve(name)
    return snapshots_that_answer(name)
