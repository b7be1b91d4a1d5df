"""Published snapshots: which campaign published each, and where; the files are in the data folder.

Their aliases, such as `latest`, are the registry's (`learner.snapshots.registry`), not the store's.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from trappm.profiler.errors import SnapshotError
from trappm.store.db.models import SnapshotRow
from trappm.store.db.transactions import Repository, reading
from trappm.store.records import SnapshotRecord


class Snapshots(Repository):
    """The list of published snapshots."""

    @reading
    def all(self, session: Session) -> list[SnapshotRecord]:
        """All snapshots, the latest first."""
        rows = session.scalars(
            select(SnapshotRow).order_by(SnapshotRow.created_at.desc(), SnapshotRow.id)
        )
        return [_snapshot(row) for row in rows]


def register(session: Session, snapshot: SnapshotRecord) -> None:
    """Adds a published snapshot, within a transaction; the same again changes nothing.

    Raises:
        SnapshotError: the id is taken by another one.
    """
    row = session.get(SnapshotRow, snapshot.id, with_for_update=True)
    manifest = dict(snapshot.manifest)
    if row is None:
        session.add(
            SnapshotRow(
                id=snapshot.id,
                campaign_id=snapshot.campaign_id,
                location=snapshot.location,
                manifest=manifest,
                created_at=snapshot.created_at,
            )
        )
    elif (row.location, row.manifest) != (snapshot.location, manifest):
        raise SnapshotError(
            f"snapshot {snapshot.id!r} is published already and never changes; "
            "publish under another id"
        )


def _snapshot(row: SnapshotRow) -> SnapshotRecord:
    return SnapshotRecord(
        id=row.id,
        campaign_id=row.campaign_id,
        location=row.location,
        manifest=row.manifest,
        created_at=row.created_at,
    )
