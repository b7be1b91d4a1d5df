"""Workloads: configurations, static profiles of architectures, and named pools."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import Select, delete, func, select
from sqlalchemy.orm import Session

from trappm.profiler.errors import InputError
from trappm.profiler.models.families import family_of
from trappm.profiler.records import Configuration, GraphTemplate, Pair
from trappm.profiler.records.trace import TRACE_VERSION, StepProfile
from trappm.profiler.text import nearest
from trappm.store.engine import insert_new
from trappm.store.records import PoolPart, configuration_of
from trappm.store.schema import (
    CONFIGURATION,
    ConfigurationRow,
    GraphRow,
    PoolMemberRow,
    StaticProfileRow,
)
from trappm.store.transactions import Repository, reading, writing


class Workloads(Repository):
    """Configurations, and the static profiles of their architectures."""

    @writing
    def save_graph(
        self,
        session: Session,
        architecture: str,
        input_size: int,
        template: bytes | None,
        refusal: str | None,
        *,
        step: bytes | None = None,
        step_refusal: str | None = None,
    ) -> None:
        """Store the static profile of an architecture, or its refusal, in place of an older one.

        Args:
            architecture: Name of the model.
            input_size: Input size in pixels or tokens.
            template: Result of `GraphTemplate.to_bytes`, or None.
            refusal: Reason why there is no graph; None if there is a template.
            step: Result of `StepProfile.to_bytes`, or None.
            step_refusal: Reason why there is no step profile; None also if it was not tried.

        Raises:
            TrappmError: The template or the step profile is damaged; nothing is stored.
        """
        graph_hash = None
        if template is not None:
            graph = GraphTemplate.from_bytes(template)
            graph_hash = graph.content_hash
            row = {"content_hash": graph_hash, "template": template}
            insert_new(session, GraphRow, [row | {"node_count": len(graph.operators)}])
        if step is not None:
            StepProfile.from_bytes(step)  # refuses a damaged one
        is_traced = step is not None or step_refusal is not None
        session.merge(
            StaticProfileRow(
                architecture=architecture,
                input_size=input_size,
                graph_hash=graph_hash,
                refusal=refusal,
                step=step,
                step_refusal=step_refusal,
                trace_version=TRACE_VERSION if is_traced else None,
            )
        )

    @reading
    def pairs_to_profile(
        self, session: Session, pairs: Sequence[Pair], *, also_refused: bool = False
    ) -> list[Pair]:
        """Return the pairs without a graph, or a step profile of this version of the recorder.

        Pairs that were refused are left out unless `also_refused`.
        """
        row = StaticProfileRow
        complete = row.trace_version == TRACE_VERSION
        known_as = (
            complete & row.step.is_not(None)
            if also_refused
            else complete | row.refusal.is_not(None)
        )
        query = select(row.architecture, row.input_size).where(known_as)
        known = set(_pairs(session, query))
        return [pair for pair in pairs if pair not in known]

    @reading
    def outdated(self, session: Session) -> list[Pair]:
        """Return the pairs whose step profile an earlier version of the recorder made."""
        row = StaticProfileRow
        query = select(row.architecture, row.input_size).where(row.trace_version < TRACE_VERSION)
        return _pairs(session, query.order_by(row.architecture))

    @reading
    def graph_templates(self, session: Session, pairs: Collection[Pair]) -> dict[Pair, bytes]:
        """Return graphs for `GraphTemplate.from_bytes`; refused pairs are left out."""
        row = StaticProfileRow
        query = select(row.architecture, row.input_size, GraphRow.template).join(
            GraphRow, GraphRow.content_hash == row.graph_hash
        )
        return _by_pair(session, query, pairs)

    @reading
    def step_profiles(self, session: Session, pairs: Collection[Pair]) -> dict[Pair, bytes]:
        """Return step profiles for `StepProfile.from_bytes`; pairs without one are left out."""
        row = StaticProfileRow
        query = select(row.architecture, row.input_size, row.step)
        return _by_pair(session, query, pairs)

    @reading
    def refusals(self, session: Session) -> dict[Pair, str]:
        """Return why architectures have no graph at an input size."""
        row = StaticProfileRow
        query = select(row.architecture, row.input_size, row.refusal)
        rows = session.execute(query.where(row.refusal.is_not(None)))
        return {(name, size): str(reason) for name, size, reason in rows}

    @reading
    def pairs_of_graph(self, session: Session, content_hash: str) -> list[Pair]:
        """Return the pairs that have this graph."""
        row = StaticProfileRow
        query = select(row.architecture, row.input_size).where(row.graph_hash == content_hash)
        return _pairs(session, query)

    @reading
    def graphs_of_size(self, session: Session, node_count: int) -> dict[str, bytes]:
        """Return the graphs with this number of nodes, by their hash."""
        query = select(GraphRow.content_hash, GraphRow.template).filter_by(node_count=node_count)
        return {row.content_hash: row.template for row in session.execute(query)}


def _pairs(session: Session, query: Select[str, int]) -> list[Pair]:
    return [(architecture, size) for architecture, size in session.execute(query)]


def _by_pair(
    session: Session, query: Select[*tuple[Any, ...]], pairs: Collection[Pair]
) -> dict[Pair, bytes]:
    """Return the bytes in the third column of a query, by the pair in the first two."""
    wanted = set(pairs)
    names = sorted({name for name, _ in wanted})
    rows = session.execute(query.where(StaticProfileRow.architecture.in_(names)))
    return {(name, size): data for name, size, data in rows if data and (name, size) in wanted}


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
        query = (
            select(*CONFIGURATION)
            .join(PoolMemberRow, PoolMemberRow.configuration_id == ConfigurationRow.id)
            .where(PoolMemberRow.pool == _existing(session, name))
        )
        return sorted(map(configuration_of, session.execute(query)))

    @reading
    def parts(self, session: Session, name: str) -> list[PoolPart]:
        """Return the state of each architecture and input size of a pool, sorted.

        Raises:
            InputError: There is no pool of this name.
        """
        row, profile = ConfigurationRow, StaticProfileRow
        what = (row.family, row.architecture, row.input_size)
        state = (
            profile.graph_hash,
            profile.refusal,
            profile.step.is_not(None).label("has_step_profile"),
            profile.step_refusal,
        )
        query = (
            select(*what, *state, func.count().label("configurations"))
            .join(PoolMemberRow, PoolMemberRow.configuration_id == row.id)
            .outerjoin(
                profile,
                (profile.architecture == row.architecture) & (profile.input_size == row.input_size),
            )
            .where(PoolMemberRow.pool == _existing(session, name))
            .group_by(*what, *state)
            .order_by(*what)
        )
        return [PoolPart(**found._mapping) for found in session.execute(query)]


def _existing(session: Session, name: str) -> str:
    names = list(session.scalars(select(PoolMemberRow.pool).distinct()))
    if name not in names:
        hint = nearest(name, names) if names else "make one with: trappm pool build --spec FILE"
        raise InputError(f"no pool {name!r}; {hint}")
    return name
