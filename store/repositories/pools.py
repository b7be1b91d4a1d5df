"""Pools by name: selections of configurations, built ahead of the campaigns that use them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from trappm.profiler.errors import InputError
from trappm.profiler.nearest import nearest
from trappm.profiler.records import Configuration
from trappm.store.db.engine import insert_new
from trappm.store.db.models import (
    ArchitectureGraphRow,
    ConfigurationRow,
    NamedPoolRow,
    PoolMemberRow,
    StepProfileRow,
)
from trappm.store.db.transactions import Repository, call_of, reading, writing
from trappm.store.records import PoolPart, PoolRecord
from trappm.store.repositories.workloads import configuration_of, insert_configurations

_CONFIGURATION = ConfigurationRow.__table__.c


class Pools(Repository):
    """Pools by name."""

    @writing
    def save(
        self,
        session: Session,
        name: str,
        spec: Mapping[str, Any],
        configurations: Collection[Configuration],
    ) -> None:
        """Makes the pool of this name consist of exactly these configurations.

        Campaigns that have taken an earlier form of it keep what they took.
        """
        members = insert_configurations(session, configurations)
        row = session.scalar(select(NamedPoolRow).where(NamedPoolRow.name == name))
        if row is None:
            row = NamedPoolRow(name=name)
            session.add(row)
        row.spec, row.built_at = dict(spec), call_of(session).at
        session.flush()
        session.execute(delete(PoolMemberRow).where(PoolMemberRow.pool_id == row.id))
        insert_new(
            session,
            PoolMemberRow,
            [{"pool_id": row.id, "configuration_id": member} for member in members],
        )

    @reading
    def all(self, session: Session) -> list[PoolRecord]:
        """All pools, the latest built first."""
        query = (
            select(NamedPoolRow, func.count(PoolMemberRow.configuration_id))
            .outerjoin(PoolMemberRow, PoolMemberRow.pool_id == NamedPoolRow.id)
            .group_by(NamedPoolRow.id)
            .order_by(NamedPoolRow.built_at.desc(), NamedPoolRow.name)
        )
        return [
            PoolRecord(name=row.name, spec=row.spec, built_at=row.built_at, size=size)
            for row, size in session.execute(query)
        ]

    @reading
    def get(self, session: Session, name: str) -> list[Configuration]:
        """The configurations of a pool, sorted.

        Raises:
            InputError: there is no pool of this name.
        """
        rows = session.execute(
            select(*_CONFIGURATION)
            .join(PoolMemberRow, PoolMemberRow.configuration_id == _CONFIGURATION.id)
            .where(PoolMemberRow.pool_id == _pool_id(session, name))
        )
        return sorted(configuration_of(row) for row in rows)

    @reading
    def parts(self, session: Session, name: str) -> list[PoolPart]:
        """How far each architecture and input size of a pool is, sorted.

        Raises:
            InputError: there is no pool of this name.
        """
        graph, step = ArchitectureGraphRow, StepProfileRow
        what = (_CONFIGURATION.family, _CONFIGURATION.architecture, _CONFIGURATION.input_size)
        has_step_profile = step.architecture.is_not(None) & step.refusal.is_(None)
        state = (
            graph.graph_hash,
            graph.refusal,
            has_step_profile.label("has_step_profile"),
            step.refusal.label("step_refusal"),
        )
        rows = session.execute(
            select(*what, *state, func.count().label("configurations"))
            .join(PoolMemberRow, PoolMemberRow.configuration_id == _CONFIGURATION.id)
            .outerjoin(
                graph,
                (graph.architecture == _CONFIGURATION.architecture)
                & (graph.input_size == _CONFIGURATION.input_size),
            )
            .outerjoin(
                step,
                (step.architecture == graph.architecture) & (step.input_size == graph.input_size),
            )
            .where(PoolMemberRow.pool_id == _pool_id(session, name))
            .group_by(*what, *state)
            .order_by(*what)
        )
        return [PoolPart(**row._mapping) for row in rows]


def _pool_id(session: Session, name: str) -> int:
    rows = session.execute(select(NamedPoolRow.name, NamedPoolRow.id))
    ids: dict[str, int] = {row.name: row.id for row in rows}
    if name not in ids:
        hint = nearest(name, sorted(ids)) if ids else "make one with: trappm pool build --spec FILE"
        raise InputError(f"no pool {name!r}; {hint}")
    return ids[name]
