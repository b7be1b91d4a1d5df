"""What can be measured: configurations, and the graphs of their architectures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from profiler.families import family_of
from profiler.records import (
    Configuration,
    GraphTemplate,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
)
from store.database import Database, insert_new
from store.records import Refusal
from store.schema import ArchitectureGraphRow, ConfigurationRow, GraphRow

Pair = tuple[str, int]
"""An architecture and an input size in pixels: what a graph template is made for."""


class Workloads(Database):
    """The part of the store that keeps configurations and graphs."""

    def add_configurations(self, configurations: Iterable[Configuration]) -> None:
        """Stores those that are not there yet."""
        with self._writing() as session:
            insert_configurations(session, configurations)

    def save_graph(
        self, architecture: str, input_size: int, template: bytes | None, refusal: str | None
    ) -> None:
        """Keeps the graph template of an architecture, or why there is none; replaces an older one.

        Args:
            architecture: a timm model name.
            input_size: in pixels.
            template: as `GraphTemplate.to_bytes` gives it; None if there is a refusal.
            refusal: None if there is a template.
        """
        graph = None if template is None else GraphTemplate.from_bytes(template)
        with self._writing() as session:
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

    def pairs_without_graph(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Those that were never profiled: neither with a graph nor refused."""
        with self._reading() as session:
            rows = session.execute(
                select(ArchitectureGraphRow.architecture, ArchitectureGraphRow.input_size)
            )
            known = {(architecture, input_size) for architecture, input_size in rows}
        return [pair for pair in pairs if pair not in known]

    def graph_templates(self, pairs: Iterable[Pair]) -> dict[Pair, bytes]:
        """The templates as bytes, for `GraphTemplate.from_bytes`; refused pairs are left out."""
        wanted = set(pairs)
        architectures = sorted({architecture for architecture, _ in wanted})
        with self._reading() as session:
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

    def graph_for(self, architecture: str, input_size: int) -> GraphTemplate | None:
        """The graph template; None if it was refused or never profiled."""
        found = self.graph_templates([(architecture, input_size)])
        return GraphTemplate.from_bytes(*found.values()) if found else None

    def refusals(self) -> list[Refusal]:
        with self._reading() as session:
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
