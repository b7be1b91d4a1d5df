"""Workloads: configurations, static profiles of architectures, and named pools."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Row, delete, func, or_, select
from sqlalchemy.orm import Session, aliased

from trappm.profiler.errors import InputError
from trappm.profiler.models.families import family_of
from trappm.profiler.nearest import nearest
from trappm.profiler.records import (
    Configuration,
    GraphTemplate,
    MemoryFormat,
    Optimizer,
    Pair,
    Phase,
    Precision,
)
from trappm.profiler.simulation.step_profile import TRACE_VERSION, StepProfile
from trappm.store.engine import insert_new
from trappm.store.records import PoolPart, PoolRecord, Refusal
from trappm.store.schema import (
    ArchitectureGraphRow,
    ConfigurationRow,
    GraphRow,
    NamedPoolRow,
    PoolMemberRow,
    StepProfileRow,
)
from trappm.store.transactions import Repository, call_of, reading, writing


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
        """Keeps the static profile of an architecture, or why there is none; replaces an older one.

        Args:
            architecture: a timm model name.
            input_size: in pixels.
            template: as `GraphTemplate.to_bytes` gives it; None if there is a refusal.
            refusal: None if there is a template.
            step: as `StepProfile.to_bytes` gives it; None if it was refused or not yet made.
            step_refusal: why there is no step profile.

        Raises:
            TrappmError: the template or the step profile is damaged; nothing is kept.
        """
        graph = None if template is None else GraphTemplate.from_bytes(template)
        facts = {} if step is None else _facts(step)
        if graph is not None:
            row = {
                "content_hash": graph.content_hash,
                "template": template,
                "node_count": len(graph.operators),
            }
            insert_new(session, GraphRow, [row])
        session.merge(
            ArchitectureGraphRow(
                architecture=architecture,
                input_size=input_size,
                graph_hash=None if graph is None else graph.content_hash,
                refusal=refusal,
            )
        )
        at = {"architecture": architecture, "input_size": input_size}
        if step is None and step_refusal is None:
            session.execute(delete(StepProfileRow).filter_by(**at))
        else:
            row = {"profile": step, **facts, "refusal": step_refusal}
            session.merge(StepProfileRow(**at, **row, trace_version=TRACE_VERSION))

    @reading
    def pairs_to_profile(
        self, session: Session, pairs: Sequence[Pair], *, also_refused: bool = False
    ) -> list[Pair]:
        """Those whose static profile is not complete: without a graph or a step profile.

        A step profile of an earlier version of the recorder counts as none.

        Args:
            pairs: of an architecture and an input size.
            also_refused: whether one that was refused is to be made too.
        """
        graph, step = ArchitectureGraphRow, StepProfileRow
        refused_or_complete = or_(graph.refusal.is_not(None), step.architecture.is_not(None))
        rows = session.execute(
            select(graph.architecture, graph.input_size)
            .outerjoin(
                step,
                (step.architecture == graph.architecture)
                & (step.input_size == graph.input_size)
                & (step.trace_version == TRACE_VERSION),
            )
            .where(step.profile.is_not(None) if also_refused else refused_or_complete)
        )
        known = {(architecture, input_size) for architecture, input_size in rows}
        return [pair for pair in pairs if pair not in known]

    @reading
    def outdated(self, session: Session) -> list[Pair]:
        """Architectures and sizes whose step profile an earlier version of the recorder made."""
        row = StepProfileRow
        query = select(row.architecture, row.input_size).where(row.trace_version < TRACE_VERSION)
        return [(a, size) for a, size in session.execute(query.order_by(row.architecture))]

    @reading
    def graph_templates(self, session: Session, pairs: Collection[Pair]) -> dict[Pair, bytes]:
        """The templates as bytes, for `GraphTemplate.from_bytes`; refused pairs are left out."""
        wanted = set(pairs)
        architectures = sorted({architecture for architecture, _ in wanted})
        rows = session.execute(
            select(
                ArchitectureGraphRow.architecture,
                ArchitectureGraphRow.input_size,
                GraphRow.template,
            )
            .join(GraphRow, GraphRow.content_hash == ArchitectureGraphRow.graph_hash)
            .where(ArchitectureGraphRow.architecture.in_(architectures))
        )
        return {(a, size): data for a, size, data in rows if (a, size) in wanted}

    @reading
    def step_profiles(self, session: Session, pairs: Collection[Pair]) -> dict[Pair, bytes]:
        """The step profiles, for `StepProfile.from_bytes`; pairs without one are left out."""
        wanted = set(pairs)
        architectures = sorted({architecture for architecture, _ in wanted})
        row = StepProfileRow
        rows = session.execute(
            select(row.architecture, row.input_size, row.profile).where(
                row.architecture.in_(architectures)
            )
        )
        return {(a, size): data for a, size, data in rows if data and (a, size) in wanted}

    @reading
    def refusals(self, session: Session) -> list[Refusal]:
        rows = session.scalars(
            select(ArchitectureGraphRow)
            .where(ArchitectureGraphRow.refusal.is_not(None))
            .order_by(ArchitectureGraphRow.architecture, ArchitectureGraphRow.input_size)
        )
        return [
            Refusal(architecture=r.architecture, input_size=r.input_size, reason=r.refusal)
            for r in rows
            if r.refusal is not None
        ]

    @reading
    def pairs_of_graph(self, session: Session, content_hash: str) -> list[Pair]:
        """The architectures and input sizes that have this graph."""
        row = ArchitectureGraphRow
        query = select(row.architecture, row.input_size).where(row.graph_hash == content_hash)
        return [(name, size) for name, size in session.execute(query)]

    @reading
    def pairs_of_same_graph(
        self, session: Session, architecture: str, input_size: int
    ) -> list[Pair]:
        """As `pairs_of_graph`, of the graph that this one has; empty if none is known."""
        row, same = ArchitectureGraphRow, aliased(ArchitectureGraphRow)
        query = (
            select(same.architecture, same.input_size)
            .join(row, row.graph_hash == same.graph_hash)
            .where(row.architecture == architecture, row.input_size == input_size)
        )
        return [(name, size) for name, size in session.execute(query)]

    @reading
    def graphs_of_size(self, session: Session, node_count: int) -> dict[str, bytes]:
        """The templates of so many nodes, as `GraphTemplate.to_bytes` gives them, by their hash."""
        query = select(GraphRow.content_hash, GraphRow.template).filter_by(node_count=node_count)
        return {row.content_hash: row.template for row in session.execute(query)}


def _facts(step: bytes) -> dict[str, int]:
    """The columns of a step profile that queries can use without unpacking it."""
    profile = StepProfile.from_bytes(step)
    return {
        "saved_bytes_constant": profile.saved_bytes.constant,
        "saved_bytes_per_sample": profile.saved_bytes.slope,
        "trainable_parameters": profile.trainable_parameters,
        "frozen_parameters": profile.frozen_parameters,
    }


def insert_configurations(session: Session, configurations: Iterable[Configuration]) -> list[str]:
    """Inserts those that are not there yet, within the transaction; the ids of all, each once."""
    rows = [
        {"id": c.id, "family": family_of(c.architecture), **c.to_dict()}
        for c in dict.fromkeys(configurations)
    ]
    insert_new(session, ConfigurationRow, rows)
    return [str(row["id"]) for row in rows]


def configuration_of(row: ConfigurationRow | Row[Any]) -> Configuration:
    return Configuration(
        architecture=row.architecture,
        batch_size=row.batch_size,
        input_size=row.input_size,
        precision=Precision(row.precision),
        memory_format=MemoryFormat(row.memory_format),
        optimizer=Optimizer(row.optimizer),
        phase=Phase(row.phase),
    )


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
