"""Traced steps in the label store: the home of the cache that campaigns and pools share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Select, delete, func, select
from sqlalchemy.orm import Session

from trappm.profiler.errors import TrappmError, storable
from trappm.profiler.files import report_damage
from trappm.profiler.records import GraphTemplate, Pair
from trappm.profiler.traced_step import MAX_BYTES, Refusal, Trace, TraceCache, TraceKey
from trappm.store.engine import dialect_of, insert, insert_new
from trappm.store.records import TraceState
from trappm.store.schema import GraphRow, TraceRow
from trappm.store.transactions import Database, Repository, call_of, reading, writing


class SqlTraces(Repository, TraceCache):
    """Traced steps in SQL; their graphs are stored once, by their content."""

    def __init__(self, database: Database, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(database)
        self._max_bytes = max_bytes

    def get(self, key: TraceKey) -> Trace | Refusal | None:
        digest = key.digest
        row = self._row(digest)
        if row is None:
            return None
        refusal, data, template = row
        if data is None:
            return Refusal(refusal or "")
        try:
            with report_damage("trace"):
                trace = Trace.from_bytes(data)
                graph = None if template is None else GraphTemplate.from_bytes(template)
        except TrappmError:
            self._remove(digest)
            return None
        return replace(trace, graph=graph)

    @reading
    def _row(
        self, session: Session, digest: str
    ) -> tuple[str | None, bytes | None, bytes | None] | None:
        """Return refusal, step and graph of an entry."""
        row = TraceRow
        query = select(row.refusal, row.data, GraphRow.template).outerjoin_from(row, GraphRow)
        entry = session.execute(query.where(row.digest == digest)).one_or_none()
        return None if entry is None else (entry.refusal, entry.data, entry.template)

    @writing
    def _remove(self, session: Session, digest: str) -> None:
        session.execute(delete(TraceRow).filter_by(digest=digest))

    @writing
    def put(self, session: Session, key: TraceKey, made: Trace | Refusal) -> None:
        graph, graph_hash = made.graph if isinstance(made, Trace) else None, None
        if graph is not None:
            graph_hash = graph.content_hash
            graph_row = {"content_hash": graph_hash, "template": graph.to_bytes()}
            insert_new(session, GraphRow, [graph_row | {"node_count": len(graph.operators)}])
        refusal = made.refusal if isinstance(made, Trace) else made.reason
        values = {
            "architecture": key.model,
            "input_size": key.input_size,
            **_settings(key),
            "graph_hash": graph_hash,
            "refusal": None if refusal is None else storable(refusal),
            "data": _step_bytes(made) if isinstance(made, Trace) else None,
            "created_at": call_of(session).at,
        }
        values["size"] = len(values["data"] or b"")
        query = insert(dialect_of(session), TraceRow).values(digest=key.digest, **values)
        session.execute(query.on_conflict_do_update(index_elements=["digest"], set_=values))
        self._shrink(session)

    def _shrink(self, session: Session) -> None:
        """Remove the oldest entries beyond the largest size."""
        row = TraceRow
        if (session.scalar(select(func.sum(row.size))) or 0) <= self._max_bytes:
            return
        newer = func.sum(row.size).over(order_by=(row.created_at.desc(), row.digest))
        sizes = select(row.digest, newer.label("bytes")).subquery()
        too_old = select(sizes.c.digest).where(sizes.c.bytes > self._max_bytes)
        session.execute(delete(row).where(row.digest.in_(too_old)))
        used = select(row.graph_hash).where(row.graph_hash.is_not(None))
        session.execute(delete(GraphRow).where(GraphRow.content_hash.not_in(used)))

    @reading
    def missing(self, session: Session, keys: Collection[TraceKey]) -> list[TraceKey]:
        there = set(session.scalars(select(TraceRow.digest)))
        return [key for key in keys if key.digest not in there]

    @reading
    def states(self, session: Session, keys: Collection[TraceKey]) -> dict[TraceKey, TraceState]:
        """Return what is known of steps, without the steps; others are left out."""
        return states_of(session, keys)

    @reading
    def graphs(self, session: Session, keys: Collection[TraceKey]) -> dict[TraceKey, bytes]:
        """Return the graphs of steps for `GraphTemplate.from_bytes`; others are left out."""
        query = select(TraceRow.digest, GraphRow.template).join_from(TraceRow, GraphRow)
        return {key: template for key, (template,) in _by_key(session, query, keys)}

    @reading
    def steps(self, session: Session, keys: Collection[TraceKey]) -> dict[TraceKey, bytes]:
        """Return steps without their graphs for `Trace.from_bytes`; others are left out."""
        query = select(TraceRow.digest, TraceRow.data).where(TraceRow.data.is_not(None))
        return {key: data for key, (data,) in _by_key(session, query, keys)}

    @reading
    def pairs_of_graph(self, session: Session, content_hash: str) -> set[Pair]:
        """Return the architectures and input sizes that have this graph."""
        return _pairs(session, graph_hash=content_hash)

    @reading
    def pairs_of_step(self, session: Session, key: TraceKey, trace: Trace) -> set[Pair]:
        """Return the architectures and input sizes with this step in the settings of a key."""
        graph_hash = None if trace.graph is None else trace.graph.content_hash
        return _pairs(session, **_settings(key), graph_hash=graph_hash, data=_step_bytes(trace))

    @reading
    def graphs_of_size(self, session: Session, node_count: int) -> dict[str, bytes]:
        """Return the graphs with this number of nodes, by their hash."""
        query = select(GraphRow.content_hash, GraphRow.template).filter_by(node_count=node_count)
        return {row.content_hash: row.template for row in session.execute(query)}


def states_of(session: Session, keys: Collection[TraceKey]) -> dict[TraceKey, TraceState]:
    """Return `SqlTraces.states` within a transaction."""
    query = select(TraceRow.digest, TraceRow.graph_hash, TraceRow.refusal)
    return {key: TraceState(*state) for key, state in _by_key(session, query, keys)}


def _step_bytes(trace: Trace) -> bytes:
    return replace(trace, graph=None).to_bytes()


def _settings(key: TraceKey) -> dict[str, Any]:
    """Return the columns of how a step is run."""
    precision, memory_format, execution, fused_attention = key.settings
    return {
        "precision": str(precision),
        "memory_format": str(memory_format),
        "execution": str(execution),
        "fused_attention": fused_attention,
        "phase": str(key.phase),
    }


def _pairs(session: Session, **columns: Any) -> set[Pair]:
    query = select(TraceRow.architecture, TraceRow.input_size).filter_by(**columns)
    return {(name, size) for name, size in session.execute(query) if size is not None}


def _by_key(
    session: Session, query: Select[*tuple[Any, ...]], keys: Collection[TraceKey]
) -> Iterator[tuple[TraceKey, Sequence[Any]]]:
    """Yield the rows of a query, whose first column is the digest, by the keys that have one."""
    names = {key.model for key in keys}
    rows = {
        digest: row
        for digest, *row in session.execute(query.where(TraceRow.architecture.in_(names)))
    }
    for key in keys:
        if (row := rows.get(key.digest)) is not None:
            yield key, row
