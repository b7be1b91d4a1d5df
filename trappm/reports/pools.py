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
    """Counts of a pool or a family; `graphs` and later ones count architectures by input size."""

    family: str
    """`all` for the whole pool."""
    architectures: int
    configurations: int
    usable: int
    """Number of configurations that have a graph."""
    graphs: int
    step_profiles: int
    refused: int
    steps_refused: int
    to_do: int


@dataclass(frozen=True)
class Refusals:
    """Pairs of a pool that were refused for one reason."""

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
    return PoolFacts(
        name=name,
        families=[_counts(f, [part for part in parts if part.family == f]) for f in families],
        total=_counts("all", parts),
        refusals=_by_reason((part.architecture, part.refusal) for part in parts),
        step_refusals=_by_reason((part.architecture, part.step_refusal) for part in parts),
    )


def print_pool(facts: PoolFacts) -> None:
    """Print the counts of a pool, its refusals, and what is still to be made."""
    columns = [name for name in vars(facts.total) if name not in {"steps_refused", "to_do"}]
    counted = [*facts.families, facts.total]
    rows = [[getattr(counts, name) for name in columns] for counts in counted]
    print_table(f"pool {facts.name}", columns, rows)
    for title, refusals in ("no graph", facts.refusals), ("no step profile", facts.step_refusals):
        refused = [(r.count, r.reason, ", ".join(r.architectures[:_EXAMPLES])) for r in refusals]
        if refused:
            print_table(title, ("pairs", "reason", "such as"), refused)
    if facts.total.to_do:
        print_line(
            f"{facts.total.to_do} static profiles are still to be made; run the command again"
        )


def _counts(family: str, parts: Sequence[PoolPart]) -> PoolCounts:
    with_graph = [part for part in parts if part.graph_hash is not None]
    return PoolCounts(
        family=family,
        architectures=len({part.architecture for part in parts}),
        configurations=sum(part.configurations for part in parts),
        usable=sum(part.configurations for part in with_graph),
        graphs=len(with_graph),
        step_profiles=sum(part.has_step_profile for part in parts),
        refused=sum(part.refusal is not None for part in parts),
        steps_refused=sum(part.step_refusal is not None for part in parts),
        to_do=sum(not part.is_profiled for part in parts),
    )


def _by_reason(refusals: Iterable[tuple[str, str | None]]) -> list[Refusals]:
    """Group refusals that differ only in names and numbers of the model."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for architecture, refusal in refusals:
        if refusal is not None:
            reason = re.sub(r"\d+", "N", refusal.replace(architecture, "it"))
            groups.setdefault(reason, []).append((architecture, refusal))
    return [
        Refusals(
            count=len(refused),
            reason=refused[0][1] if len(refused) == 1 else reason,
            architectures=sorted({architecture for architecture, _ in refused}),
        )
        for reason, refused in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
