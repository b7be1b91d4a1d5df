"""Published snapshots and the aliases that point at them; the files stand in the data folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from trappm.profiler.errors import SnapshotError
from trappm.store.db.engine import Database, utc_now
from trappm.store.db.models import AliasRow, SnapshotRow
from trappm.store.records import SnapshotRecord


class Snapshots(Database):
    """The part of the store that keeps the list of snapshots."""

    def register_snapshot(
        self,
        snapshot_id: str,
        *,
        campaign_id: str | None,
        location: str,
        manifest: Mapping[str, Any],
    ) -> None:
        """Adds a published snapshot; registering the same again changes nothing.

        Args:
            snapshot_id: its name for ever.
            campaign_id: the campaign that published it.
            location: its folder, relative to the folder of snapshots.
            manifest: JSON values.

        Raises:
            SnapshotError: the id is taken by another one, or is an alias.
        """
        snapshot = SnapshotRecord(
            id=snapshot_id,
            campaign_id=campaign_id,
            location=location,
            manifest=manifest,
            created_at=utc_now(),
        )
        with self._writing() as session:
            register(session, snapshot)

    def snapshots(self) -> list[SnapshotRecord]:
        """All snapshots, the latest first."""
        with self._reading() as session:
            rows = session.scalars(
                select(SnapshotRow).order_by(SnapshotRow.created_at.desc(), SnapshotRow.id)
            )
            return [_snapshot(row) for row in rows]

    def snapshot(self, name: str) -> SnapshotRecord | None:
        """The snapshot of this id or alias; None if there is none."""
        with self._reading() as session:
            row = _find(session, name)
            return None if row is None else _snapshot(row)

    def set_alias(self, alias: str, snapshot: str) -> None:
        """Points an alias at a snapshot, given by id or alias; moves it if it points elsewhere.

        Raises:
            SnapshotError: there is no such snapshot, or one has the alias as its id.
        """
        with self._writing() as session:
            row = _find(session, snapshot)
            if row is None:
                raise SnapshotError(f"no snapshot {snapshot!r} to call {alias!r}")
            if session.get(SnapshotRow, alias) is not None:
                raise SnapshotError(f"{alias!r} is a snapshot's id and can be no alias")
            session.merge(AliasRow(name=alias, snapshot_id=row.id))

    def aliases(self) -> dict[str, str]:
        """Snapshot ids by alias."""
        with self._reading() as session:
            rows = session.scalars(select(AliasRow).order_by(AliasRow.name))
            return {row.name: row.snapshot_id for row in rows}


def register(session: Session, snapshot: SnapshotRecord) -> None:
    """As `Snapshots.register_snapshot`, within a transaction."""
    row = session.get(SnapshotRow, snapshot.id, with_for_update=True)
    if row is None:
        if session.get(AliasRow, snapshot.id) is not None:
            raise SnapshotError(f"{snapshot.id!r} is an alias and can be no snapshot's id")
        session.add(
            SnapshotRow(
                id=snapshot.id,
                campaign_id=snapshot.campaign_id,
                location=snapshot.location,
                manifest=dict(snapshot.manifest),
                created_at=snapshot.created_at,
            )
        )
    elif (row.location, row.manifest) != (snapshot.location, dict(snapshot.manifest)):
        raise SnapshotError(
            f"snapshot {snapshot.id!r} is published already and never changes; "
            "publish under another id"
        )


def _find(session: Session, name: str) -> SnapshotRow | None:
    alias = session.get(AliasRow, name)
    return session.get(SnapshotRow, name if alias is None else alias.snapshot_id)


def _snapshot(row: SnapshotRow) -> SnapshotRecord:
    return SnapshotRecord(
        id=row.id,
        campaign_id=row.campaign_id,
        location=row.location,
        manifest=row.manifest,
        created_at=row.created_at,
    )
