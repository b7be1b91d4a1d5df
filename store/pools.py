"""Configurations, and named pools of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from trappm.profiler.errors import InputError, nearest
from trappm.profiler.models.families import family_of
from trappm.profiler.records import Configuration
from trappm.profiler.traced_step import TraceKey
from trappm.store.engine import insert_new
from trappm.store.records import PoolPart, configuration_of
from trappm.store.schema import CONFIGURATION, ConfigurationRow, PoolMemberRow
from trappm.store.traces import states_of
from trappm.store.transactions import Repository, reading, writing


def insert_configurations(session: Session, configurations: Iterable[Configuration]) -> list[str]:
    """Insert the configurations that are new, and return the ids of all, each once."""
    rows = [
        {"id": c.id, "family": family_of(c.architecture), **c.to_dict()}
        for c in dict.fromkeys(configurations)
    ]
    insert_new(session, ConfigurationRow, rows)
    return [str(row["id"]) for row in rows]


class Pools(Repository):
    """Pools by name."""

    @writing
    def save(self, session: Session, name: str, configurations: Collection[Configuration]) -> None:
        """Make the pool of this name consist of exactly these configurations.

        Campaigns keep the configurations that they took from an earlier form of it.
        """
        members = insert_configurations(session, configurations)
        session.execute(delete(PoolMemberRow).filter_by(pool=name))
        rows = [{"pool": name, "configuration_id": member} for member in members]
        insert_new(session, PoolMemberRow, rows)

    @reading
    def get(self, session: Session, name: str) -> list[Configuration]:
        """Return the configurations of a pool, sorted.

        Raises:
            InputError: There is no pool of this name.
        """
        return _configurations(session, name)

    @reading
    def parts(self, session: Session, name: str) -> list[PoolPart]:
        """Return the distinct steps of a pool with their states, sorted.

        Raises:
            InputError: There is no pool of this name.
        """
        counts = Counter(map(TraceKey.of, _configurations(session, name)))
        states = states_of(session, counts)
        parts = (PoolPart(family_of(k.model), k, n, states.get(k)) for k, n in counts.items())
        return sorted(parts, key=lambda part: part[:2])


def _configurations(session: Session, pool: str) -> list[Configuration]:
    query = (
        select(*CONFIGURATION)
        .join(PoolMemberRow, PoolMemberRow.configuration_id == ConfigurationRow.id)
        .where(PoolMemberRow.pool == _check_pool(session, pool))
    )
    return sorted(map(configuration_of, session.execute(query)))


def _check_pool(session: Session, name: str) -> str:
    names = list(session.scalars(select(PoolMemberRow.pool).distinct()))
    if name not in names:
        hint = nearest(name, names) if names else "make one with: trappm pool build --spec FILE"
        raise InputError(f"no pool {name!r}; {hint}")
    return name
