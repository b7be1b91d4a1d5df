"""Contents of a pool, counted by family as in Table I of the paper."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trappm.terminal.tables import print_line, print_table

if TYPE_CHECKING:
    from trappm.store import PoolPart, Store

_EXAMPLES = 3


@dataclass(frozen=True)
class PoolCounts:
    """Counts of a pool or a family; `steps` and later ones count distinct steps."""

    family: str
    """`all` for the whole pool."""
    architectures: int
    configurations: int
    usable: int
    """Number of configurations that have a graph."""
    steps: int
    traced: int
    """Number of steps with graph, allocations and kernels."""
    refused: int
    """Number of steps without a graph."""
    steps_refused: int
    """Number of steps with a graph only."""
    to_do: int


@dataclass(frozen=True)
class Refusals:
    """Steps of a pool that were refused for one reason."""

    count: int
    reason: str
    architectures: Sequence[str]


@dataclass(frozen=True)
class PoolFacts:
    """Contents of a pool."""

    name: str
    families: Sequence[PoolCounts]
    total: PoolCounts
    refusals: Sequence[Refusals]
    step_refusals: Sequence[Refusals]


def pool_facts(store: Store, name: str) -> PoolFacts:
    """Return the counts and refusals of a pool.

    Raises:
        InputError: There is no pool of this name.
    """
    parts = store.pools.parts(name)
    families = sorted({part.family for part in parts})
    refused = [part for part in parts if part.state and part.state.refusal]
    return PoolFacts(
        name=name,
        families=[_counts(f, [part for part in parts if part.family == f]) for f in families],
        total=_counts("all", parts),
        refusals=_by_reason(part for part in refused if not _has_graph(part)),
        step_refusals=_by_reason(part for part in refused if _has_graph(part)),
    )


def print_pool(facts: PoolFacts) -> None:
    """Print the counts of a pool, its refusals, and what is still to be made."""
    columns = [name for name in vars(facts.total) if name not in {"steps_refused", "to_do"}]
    counted = [*facts.families, facts.total]
    rows = [[getattr(counts, name) for name in columns] for counts in counted]
    print_table(f"pool {facts.name}", columns, rows)
    for title, refusals in ("no graph", facts.refusals), ("no step", facts.step_refusals):
        refused = [(r.count, r.reason, ", ".join(r.architectures[:_EXAMPLES])) for r in refusals]
        if refused:
            print_table(title, ("steps", "reason", "such as"), refused)
    if facts.total.to_do:
        print_line(f"{facts.total.to_do} steps are still to be traced; run the command again")


def _has_graph(part: PoolPart) -> bool:
    return part.state is not None and part.state.graph_hash is not None


def _counts(family: str, parts: Sequence[PoolPart]) -> PoolCounts:
    known = [part.state for part in parts if part.state is not None]
    return PoolCounts(
        family=family,
        architectures=len({part.key.model for part in parts}),
        configurations=sum(part.configurations for part in parts),
        usable=sum(part.configurations for part in parts if _has_graph(part)),
        steps=len(parts),
        traced=sum(state.refusal is None for state in known),
        refused=sum(state.graph_hash is None for state in known),
        steps_refused=sum(bool(state.graph_hash and state.refusal) for state in known),
        to_do=len(parts) - len(known),
    )


def _by_reason(refused: Iterable[PoolPart]) -> list[Refusals]:
    """Group refusals that differ only in names and numbers of the model."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for part in refused:
        name, refusal = part.key.model, (part.state and part.state.refusal) or ""
        reason = re.sub(r"\d+", "N", refusal.replace(name, "it"))
        groups.setdefault(reason, []).append((name, refusal))
    return [
        Refusals(
            count=len(group),
            reason=group[0][1] if len(group) == 1 else reason,
            architectures=sorted({architecture for architecture, _ in group}),
        )
        for reason, group in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
