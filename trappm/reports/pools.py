"""What a pool holds, counted by family as in the paper's Table I, and a bar while one is built."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from trappm.profiler.records import size_text
from trappm.terminal.progress_bar import LiveBar
from trappm.terminal.tables import console, table

if TYPE_CHECKING:
    from trappm.cluster.profiles import ProfiledGraph
    from trappm.store import PoolPart, Store

_EXAMPLES = 3


@dataclass(frozen=True)
class PoolCounts:
    """Of a pool or a family in it; from `graphs` on, pairs of an architecture and an input size."""

    architectures: int
    configurations: int
    """All of the pool."""
    usable: int
    """Those of them that have a graph."""
    graphs: int
    step_profiles: int
    refused: int
    steps_refused: int
    to_do: int


@dataclass(frozen=True)
class Refusals:
    """Pairs of a pool that were refused for the same reason."""

    count: int
    reason: str
    architectures: Sequence[str]


@dataclass(frozen=True)
class PoolFacts:
    """What a pool holds."""

    name: str
    built_at: str
    families: Mapping[str, PoolCounts]
    total: PoolCounts
    refusals: Sequence[Refusals]
    step_refusals: Sequence[Refusals]

    def to_json(self) -> dict[str, Any]:
        families = [{"family": name, **asdict(counts)} for name, counts in self.families.items()]
        return {**asdict(self), "families": families}


def pool_facts(store: Store, name: str | None = None) -> PoolFacts | None:
    """Counts and refusals of the pool of this name, the latest one without a name.

    Returns:
        None if no name is given and there is no pool yet.

    Raises:
        InputError: there is no pool of this name.
    """
    pools = store.pools.all()
    if name is None and not pools:
        return None
    name = name or pools[0].name
    parts = store.pools.parts(name)
    families = sorted({part.family for part in parts})
    return PoolFacts(
        name=name,
        built_at=next(pool.built_at for pool in pools if pool.name == name),
        families={f: _counts(part for part in parts if part.family == f) for f in families},
        total=_counts(parts),
        refusals=_by_reason((part.architecture, part.refusal) for part in parts),
        step_refusals=_by_reason((part.architecture, part.step_refusal) for part in parts),
    )


def print_pool(facts: PoolFacts | None) -> None:
    if facts is None:
        console().print("no pool yet; make one with: trappm pool build --spec FILE")
        return
    # What fits a terminal; refused steps, and what is to do, are told below.
    columns = [name for name in vars(facts.total) if name not in {"steps_refused", "to_do"}]
    rows = [
        [family, *(getattr(counts, name) for name in columns)]
        for family, counts in [*facts.families.items(), ("all", facts.total)]
    ]
    console().print(table(f"pool {facts.name}", ("family", *columns), rows))
    for refusals, title in (
        (facts.refusals, "no graph"),
        (facts.step_refusals, "no step profile"),
    ):
        if refusals:
            refused = [
                (r.count, r.reason, ", ".join(r.architectures[:_EXAMPLES])) for r in refusals
            ]
            console().print(table(title, ("pairs", "reason", "such as"), refused))
    if facts.total.to_do:
        console().print(
            f"{facts.total.to_do} static profiles are still to be made; the command that "
            "built it goes on where it stopped"
        )


def _counts(parts: Iterable[PoolPart]) -> PoolCounts:
    parts = list(parts)
    with_graph = [part for part in parts if part.graph_hash is not None]
    return PoolCounts(
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
    """Refusals that differ only in names and numbers of the model count as one reason."""
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


class BuildDisplay(LiveBar):
    """Shows how far a pool is: on a screen with a live bar, into a file as lines only."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("to go"),
            TimeRemainingColumn(),
        )
        self._task = self._bar.add_task("static profiles", total=None)
        self._shown_percent = 0
        self._done: tuple[int, int] | None = None

    @property
    def how_far(self) -> str:
        """What to add to the news that the build has ended early."""
        return (
            "" if self._done is None else " with {} of {} static profiles made".format(*self._done)
        )

    def show(self, done: int, total: int, latest: ProfiledGraph | None) -> None:
        self._done = done, total
        self._safely(lambda: self._show(done, total, latest))

    def _show(self, done: int, total: int, latest: ProfiledGraph | None) -> None:
        if latest is None:
            self._console.print(f"static profiles: {done} of {total} are there")
            self._bar.reset(self._task, total=total, completed=done)
            return
        pair = f"{latest.architecture} at {size_text(latest.architecture, latest.input_size)}"
        self._bar.line_below = pair
        self._bar.update(self._task, completed=done)
        for part, refusal in (("graph", latest.refusal), ("step profile", latest.step_refusal)):
            if refusal is not None:
                what = f"no {part} of {pair}: {refusal}"
                self._console.print(f"[dim]{escape(what)}[/]", soft_wrap=True)
        percent = 100 * done // total
        if not self._console.is_terminal and percent >= self._shown_percent + 10:
            self._shown_percent = percent
            self._console.print(f"[dim]static profiles: {done} of {total}[/]")
